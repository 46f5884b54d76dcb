"""The values that travel: a delivery carries a change to a key, and an outcome says what became of it."""

import enum
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from keywise.core.errors import MalformedError, VersionError

T = TypeVar("T")

Order: TypeAlias = tuple[int, int, int]
"""(era, version, generation), compared left to right."""

KEY_MAX_BYTES = 512
VERSION_MIN, VERSION_MAX = -(2**63), 2**63 - 1
UNVERSIONED_GENERATION = -1
"""No reindex reaches it, so `(era, 0, -1)` can stand for a change that has no version."""


class Outcome(enum.StrEnum):
    """What became of a change."""

    APPLIED = "applied"
    STALE = "stale"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    BUSY = "busy"
    FAILED = "failed"
    DEAD = "dead"


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One hand-over by a source: the message's id stays, the receipt is new each time."""

    id: str | int
    receipt: str | int
    body: bytes
    sent_at: float
    """By the wall clock of the source."""
    count: int = 1
    """How often it came, this time included."""
    headers: Mapping[str, str] | None = None


class ChangeHeader(msgspec.Struct, gc=False):
    """What a ledger is asked for: the right to bring one key to one order."""

    key: str
    order: Order | None
    """None asks for exclusion only."""
    deleted: bool = False
    sent_at: float = math.inf
    """By the wall clock of the source. Sent longer ago than the retention, only a key that is remembered is judged."""


class Change(ChangeHeader, Generic[T], gc=False):
    """The whole state of a key at a version, or its deletion."""

    order: Order
    body: bytes = b""
    decode: Callable[[bytes], Any] | None = None

    @property
    def version(self) -> int | None:
        """The version from upstream; None for a change that has none."""
        return None if is_unversioned(self.order) else self.order[1]

    @property
    def value(self) -> T:
        """The body as the pipeline's type; decoded each time it is asked for."""
        decode = self.decode or msgspec.json.decode
        return decode(self.body)  # type: ignore[no-any-return]


class Put(msgspec.Struct, frozen=True):
    """A message says: this key now looks like the body."""

    key: str
    version: int | datetime | None = None


class Delete(msgspec.Struct, frozen=True):
    """A message says: this key is gone."""

    key: str
    version: int | datetime | None = None


class Ignore(msgspec.Struct, frozen=True):
    """A message says nothing to this pipeline; it is acked and counted."""

    reason: str = ""


def order_of(version: int | datetime | None, era: int = 0) -> Order:
    """The order of a fresh change at a version."""
    if version is None:
        return (era, 0, UNVERSIONED_GENERATION)
    return (era, version_of(version), 0)


def is_unversioned(order: Order) -> bool:
    return order[2] == UNVERSIONED_GENERATION


def version_of(moment: int | datetime | str) -> int:
    """A version from an integer, a datetime or its RFC 3339 text (as microseconds since 1970)."""
    if isinstance(moment, bool) or not isinstance(moment, int | datetime | str):
        raise VersionError(f"version {moment!r} must be a whole number or a datetime")
    if isinstance(moment, str):
        moment = _parsed(moment)
    if isinstance(moment, datetime):
        moment = _microseconds(moment)
    if not VERSION_MIN <= moment <= VERSION_MAX:
        raise VersionError(f"version {moment} does not fit into 64 bits")
    return moment


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise VersionError(f"version {text!r} is neither a whole number nor an RFC 3339 time") from None


def _microseconds(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise VersionError(
            f"version {moment.isoformat()} has no time zone: two hosts would read it differently; add one"
        )
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def check_key(key: str) -> None:
    """Raise `MalformedError` for a key that not every ledger can store."""
    if not key:
        raise MalformedError("key is empty")
    if "\0" in key:
        raise MalformedError(f"key {key[:40]!r} contains NUL")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise MalformedError(f"key {key[:40]!r} contains a lone surrogate") from None
    if size > KEY_MAX_BYTES:
        raise MalformedError(f"key {key[:40]!r}… has {size} bytes, the limit is {KEY_MAX_BYTES}")
