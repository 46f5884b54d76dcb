"""The bench of the memory adapters, whose database accepts any clock."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.clock import Clock
from keywise.core.url import Address
from keywise.testing.conformance.origins import KeyKind, RowWriter, body_of
from keywise.testing.conformance.promise import UncheckedError


class MemoryBench:
    """Replaces the clock of a memory database; what a check has written is gone with the database."""

    shares = True

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for database in {id(adapter.database): adapter.database for adapter in adapters}.values():
            if not isinstance(database.clock, _MovedClock):
                database.clock = _MovedClock(database.clock)
            database.clock.ahead_s += seconds

    async def remove(self, adapter: Any, name: str) -> None:
        pass

    @asynccontextmanager
    async def rows(self, address: Address, keys: KeyKind) -> AsyncIterator[RowWriter]:
        if keys is not KeyKind.TEXT:
            raise UncheckedError("the keys of a mapping are texts, and each is there once")
        yield MappedRows(address.shared(MemoryDatabase).table(f"{address.name} rows"))


class MappedRows:
    """Writes rows to a mapping."""

    def __init__(self, rows: dict[str, bytes]) -> None:
        self.rows = rows

    async def put(self, texts: Mapping[str, str]) -> None:
        self.rows.update({key: body_of(key, text) for key, text in texts.items()})

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)


class _MovedClock:
    def __init__(self, clock: Clock) -> None:
        self.ahead_s = 0.0
        self._clock = clock

    def __call__(self) -> float:
        return self._clock() + self.ahead_s
