"""An announced object: what one part of a notification asks of the pipeline, in the words of keywise itself.

The flow sees nothing but these: the body of a message, in any dialect, is replaced by this text, which a dead letter
keeps and a replay sends again.
"""

from typing import Any

import msgspec

from keywise.core.change import Change, Order, above, order_of
from keywise.core.errors import MalformedError
from keywise.ingest.keys import object_key
from keywise.ingest.notification import ObjectEvent

MARK = b'{"keywise":"object",'
"""How the text of an announced object begins. No dialect has such messages."""


class AnnouncedObject(msgspec.Struct, frozen=True, tag_field="keywise", tag="object", omit_defaults=True):
    """An object that is to be read, or whose records are to be deleted."""

    uri: str
    version: int | None = None
    deleted: bool = False
    scale: str = ""
    """The scale of the version; empty if it is taken from the ledger."""
    order: Order | None = None
    """Set if keywise announces the object again, at an order that upstream cannot send."""
    removed: bool = False
    """An operator deletes the records, though the object may exist."""
    etag: str = ""
    """As the notification says; of a removal, that of the content that is removed."""
    size: int | None = None

    @property
    def key(self) -> str:
        return object_key(self.uri)

    def encode(self) -> bytes:
        return _encode(self)

    def change(self, sent_at: float) -> Change[Any]:
        """Return the change that the ledger decides on."""
        order = self.order or order_of(self.version)
        return Change(self.key, order, self.deleted, sent_at, body=self.encode(), decode=decode_announcement)


def announced(event: ObjectEvent) -> AnnouncedObject:
    return AnnouncedObject(
        event.uri, event.version, event.deleted, event.scale.value, etag=event.etag or "", size=event.size
    )


def announced_again(
    uri: str, *seen: Order | None, deleted: bool = False, removed: bool = False, lowest: Order | None = None
) -> AnnouncedObject:
    """Announce an object above the orders that were seen of it, and below its next version.

    If none was seen, it has the `lowest` order: version 0 without it, which is below all that stores send.
    """
    known = [order for order in seen if order is not None]
    order = above(max(known)) if known else lowest or order_of(0)
    if removed:
        # Above an announcement that an operator may have sent just before: it would make this one a duplicate.
        order = above(order)
    return AnnouncedObject(uri, order[1], deleted=deleted or removed, order=order, removed=removed)


def is_announcement(body: bytes) -> bool:
    return body.startswith(MARK)


def decode_announcement(body: bytes) -> AnnouncedObject:
    """Read what `AnnouncedObject.encode` wrote; raises `MalformedError` for anything else."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"the body announces no object: {error}; send the URI of one") from error


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnnouncedObject).decode
