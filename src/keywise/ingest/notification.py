"""What a notification says: objects that were written or deleted, and what is skipped or cannot be read."""

import enum
import re
from typing import TypeAlias

import msgspec

from keywise.core.change import Order, order_of
from keywise.core.errors import MalformedError
from keywise.ingest.keys import object_key
from keywise.ingest.versions import VersionScale

FOLDER_ENDINGS = ("/", "_$folder$")
"""How the consoles of stores, and Hadoop, name the empty objects that stand for folders."""


class ObjectEvent(msgspec.Struct, frozen=True):
    """An object that was written or deleted. Its URI holds the name as the store has it; nothing in it is encoded."""

    uri: str
    bucket: str
    name: str
    deleted: bool
    version: int | None
    """None on the scale `UNVERSIONED`."""
    scale: VersionScale
    etag: str | None = None
    """As the notification spells it, without quotes. That of Cloud Storage is not the one that its reads return."""
    size: int | None = None

    @property
    def key(self) -> str:
        """The key of the object in the ledger."""
        return object_key(self.uri)

    @property
    def order(self) -> Order:
        return order_of(self.version)


class SkipReason(enum.StrEnum):
    """Why a part of a notification concerns no object of the pipeline. Its message is acked, and it is counted."""

    TEST_EVENT = "test event"
    OTHER_EVENT = "other event"
    FOLDER = "folder"
    OVERWRITTEN = "overwritten"
    """The object has a newer generation, of which another notification comes."""
    OTHER_BUCKET = "other bucket"
    OTHER_NAME = "other name"
    BY_FUNCTION = "by function"
    """The function of the user returned `Ignore`."""


class Skipped(msgspec.Struct, frozen=True):
    """A part of a notification that is skipped, with a sentence for the operator. Names in it are escaped."""

    reason: SkipReason
    detail: str


class Unreadable(msgspec.Struct, frozen=True):
    """A part of a notification that becomes a dead letter; the cause says what to do. The other parts are applied."""

    cause: str


Announcement: TypeAlias = ObjectEvent | Skipped | Unreadable


class ObjectSelection(msgspec.Struct, frozen=True):
    """The objects that a pipeline reads: one bucket or folder, and in it the names with a prefix and a suffix."""

    root: str
    """The URI of the bucket or folder without a slash at its end, as in `s3://logs` or `file:///var/uploads`."""
    prefix: str = ""
    suffix: str = ""

    def name_of(self, uri: str) -> str:
        """Return the name of an object in the bucket or folder."""
        return uri[len(self.root) + 1 :]

    def judged(self, found: Announcement) -> Announcement:
        """Return the announcement, or why it is skipped."""
        if not isinstance(found, ObjectEvent):
            return found
        if not found.uri.startswith(f"{self.root}/"):
            detail = f"{found.uri[:200]!r} is not in the store {self.root}"
            return Skipped(SkipReason.OTHER_BUCKET, detail)
        name = self.name_of(found.uri)
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            wanted = f"prefix {self.prefix!r} and suffix {self.suffix!r}"
            return Skipped(SkipReason.OTHER_NAME, f"{found.uri[:200]!r} is not among the names with {wanted}")
        return found


def checked(event: ObjectEvent) -> ObjectEvent | Skipped:
    """Return the event, or why it is skipped. Raises `MalformedError` if the object cannot be a key or be read."""
    if not event.name:
        raise MalformedError("the notification names no object; check the service that sent it")
    _ = event.key
    if not event.name.endswith(FOLDER_ENDINGS):
        return event
    if event.size:
        raise MalformedError(
            f"{event.uri[:200]!r} is named like a folder and has {event.size} bytes: it cannot be read; rename it"
        )
    return Skipped(SkipReason.FOLDER, f"{event.uri[:200]!r} stands for a folder")


def size_of(size: int | str | None) -> int | None:
    """Return a size that some services send as text. One that makes no sense is left out: reading finds it out."""
    if isinstance(size, str):
        return int(size) if size.isascii() and size.isdigit() and len(size) <= 20 else None
    return size


def uri_of(scheme: str, bucket: str, name: str) -> str:
    return f"{scheme}://{bucket}/{name}"


def split_uri(uri: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the name. The name is not decoded: `%2F` in it is part of the name."""
    match = _URI(uri)
    if match is None:
        raise MalformedError(f"{uri[:200]!r} is no URI of an object; write s3://bucket/name or file:///folder/name")
    scheme, bucket, name = match.groups()
    return scheme, bucket, name


_URI = re.compile("([a-z][a-z0-9+.-]*)://([^/]*)/(.*)", re.DOTALL).fullmatch
