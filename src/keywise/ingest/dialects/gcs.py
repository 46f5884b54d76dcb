"""Notifications of Cloud Storage that Pub/Sub delivers: attributes say what happened, the body describes the object."""

from collections.abc import Mapping

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
from keywise.ingest.versions import VersionScale, generation_version

_DELETIONS = {
    "OBJECT_FINALIZE": False,
    "OBJECT_DELETE": True,
    # In a bucket with versioning, the object has no current version any more.
    "OBJECT_ARCHIVE": True,
}


class _Metadata(msgspec.Struct):
    """What the body says that the attributes do not. It is the object resource of the JSON API."""

    size: str | int | None = None
    etag: str | None = None


_decode = msgspec.json.Decoder(_Metadata).decode


def read_gcs(body: bytes, attributes: Mapping[str, str] | None) -> list[Announcement]:
    """Read a notification of Cloud Storage. It announces one object."""
    attributes = attributes or {}
    event = _needed(attributes, "eventType")
    bucket, name = _needed(attributes, "bucketId"), _needed(attributes, "objectId")
    uri = uri_of("gs", bucket, name)
    deleted = _DELETIONS.get(event)
    if deleted is None:
        return [Skipped(SkipReason.OTHER_EVENT, f"{event[:100]!r} of {uri[:200]!r} changes no content")]
    if deleted and attributes.get("overwrittenByGeneration"):
        # An overwritten object is not gone. The creation of its next generation may come before this or after it.
        newer = attributes["overwrittenByGeneration"]
        return [Skipped(SkipReason.OVERWRITTEN, f"{uri[:200]!r} has the newer generation {newer[:20]!r}")]
    metadata = _metadata(body, attributes)
    try:
        version = generation_version(_needed(attributes, "objectGeneration"), deleted=deleted)
        found = ObjectEvent(
            uri=uri,
            bucket=bucket,
            name=name,
            deleted=deleted,
            version=version,
            scale=VersionScale.GCS_GENERATION,
            etag=metadata.etag,
            size=size_of(metadata.size),
        )
        return [checked(found)]
    except (MalformedError, VersionError) as error:
        return [Unreadable(str(error))]


def _needed(attributes: Mapping[str, str], name: str) -> str:
    value = attributes.get(name)
    if not value:
        raise MalformedError(
            f"the message has no attribute {name}; subscribe to the topic that the notifications of a bucket are sent "
            "to, and keep the attributes where messages are forwarded"
        )
    return value


def _metadata(body: bytes, attributes: Mapping[str, str]) -> _Metadata:
    if attributes.get("payloadFormat") != "JSON_API_V1" or not body:
        return _Metadata()
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(
            f"the notification cannot be read as one of Cloud Storage: {error}; read other messages with a function: "
            "dialect=…"
        ) from error
