"""What the ledger remembers about an object: the note of its position while it is read, and that of its commit."""

from typing import Self

import msgspec

from keywise.core.entry import Entry
from keywise.core.errors import ObjectError
from keywise.ingest.parts import ReadNote


class ContentNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note of a commit: what the sink holds of an object."""

    etag: str = ""
    """The ETag of the content; empty if the object is gone."""
    records: int = 0
    bad: int = 0
    """How many of its records are dead letters, or were."""
    uri: str = ""
    """The URI, if the key has only its beginning and a hash."""
    removed: bool = False
    """An operator has removed the records. A deletion because the object is gone from its store is none."""
    removed_etag: str = ""
    """The ETag of the content that was removed; empty if it is not known."""

    def stays_removed(self, etag: str) -> bool:
        """Whether an operator has removed this content, or may have: then only the operator brings it back."""
        return self.removed and self.removed_etag in ("", etag)

    @classmethod
    def of(cls, entry: Entry | None) -> Self:
        """Return the note of an entry, or an empty one if it has none that can be read."""
        try:
            return msgspec.json.decode(entry.note, type=cls) if entry is not None and entry.note else cls()
        except msgspec.MsgspecError:
            return cls()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class ObjectNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note of a position: how to go on with an object."""

    read: ReadNote | None = None
    """Where to go on reading; None at the beginning."""
    gone_at: float = 0.0
    """When the store first had no such object, by the ledger's clock, though it was announced; 0 if it had it."""
    done: ContentNote | None = None
    """Set when all records are written: those of an earlier version behind them are being deleted."""
    refused: int = 0
    """How many records the sink has refused; they are dead letters."""

    def kept(self, *, read: ReadNote | None = None, done: ContentNote | None = None) -> Self:
        """Return the note of a later position of the same object."""
        return type(self)(read, done=done, refused=self.refused)

    @classmethod
    def decode(cls, note: bytes) -> Self:
        try:
            return msgspec.json.decode(note, type=cls) if note else cls()
        except msgspec.MsgspecError as error:
            raise ObjectError(
                f"the position of this object has a note that cannot be read ({error}); announce it again with "
                "keywise force"
            ) from error

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


BEGINNING = ObjectNote()
"""Nothing is known of an object yet."""
