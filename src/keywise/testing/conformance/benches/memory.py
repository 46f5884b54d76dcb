"""The bench of the memory adapters, whose database accepts any clock."""

from collections.abc import Sequence
from typing import Any

from keywise.core.clock import Clock
from keywise.core.url import Address


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


class _MovedClock:
    def __init__(self, clock: Clock) -> None:
        self.ahead_s = 0.0
        self._clock = clock

    def __call__(self) -> float:
        return self._clock() + self.ahead_s
