"""Returns evicted changes to their source, in a task for each source: no other source waits for it."""

import asyncio
from collections.abc import Iterable, Sequence

from keywise.flow.lanes import Ticket
from keywise.flow.settlement import Settlement
from keywise.flow.wakeup import Wakeup


class EvictionQueue:
    """The evicted changes of one source, on their way back to it.

    The source is not asked for more meanwhile, so no more changes wait here than the lanes have room for.
    """

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement
        self._evicted: list[Ticket] = []
        self._freed: set[str] = set()
        """Keys that became free while changes were on their way back."""
        self._arrivals = Wakeup()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, evicted: Iterable[Ticket]) -> None:
        self._evicted += evicted
        self._idle.clear()
        self._arrivals.notify()

    def note_freed(self, keys: Sequence[str]) -> None:
        if not self._idle.is_set():
            self._freed.update(keys)

    async def until_idle(self) -> None:
        """Wait until everything is back."""
        await self._idle.wait()

    async def run(self) -> None:
        while True:
            await self._arrivals.wait()
            while evicted := self._evicted:
                self._evicted = []
                await self._settlement.return_evicted(evicted)
                # The recall of a key that became free meanwhile came too early for these changes.
                keys = {ticket.change.key for ticket in evicted}
                await self._settlement.recall(sorted(keys & self._freed))
            self._freed.clear()
            self._idle.set()
