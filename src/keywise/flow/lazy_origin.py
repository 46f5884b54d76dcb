"""An origin that may be unreachable when its worker starts: the first call that reaches it opens it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from keywise.core.errors import OriginError, UnavailableError
from keywise.core.origin import FilterableOrigin, Origin, Page, Shard


class LazyOrigin:
    """A proxy for an origin. Live changes flow without it, so only repairs and reindexes wait for it."""

    def __init__(self, origin: Origin, *, at_start: bool) -> None:
        self._origin = origin
        self._opens_at_start = at_start
        """Whether `__aenter__` tries to open it, so that a worker does not start with an origin that cannot be used."""
        self._is_open = False
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._opens_at_start:
            with suppress(UnavailableError):  # The next call tries again.
                await self._open()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._is_open:
            await self._origin.__aexit__(*error)

    @property
    def is_consistent(self) -> bool:
        return self._origin.is_consistent

    async def shards(self, size: int) -> Sequence[Shard]:
        return await (await self._open()).shards(size)

    async def shards_where(self, condition: str, size: int) -> Sequence[Shard]:
        origin = await self._open()
        if not isinstance(origin, FilterableOrigin):
            raise OriginError(
                "this origin cannot choose rows by a condition; write their keys into a file, and name it with --ids"
            )
        return await origin.shards_where(condition, size)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return await (await self._open()).scan(shard, after, limit)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        return await (await self._open()).fetch(keys)

    async def _open(self) -> Origin:
        async with self._opening:
            if not self._is_open:
                await self._origin.__aenter__()
                self._is_open = True
        return self._origin
