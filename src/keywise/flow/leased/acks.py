"""Acks the changes of one batch while the next batch is committed."""

import asyncio
from collections.abc import Callable

from keywise.flow.lanes import SettledTicket
from keywise.flow.settlement import Settlement
from keywise.flow.wakeup import Wakeup


class AckLoop:
    """Acks committed changes in a task of its own, one batch at a time: a commit does not wait for the ack before it.

    The changes leave their lanes when their ack begins, and not before: if a message is redelivered meanwhile, its
    ticket gets the new receipt.
    """

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement
        self._finish: Callable[[], list[SettledTicket]] = list
        self._arrivals = Wakeup()
        self._idle = asyncio.Event()
        self._idle.set()

    async def settle(self, finish: Callable[[], list[SettledTicket]]) -> None:
        """Ack soon what `finish` then returns. Waits for the batch before: a slow source slows the commits down."""
        await self._idle.wait()
        self._idle.clear()
        self._finish = finish
        self._arrivals.notify()

    async def until_idle(self) -> None:
        """Wait until everything is acked."""
        await self._idle.wait()

    async def run(self) -> None:
        while True:
            await self._arrivals.wait()
            await self._settlement.settle(self._finish())
            self._idle.set()
