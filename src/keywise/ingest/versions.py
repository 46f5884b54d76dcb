"""Versions of objects: what each kind of store offers to order the events of one object, as a 64-bit integer.

The versions of one pipeline are on one scale, because two scales cannot be compared: the first event fixes the scale,
and an event on another one becomes a dead letter. The time at which a notification arrives is never a version.
"""

import enum
import re

from keywise.core.change import VERSION_MAX, VERSION_MIN, version_of
from keywise.core.errors import VersionError


class OrderPromise(enum.StrEnum):
    """What the versions of a scale promise of the order in which events are applied."""

    NEWEST_WINS = "newest wins"
    CONVERGES = "converges"
    """Clocks order the events. Two within one tick, or on hosts whose clocks differ, may change places; what is in the
    store when the later one is processed is right, because the object is read then."""
    ONCE = "once per object"


class VersionScale(enum.StrEnum):
    """The scale that a version belongs to. Compare scales with `==`; a pipeline stores the value of its first event."""

    S3_SEQUENCER = "s3-sequencer"
    S3_COUNTER = "s3-counter"
    """The counter of versitygw. It begins at 1 when the gateway starts: raise the pipeline's era after a restart."""
    MINIO_CLOCK = "minio-clock"
    GCS_GENERATION = "gcs-generation"
    EVENT_TIME = "event-time"
    FUNCTION = "function"
    """The versions that a function of the user returns."""
    UNVERSIONED = "unversioned"

    @property
    def promise(self) -> OrderPromise:
        return _PROMISES.get(self, OrderPromise.NEWEST_WINS)


_PROMISES = {
    VersionScale.MINIO_CLOCK: OrderPromise.CONVERGES,
    VersionScale.EVENT_TIME: OrderPromise.CONVERGES,
    VersionScale.UNVERSIONED: OrderPromise.ONCE,
}
_NAMES = {
    VersionScale.S3_SEQUENCER: "the sequencer of S3",
    VersionScale.S3_COUNTER: "the counter of versitygw",
    VersionScale.MINIO_CLOCK: "the clock of MinIO",
    VersionScale.GCS_GENERATION: "the generation of Cloud Storage",
    VersionScale.EVENT_TIME: "the time of the event",
    VersionScale.FUNCTION: "the versions of a function",
    VersionScale.UNVERSIONED: "no version",
}


def scale_conflict(fixed: VersionScale | None, found: VersionScale) -> str | None:
    """Return why an event cannot join a pipeline of this scale, or None if it can; `fixed=None`: no event came yet."""
    if fixed is None or fixed is found:
        return None
    return (
        f"this event is ordered by {_NAMES[found]} ({found}), and the events before it by {_NAMES[fixed]} ({fixed}): "
        "these cannot be compared; announce each kind of event to a pipeline of its own"
    )


SEQUENCER_DIGITS, SHORT_SEQUENCER_DIGITS = 18, 16
SEQUENCER_BASE = 0x54000000 << 32
"""2014-08-29, shortly before S3 sent its first notification."""


def sequencer_version(sequencer: str) -> int:
    """Return the version of an S3 sequencer.

    A sequencer is a time in hexadecimal: `0055AED6DCD90281E5` is 0x0055AED6DC seconds since 1970 and 0xD90281E5 / 2**32
    of a second. EventBridge may leave out the leading `00`, and zeros may be missing at the end, so AWS documents to
    pad on the right before comparing: to 18 digits with the leading `00`, else to 16.

    These are 64 bits today, and seconds beyond 2038 would use the sign. A fixed base is subtracted: from the first
    notification of S3 until 2082-09-16 versions are not negative and fit 63 bits, as search engines demand. A later
    end would need negative versions today, or fewer bits of the fraction, which would make two writes one. A
    sequencer beyond the end raises `VersionError`; a pipeline of that day needs a new era and a new base.
    """
    number = _hexadecimal(sequencer)
    digits = SEQUENCER_DIGITS if sequencer.startswith("00") else SHORT_SEQUENCER_DIGITS
    if len(sequencer) > digits:
        raise VersionError(
            f"the sequencer {sequencer[:40]!r} has {len(sequencer)} digits; S3 sends at most {SHORT_SEQUENCER_DIGITS}, "
            f"or {SEQUENCER_DIGITS} with a leading 00; if another service sent it, read it with a function: dialect=…"
        )
    version = (number << 4 * (digits - len(sequencer))) - SEQUENCER_BASE
    return _fitting(version, f"the sequencer {sequencer!r}")


def counter_version(sequencer: str) -> int:
    """Return the version of a sequencer that counts, as versitygw's does: `FF` comes before `100`."""
    return _fitting(_hexadecimal(sequencer), f"the sequencer {sequencer[:40]!r}")


def clock_version(sequencer: str, *, deleted: bool) -> int:
    """Return the version of a sequencer of MinIO: nanoseconds since 1970, in hexadecimal.

    MinIO takes the time of the object's last modification if it knows it, so a deletion may carry that of the object
    that it deletes. It comes after the object all the same: versions are doubled, and a deletion adds one.
    """
    return _fitting(2 * _hexadecimal(sequencer) + deleted, f"the sequencer {sequencer[:40]!r}")


def generation_version(generation: str, *, deleted: bool) -> int:
    """Return the version of a generation of Cloud Storage.

    A deletion carries the generation that it deletes, and would be a duplicate of that generation's creation.
    Therefore versions are doubled, and a deletion adds one.
    """
    if not _is_decimal(generation):
        raise VersionError(
            f"the generation {generation[:40]!r} is no whole number; is this a notification of a bucket?"
        )
    return _fitting(2 * int(generation) + deleted, f"the generation {generation!r}")


def event_time_version(moment: str, *, deleted: bool) -> int:
    """Return the version of an event that has only its time: microseconds, and one more for a deletion.

    Most services send milliseconds, so a deletion may carry the time of the object that it deletes.
    """
    return version_of(moment) + deleted


def _hexadecimal(sequencer: str) -> int:
    if not _is_hexadecimal(sequencer):
        raise VersionError(
            f"the sequencer {sequencer[:40]!r} is no hexadecimal number; if another service than S3 sends it, "
            "read it with a function: dialect=…"
        )
    return int(sequencer, 16)


def _fitting(version: int, origin: str) -> int:
    if not VERSION_MIN <= version <= VERSION_MAX:
        raise VersionError(f"{origin} does not fit into 64 bits; check the service that sent it")
    return version


# Bounded, since the conversion of a long number takes quadratic time.
_is_hexadecimal = re.compile("[0-9A-Fa-f]{1,64}").fullmatch
_is_decimal = re.compile("[0-9]{1,64}").fullmatch
