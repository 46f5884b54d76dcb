"""Whoever is cancelled in the middle of a call of a ledger ends: a client library must not swallow it."""

import asyncio
from collections.abc import Generator

from adapters.test_nine_failures import on_every_ledger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import LeaseTerms, LedgerPolicy
from running import run

TURNS = 60
"""Of the event loop; a call takes fewer, so that every moment of it is met."""


class Turn:
    """One turn of the event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@on_every_ledger
def test_a_worker_that_is_cancelled_in_a_call_of_the_ledger_ends(make):
    async def work(ledger) -> None:
        while True:
            results = await ledger.claim([ChangeHeader("a", order_of(1))], LeaseTerms("w1", 60.0))
            await ledger.release(results.granted)
            await Turn()

    async def main() -> None:
        async with make(LedgerPolicy()) as bench:
            for turns in range(1, TURNS):
                task = asyncio.create_task(work(bench.ledger))
                for _ in range(turns):
                    await Turn()
                task.cancel()
                await asyncio.wait([task], timeout=5.0)
                assert task.cancelled(), f"cancelled after {turns} turns of the event loop, it went on"

    run(main())
