"""An object store in memory that hands out chunks of any sizes, and can be cut off or changed while it is read."""

import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Self

from keywise.core.errors import ObjectReplacedError, UnavailableError
from keywise.core.object_store import ListedObject, ObjectStream


class ChunkedStore:
    """Serves the contract of object stores; `sizes` are those of the chunks, over and over."""

    def __init__(self, objects: dict[str, bytes] | None = None, sizes: Sequence[int] = (65536,)) -> None:
        self._sizes = sizes
        self._objects = {name: (f'"{name}-0"', content) for name, content in (objects or {}).items()}
        self.gets: list[tuple[str, int, str]] = []
        self.chunks_until_lost: list[int] = []
        """After how many chunks each of the next gets loses its connection."""

    def put(self, name: str, content: bytes) -> None:
        number = int(self._objects[name][0].strip('"').rpartition("-")[2]) + 1 if name in self._objects else 0
        self._objects[name] = (f'"{name}-{number}"', content)

    def delete(self, name: str) -> None:
        del self._objects[name]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        self.gets.append((name, start, if_match))
        if name not in self._objects:
            return None
        etag, content = self._objects[name]
        if if_match and if_match != etag:
            raise ObjectReplacedError(f"{name!r} was replaced while it was read; it is read again from its start")
        lost_after = self.chunks_until_lost.pop(0) if self.chunks_until_lost else None
        return ObjectStream(etag, len(content), self._chunks(content[start:], lost_after))

    async def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        names = sorted(name for name in self._objects if name.startswith(prefix) and name > after)
        for name in names:
            etag, content = self._objects[name]
            yield [ListedObject(name, etag, len(content))]

    async def _chunks(self, content: bytes, lost_after: int | None) -> AsyncGenerator[bytes, None]:
        for number, chunk in enumerate(chunked(content, self._sizes)):
            if number == lost_after:
                raise UnavailableError("the connection is lost")
            yield chunk


def chunked(content: bytes, sizes: Sequence[int]) -> Iterable[bytes]:
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(content):
            return
        yield content[at : at + size]
        at += size
