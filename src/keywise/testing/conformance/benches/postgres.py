"""The bench of the adapters on Postgres."""

from collections.abc import Sequence
from typing import Any

from keywise.core.url import Address


class PostgresBench:
    """Moves the clock of each database object, and removes all rows of a name."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for database in {id(adapter.database): adapter.database for adapter in adapters}.values():
            database.advance(seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        await adapter.database.forget(name)
