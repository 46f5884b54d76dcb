"""Notifications of S3, alone or in an envelope of SNS or EventBridge, and those of MinIO and versitygw."""

import enum
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from keywise.core.errors import MalformedError, VersionError
from keywise.ingest.notification import (
    Announcement,
    ObjectEvent,
    Skipped,
    SkipReason,
    Unreadable,
    checked,
    size_of,
    uri_of,
)
from keywise.ingest.versions import (
    VersionScale,
    clock_version,
    counter_version,
    event_time_version,
    sequencer_version,
)

ENVELOPES_MAX = 3
"""EventBridge may send to SNS, and SNS to a queue."""


class Sender(enum.Enum):
    """The service that sent a record. They write names and sequencers differently."""

    AWS = enum.auto()
    EVENTBRIDGE = enum.auto()
    MINIO = enum.auto()
    VERSITYGW = enum.auto()


class _Bucket(msgspec.Struct):
    name: str


class _Object(msgspec.Struct):
    key: str
    size: int | str | None = None
    eTag: str | None = None
    etag: str | None = None
    sequencer: str | None = None


class _Content(msgspec.Struct):
    bucket: _Bucket
    object: _Object


class _Record(msgspec.Struct):
    event: str = msgspec.field(name="eventName")
    s3: _Content
    source: str = msgspec.field(name="eventSource", default="aws:s3")
    time: str | None = msgspec.field(name="eventTime", default=None)


class _Message(msgspec.Struct):
    """The fields that distinguish the kinds of messages."""

    records: list[msgspec.Raw] | None = msgspec.field(name="Records", default=None)
    test_event: str | None = msgspec.field(name="Event", default=None)
    test_bucket: str = msgspec.field(name="Bucket", default="")
    sns_type: str | None = msgspec.field(name="Type", default=None)
    sns_message: str = msgspec.field(name="Message", default="")
    detail_type: str | None = msgspec.field(name="detail-type", default=None)
    detail: _Content | None = None
    source: str = ""
    time: str | None = None


_decode_message: Callable[[bytes], _Message | list[msgspec.Raw]] = msgspec.json.Decoder(
    _Message | list[msgspec.Raw]
).decode
_decode_record = msgspec.json.Decoder(_Record).decode


def read_s3(body: bytes) -> list[Announcement]:
    """Read a notification of S3, in as many envelopes as it has. One bad record does not affect the others."""
    for _ in range(ENVELOPES_MAX):
        message = _decoded(_decode_message, body, "the notification")
        if isinstance(message, list):
            # versitygw sent bare lists before it had `Records`.
            message = _Message(records=message)
        if message.sns_type is None:
            return _read_message(message)
        body = _without_sns(message)
    raise MalformedError(f"the notification is in more than {ENVELOPES_MAX} envelopes; check how it is forwarded")


def _read_message(message: _Message) -> list[Announcement]:
    if message.records:
        return [_announced(record) for record in message.records]
    if message.test_event is not None:
        bucket = message.test_bucket[:100]
        return [Skipped(SkipReason.TEST_EVENT, f"{message.test_event[:100]!r} of the bucket {bucket!r}")]
    if message.detail_type is not None:
        return [_announced_by_eventbridge(message)]
    raise MalformedError(
        "the notification has no Records; point the bucket's notifications at this queue, or read other messages "
        "with a function: dialect=…"
    )


def _without_sns(message: _Message) -> bytes:
    if message.sns_type != "Notification":
        raise MalformedError(
            f"SNS sent a {str(message.sns_type)[:40]!r}; confirm the subscription of the queue at its SubscribeURL if "
            "you want it, and delete this dead letter"
        )
    return message.sns_message.encode()


def _announced(raw: msgspec.Raw) -> Announcement:
    try:
        record: _Record = _decoded(_decode_record, raw, "a record of the notification")
        return _event(_sender(record), record.event, record.s3, record.time)
    except (MalformedError, VersionError) as error:
        return Unreadable(str(error))


