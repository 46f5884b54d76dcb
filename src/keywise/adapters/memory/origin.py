"""Rows in the memory of one process as an origin, read in the order of their keys."""

from collections.abc import Mapping, Sequence
from typing import Self

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.key_range import BOUND_MAX_BYTES, KeyRange, read_page, shards_by_keys
from keywise.core.origin import Origin, Page, Shard
from keywise.core.url import Address


class MemoryOrigin:
    """A mapping of keys to bodies, which its owner changes at any time."""

    is_consistent = True

    def __init__(self, rows: Mapping[str, bytes]) -> None:
        self.rows = rows

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def shards(self, size: int) -> Sequence[Shard]:
        return await shards_by_keys(self._key_after, size)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return await read_page(self._rows, shard, after, limit)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        return {key: self.rows[key] for key in keys if key in self.rows}

    async def _key_after(self, low: str | None, size: int) -> str | None:
        after = [key for key in self._keys(KeyRange(low)) if len(key.encode()) <= BOUND_MAX_BYTES]
        return after[size - 1] if len(after) >= size else None

    async def _rows(self, within: KeyRange, limit: int) -> Sequence[tuple[str, bytes]]:
        return [(key, self.rows[key]) for key in self._keys(within)[:limit]]

    def _keys(self, within: KeyRange) -> list[str]:
        low, high = within.low, within.high
        return sorted(key for key in self.rows if (low is None or key > low) and (high is None or key <= high))


def connect(address: Address) -> Origin:
    """Make the origin for `memory://?table=NAME`, whose rows live as long as the process."""
    table = address.take("table").get("table", address.name)
    return MemoryOrigin(address.shared(MemoryDatabase).table(f"{table} rows"))
