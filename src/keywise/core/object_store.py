"""The contract of an object store: where the content of objects is read from.

An adapter turns the errors of its client library into those of `core/errors.py` and never retries by itself.
`UnavailableError` means that the store did not answer, and that the caller may repeat the call.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from keywise.core.resource import AsyncResource


class ObjectStream(msgspec.Struct, frozen=True):
    """One object as the store answered a get: all chunks belong to the content that has this ETag."""

    etag: str
    size: int
    """The bytes of the whole object, also if the stream starts behind its first byte."""
    chunks: AsyncGenerator[bytes, None]
    """The content from `start` on. The caller closes it. It raises `ObjectReplacedError` if the object is replaced
    meanwhile, and `UnavailableError` if the connection is lost."""


class ListedObject(msgspec.Struct, frozen=True):
    """One object of a listing."""

    name: str
    etag: str
    size: int


class ObjectStore(AsyncResource, Protocol):
    """Reads objects by their name: the whole key inside the bucket, or the path below the folder, never encoded."""

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        """Return the content of an object from byte `start` on; None if the store has no such object.

        None is a fact about the object: the store itself has answered, and its bucket or folder is there.
        If `if_match` is given and is not the ETag of the object, `ObjectReplacedError` is raised.
        A start at or behind the end gives no chunks.
        `ObjectAccessError` means that the store refused the request, which says nothing about the object.
        """

    def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects whose names begin with `prefix` and are above `after`, in pages, by name.

        Some stores that speak the protocol of Amazon S3 list in another order. For them, start without `after`.
        """
