"""The store of serial functions behind a lossy link."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from keywise.adapters.memory.serial import MemoryTurns, _Transaction
from keywise.core.errors import DatabaseError
from keywise.testing.lossy_link import Linked, LossyLink, Session
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.serial.world import SerialWorld

BROKEN = "not allowed for a moment"
BREAKABLE = {"answer", "renew", "withdraw", "replies"}


class LinkedTurns(Linked[MemoryTurns], over=MemoryTurns):
    """The turns of one process behind a link, whose store refuses some calls."""

    def __init__(self, world: "SerialWorld", process: Process, turns: MemoryTurns) -> None:
        super().__init__(LossyLink(world, process, world.is_down), turns)
        self.database = turns.database
        self.operator = self
        self._faults = world.faults

    async def forward(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        is_broken = name in BREAKABLE and self._faults.happens("broken store", self._faults.rates.broken)
        return await super().forward(name, _break if is_broken else act)

    async def wait(self, wait_s: float) -> None:
        """Not over the link: a notification that gets lost looks like none."""
        await self._server.wait(wait_s)

    @asynccontextmanager
    async def transaction(self, *tokens: int) -> AsyncIterator[Any]:
        async with self._link.transaction(Session(database=self.database)):
            yield _Transaction(self._server)


async def _break() -> Any:
    raise DatabaseError(BROKEN)
