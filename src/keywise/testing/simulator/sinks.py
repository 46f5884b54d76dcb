"""Simulated sinks: what their handlers do with a change is part of the workload."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import PermanentError, TransientError
from keywise.core.sink import Grade, SinkResult
from keywise.core.transaction import Transaction
from keywise.testing.simulator.gateway import Blame
from keywise.testing.simulator.links import FlowLink


class LinkedSink:
    """A plain or conditional sink behind a link; what its handler does with a change is part of the workload."""

    forgets_deletions: bool

    def __init__(self, link: FlowLink, sink: MemorySink) -> None:
        self._link = link
        self._sink = sink
        self.grade = sink.grade
        self.forgets_deletions = sink.forgets_deletions
        self.batch_max = link.world.sink_batch_max
        self._blame = Blame()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        world = self._link.world
        call = world.auditor.call_started(self._link.process, list(changes), list(claims))
        results: Sequence[SinkResult] = [SinkResult(Outcome.FAILED)] * len(changes)
        costs = True
        try:
            await world.meet_killers(self._link.process, changes)
            await world.meet_deadly_repairs(self._link.process, claims)
            results = await (self._in_thread(changes, claims) if world.has_threads else self._run(changes, claims))
            return results
        except asyncio.CancelledError:
            costs = not world.blackout.cut_off(self._link.process, claims, call.started)
            raise
        finally:
            world.auditor.call_ended(call)
            for change, result in zip(changes, results, strict=True):
                is_to_blame = self._blame.is_due(change, result)
                if (result.outcome is Outcome.FAILED and costs) or is_to_blame:
                    world.auditor.tries[change.key, change.order] += 1

    async def _in_thread(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        running = asyncio.ensure_future(self._run(changes, claims))
        running.add_done_callback(_thrown_away)
        return await asyncio.shield(running)

    async def _run(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        """A handler thinks for a while before it writes."""
        await asyncio.sleep(self._link.world.rng.choice((0.0, 0.001, 0.5)))
        self._link.world.meanwhile(self._link.process)
        return await self._link.call(lambda: self._apply(changes, claims))

    async def _apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        gateway, pairs = self._link.world.gateway, list(zip(changes, claims, strict=True))
        if gateway.is_shut():
            return [gateway.answer(self._sink, change, claim) for change, claim in pairs]
        return [self._apply_one(change, claim) for change, claim in pairs]

    def _apply_one(self, change: Change[Any], claim: Claim) -> SinkResult:
        world = self._link.world
        sent = world.sent_of(change)
        if sent is not None and claim.order is None:
            world.auditor.repairing(change, claim)
        if sent is not None and sent.poison:
            return SinkResult(Outcome.FAILED, "poison", permanent=True)
        if sent is not None and sent.flaky > 0:
            sent.flaky -= 1
            certainty = world.rng.choice((Certainty.CLEAN, Certainty.ENDED))
            if certainty is Certainty.ENDED and world.rng.random() < 0.5:
                world.write(self._sink, change, claim.token)
            return SinkResult(Outcome.FAILED, "flaky", certainty=certainty)
        return world.write(self._sink, change, claim.token)


class LinkedTable:
    """An atomic sink: a table, or a handler that writes inside the transaction."""

    grade = Grade.ATOMIC

    def __init__(self, link: FlowLink, table: MemoryTable, *, runs_user_code: bool) -> None:
        self._link = link
        self._table = table
        self.database = table.database
        self.runs_user_code = runs_user_code
        self.batch_max = link.world.sink_batch_max

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        world = self._link.world
        world.auditor.asked([change.key for change in changes])
        for change in changes:
            await self._link.hop()
            if self.runs_user_code:
                await world.meet_killers(self._link.process, [change])
            sent = world.sent_of(change)
            await self._table.write(transaction, [change])
            if sent is not None and (sent.poison or sent.flaky > 0):
                if len(changes) == 1:
                    sent.flaky -= 1
                    world.auditor.tries[change.key, change.order] += 1
                raise PermanentError("poison") if sent.poison else TransientError("flaky")


def _thrown_away(running: "asyncio.Future[Any]") -> None:
    """Nobody may be left who wants to know."""
    if not running.cancelled():
        running.exception()
