"""The bench of the adapters in a Redis server."""

from collections.abc import Sequence
from typing import Any

from keywise.core.url import Address


class RedisBench:
    """Moves the clock of each opening, and removes all names of a scope or function."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for server in {id(adapter._server): adapter._server for adapter in adapters}.values():
            server.advance(seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        await adapter.forget(name)
