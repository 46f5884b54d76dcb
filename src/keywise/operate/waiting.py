"""Claims for an operator's action, which waits for a key that is held or rate-limited, up to a limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from keywise.core.change import ChangeHeader
from keywise.core.entry import EMPTY, Claim, LeaseTerms, Level, Refusal, RefusalReason
from keywise.core.errors import AdminError
from keywise.core.failures import look_again_s
from keywise.flow.heartbeat import Heartbeat, HeartbeatThread
from keywise.flow.pipeline import OpenPipeline

FINAL = (
    RefusalReason.STALE,
    RefusalReason.DUPLICATE,
    RefusalReason.REMOVED,
    RefusalReason.MIXED,
    RefusalReason.FORGOTTEN,
)
"""Refusals that waiting does not change."""


class WaitBudget:
    """The time that an operator's action may wait for one key. Each wait is reported with its cause."""

    def __init__(self, pipeline: OpenPipeline, wait_s: float, report: Callable[[str], None], advice: str = "") -> None:
        self._clock = pipeline.clock
        self._wait_s = wait_s
        self._until: float | None = None
        self._report = report
        self._advice = f"; {advice}" if advice else ""

    def renew(self) -> None:
        """Start the time again, for another key."""
        self._until = None

    async def wait(self, cause: str, look_s: float) -> None:
        """Wait for up to `look_s`; raise `AdminError` with the cause once the time is used up."""
        if self._until is None:
            self._until = self._clock() + self._wait_s
        left_s = self._until - self._clock()
        if left_s <= 0:
            raise AdminError(f"{cause}; waited {self._wait_s:g} s{self._advice}")
        self._report(cause)
        await asyncio.sleep(min(look_s, left_s))


class AdminClaimer:
    """Claims keys for an operator, even if they are paused, and keeps the claims alive."""

    def __init__(self, pipeline: OpenPipeline, wait_budget: WaitBudget, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.wait_budget = wait_budget
        self._pipeline = pipeline

    @asynccontextmanager
    async def taken(self, header: ChangeHeader) -> AsyncIterator[Claim | Refusal]:
        """Wait for the claim, and keep it alive inside the block. The block has to end the claim in the ledger.

        Yields the refusal instead if this order will never be granted, or if it was deferred (after a wait): the caller
        may then try another order.
        """
        pipeline = self._pipeline
        terms = LeaseTerms(pipeline.owner, pipeline.settings.lease_s, Level.ALONE, despite_pause=True)
        while True:
            asked_at = pipeline.clock()
            results = await pipeline.ledger.claim([header], terms)
            if results.granted:
                break
            refusal = results.refused[header.key]
            if refusal.reason in FINAL:
                yield refusal
                return
            await self.wait_budget.wait(
                await self._describe_wait(header.key, refusal), look_again_s(refusal, pipeline.rng)
            )
            if refusal.reason is RefusalReason.DEFERRED and header.order is not None:
                yield refusal
                return
        [claim] = results.granted
        self.heartbeat.hold([claim], asked_at)
        try:
            yield claim
        finally:
            self.heartbeat.drop([claim])

    async def _describe_wait(self, key: str, refusal: Refusal) -> str:
        """Describe what the key waits for, and which worker holds it."""
        entry = await self._pipeline.admin.inspect(key) or EMPTY
        if refusal.reason is RefusalReason.PAUSED:
            # An operator's claims pass pauses, but not the barrier of a swap.
            return f"the sink of {self._pipeline.name!r} moves to another target, which takes some seconds"
        if refusal.reason is RefusalReason.LIMITED:
            return f"the rate of {key!r} is used up"
        if refusal.reason is RefusalReason.DEFERRED:
            return f"a newer change of {key!r} was tried and is not settled: it may be in the sink"
        if entry.token == 0:
            return f"a change of {key!r} has failed, and its retry is not due"
        if entry.abandoned:
            return f"the outcome of a write of {key!r} by {entry.owner} is unknown, so its lease has to expire"
        return f"{key!r} is held by {entry.owner}"


@asynccontextmanager
async def running_heartbeat(pipeline: OpenPipeline) -> AsyncIterator[Heartbeat]:
    """Run a heartbeat for the claims of one command.

    It runs in a thread, or on the event loop if the ledger allows only one connection.
    """
    settings = pipeline.settings
    heartbeat = Heartbeat(
        lease_s=settings.lease_s,
        margin_s=settings.margin_s,
        runtime_max_s=settings.runtime_max_s,
        clock=pipeline.clock,
        lost=lambda claim: None,  # The call under a lost claim is cancelled, and reports it.
    )
    if pipeline.connect_heartbeat is not None:
        thread = HeartbeatThread(heartbeat, pipeline.connect_heartbeat)
        thread.start()
        stop: Callable[[], object] = thread.stop
    else:
        stop = asyncio.create_task(heartbeat.run(pipeline.ledger)).cancel
    try:
        yield heartbeat
    finally:
        stop()