def _announced_by_eventbridge(message: _Message) -> Announcement:
    if message.source != "aws.s3" or message.detail is None:
        raise MalformedError(
            f"EventBridge sent an event of {message.source[:40]!r} that is none of S3; "
            'let the rule match {"source": ["aws.s3"]}, without an input transformer'
        )
    try:
        return _event(Sender.EVENTBRIDGE, message.detail_type or "", message.detail, message.time)
    except (MalformedError, VersionError) as error:
        return Unreadable(str(error))


def _sender(record: _Record) -> Sender:
    if record.source == "minio:s3":
        return Sender.MINIO
    if record.source != "aws:s3":
        raise MalformedError(
            f"a service that calls itself {record.source[:40]!r} sent this notification, and how it encodes names is "
            "not known; read it with a function: dialect=…"
        )
    # Only the configuration of AWS spells event names with the prefix; in a record, versitygw does.
    return Sender.VERSITYGW if record.event.startswith("s3:") else Sender.AWS


def _event(sender: Sender, event: str, content: _Content, time: str | None) -> Announcement:
    name = _decoded_name(sender, content.object.key)
    uri = uri_of("s3", content.bucket.name, name)
    deleted = _is_deletion(event)
    if deleted is None:
        return Skipped(SkipReason.OTHER_EVENT, f"{event[:100]!r} of {uri[:200]!r} changes no content")
    version, scale = _version(sender, content.object.sequencer, time, deleted)
    etag = content.object.eTag or content.object.etag
    found = ObjectEvent(
        uri=uri,
        bucket=content.bucket.name,
        name=name,
        deleted=deleted,
        version=version,
        scale=scale,
        etag=etag.strip('"') if etag else None,
        size=size_of(content.object.size),
    )
    return checked(found)


def _is_deletion(event: str) -> bool | None:
    """Return whether the event deletes an object or writes one; None if it does neither, or is not known."""
    match event.removeprefix("s3:").split(":"):
        case ["ObjectCreated", action]:
            return None if action in _MINIO_METADATA else False
        case ["ObjectRemoved", "NoOP"]:
            # MinIO: there was nothing to remove.
            return None
        case ["ObjectRemoved" | "LifecycleExpiration", _] | ["Object Deleted"]:
            return True
        case ["Object Created"]:
            return False
        case _:
            return None


_MINIO_METADATA = {"PutTagging", "DeleteTagging", "PutRetention", "PutLegalHold"}
"""MinIO announces these as creations."""


def _decoded_name(sender: Sender, key: str) -> str:
    """Decode the name of an object once. AWS and MinIO encode it, with `+` for a space; the others do not."""
    if sender in {Sender.EVENTBRIDGE, Sender.VERSITYGW}:
        return key
    try:
        return unquote_plus(key, errors="strict")
    except UnicodeDecodeError:
        raise MalformedError(
            f"the name {key[:100]!r} is no UTF-8 when decoded; if another service than S3 sent it, read it with a "
            "function: dialect=…"
        ) from None


def _version(sender: Sender, sequencer: str | None, time: str | None, deleted: bool) -> tuple[int, VersionScale]:
    if not sequencer:
        if not time:
            raise MalformedError("the notification has neither a sequencer nor a time; check the service that sent it")
        return event_time_version(time, deleted=deleted), VersionScale.EVENT_TIME
    match sender:
        case Sender.MINIO:
            return clock_version(sequencer, deleted=deleted), VersionScale.MINIO_CLOCK
        case Sender.VERSITYGW:
            return counter_version(sequencer), VersionScale.S3_COUNTER
        case Sender.AWS | Sender.EVENTBRIDGE:
            return sequencer_version(sequencer), VersionScale.S3_SEQUENCER


def _decoded(decode: Callable[[Any], Any], text: bytes | msgspec.Raw, what: str) -> Any:
    try:
        return decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(
            f"{what} cannot be read as one of S3: {error}; read other messages with a function: dialect=…"
        ) from error
