"""Writes changes while the ledger is down: without a claim, one at a time per key here, and noted on disk first.

Nobody keeps other workers from the same keys, so an older change may be written after a newer one.
That is why each of these keys becomes suspect once the ledger is back, and is repaired from the source of truth.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import UnavailableError
from keywise.core.limits import Pace
from keywise.core.rules import PAUSE_LOOK_S
from keywise.core.sink import Sink, SinkResult
from keywise.flow.degraded.journal import DirtyKeyJournal, JournalContents, JournalStore
from keywise.flow.lanes import Lanes, SettledTicket, Ticket
from keywise.flow.leased.executors import Executor, Job, unknown_result
from keywise.flow.pipeline import LEDGER, Pipeline
from keywise.flow.wakeup import Wakeup

PROBE_MAX_S = 5.0
"""So often at the least it is tried whether the ledger is back."""
WITHHELD_LOOK_S = 5.0
SUSPECTS_PER_CALL = 1000
"""Keys that one call makes suspect, at the most."""

CAUSE = "more keys were written without the ledger than the journal contents: a full resync is due"
ADVICE = (
    "write everything again from the source of truth, for example with keywise reconcile --repair, and then run "
    "keywise repair --resynced"
)

Ending = tuple[Ticket, SinkResult]


class DegradedWorker:
    """What one worker does without the ledger, and how the ledger is told of it."""

    def __init__(
        self,
        pipeline: Pipeline,
        lanes: Lanes,
        executor: Executor,
        journal_store: JournalStore,
        wakeup: Wakeup,
        room: Wakeup,
    ) -> None:
        self.due = pipeline.clock()
        """When to look for what dead workers have left behind."""
        self.is_at_work = False
        self._trouble_due = self.due
        self._pipeline = pipeline
        self._lanes = lanes
        self._executor = executor
        self._journal = DirtyKeyJournal(journal_store, pipeline.settings.journal_keys_max)
        self._pace = Pace(pipeline.rate)
        self._wakeup = wakeup
        self._room = room
        self._running = 0
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        """What the ledger does not know yet is left to the next worker."""
        self._journal.close()

    async def is_settled(self, calls: Callable[[], int]) -> bool:
        """Whether changes may be claimed: the ledger answers, and knows of every key that was written without it.

        `calls` tells how many calls under claims still run.
        """
        if self._pipeline.is_without_ledger:
            self.is_at_work = True
            try:
                await self._work_without(calls)
            finally:
                self.is_at_work = False
            return False
        if self._pipeline.clock() >= self.due:
            self.due = self._pipeline.clock() + self._pipeline.settings.maintenance_s
            await self._find()
            await self._tidy()
        return self._journal.is_empty or await self._hand_over()

    async def conclude_claimed(self, jobs: Sequence[Job]) -> None:
        """End changes whose claims nobody can be told about any more: their leases run out by themselves.

        Raises UnavailableError if they cannot be noted; then nothing has ended.
        """
        endings = [(job.ticket, job.result) for job in jobs if not job.undone or job.result.outcome is Outcome.BUSY]
        await self._journal.note([ticket.change for ticket, result in endings if _may_show(result)], self._since())
        for job in jobs:
            if job.undone and job.result.outcome is not Outcome.BUSY:
                self._lanes.hold(job.ticket, self._pipeline.clock())
        await self._conclude(endings)

    # Work.

    async def _work_without(self, calls: Callable[[], int]) -> None:
        """Until the ledger answers or the worker is to stop; what has begun is finished."""
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe())
            while self._goes_on:
                free = self._executor.side_by_side - calls() - self._running
                tickets = self._lanes.take(max(0, free) * self._executor.batch_max, self._pipeline.clock())
                for call in await self._prepared(tickets):
                    self._running += 1
                    group.create_task(self._call(call))
                if not tickets:
                    await self._wakeup.wait(self._pipeline.until(self._lanes.next_due() if free > 0 else None))
            probing.cancel()

    @property
    def _goes_on(self) -> bool:
        return self._pipeline.is_without_ledger and not self._stopping

    async def _prepared(self, tickets: Sequence[Ticket]) -> list[list[Ticket]]:
        """Note what may be written now, and only then hand it out, in parts that fit into a call."""
        if not tickets:
            return []
        # A worker may just have died of one of these.
        await self._find()
        ready = self._let_through(tickets)
        try:
            await self._note(ready)
        except UnavailableError as error:
            self._put_back(ready)
            await self._pipeline.back_off("journal", error, 1)
            return []
        if not self._goes_on:
            self._put_back(ready)
            await self._ended([], ready)
            return []
        size = self._executor.batch_max
        return [ready[start : start + size] for start in range(0, len(ready), size)]

    def _let_through(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Those that nothing known here speaks against; the others wait."""
        now, withheld, ready = self._pipeline.clock(), self._journal.withheld, list[Ticket]()
        for ticket in tickets:
            key = ticket.change.key
            wait_s = self._pace.wait_s(key, now)
            if key in withheld:
                # A worker may have died of it, and only the ledger can count deaths.
                wait_s = WITHHELD_LOOK_S
            elif self._pipeline.controls.pauses_key(key):
                wait_s = PAUSE_LOOK_S
            if wait_s > 0:
                self._lanes.hold(ticket, now + wait_s, blocks_newer=True)
            else:
                ready.append(ticket)
        return ready

    async def _note(self, tickets: Sequence[Ticket]) -> None:
        was_full = self._journal.is_full
        await self._journal.note([ticket.change for ticket in tickets], self._since())
        if self._journal.is_full and not was_full:
            self._pipeline.emit(events.Alarmed(pipeline=self._pipeline.name, cause=CAUSE, advice=ADVICE))

    def _put_back(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._lanes.hold(ticket, self._pipeline.clock())

    async def _call(self, tickets: list[Ticket]) -> None:
        pipeline = self._pipeline
        for ticket in tickets:
            self._pace.charge(ticket.change.key, pipeline.clock())
        with pipeline.batch(len(tickets)):
            results = await self._applied(tickets)
            await self._conclude(list(zip(tickets, results, strict=True)))
        self._running -= 1
        self._wakeup.notify()
        self._room.notify()

    async def _applied(self, tickets: list[Ticket]) -> Sequence[SinkResult]:
        pipeline, started = self._pipeline, self._pipeline.clock()
        sink: Sink = pipeline.sink  # type: ignore[assignment]
        changes = [ticket.change for ticket in tickets]
        try:
            # For as long as a claim would have lasted: when the ledger is back, it is told after the last call.
            async with asyncio.timeout(pipeline.settings.lease_s):
                return await sink.apply(changes, [Claim(one.key, one.order, one.deleted, 0) for one in changes])
        except Exception as error:
            return [unknown_result(error)] * len(tickets)
        finally:
            keys = [change.key for change in changes]
            pipeline.emit(events.Handled(pipeline=pipeline.name, keys=keys, seconds=pipeline.clock() - started))

    async def _conclude(self, endings: Sequence[Ending]) -> None:
        """Ack what was written. What failed comes back: attempts and dead letters need the ledger."""
        shown = [ticket for ticket, result in endings if _may_show(result)]
        await self._ended(shown, [ticket for ticket, result in endings if not _may_show(result)])
        settled, failed = list[SettledTicket](), list[Ending]()
        for ticket, result in endings:
            if result.outcome in (Outcome.APPLIED, Outcome.SUPERSEDED):
                settled += self._lanes.finish(ticket, result.outcome, ticket.change.order)
            elif result.outcome is Outcome.BUSY and result.wait_s is None:
                self._lanes.hold(ticket, self._pipeline.clock() + self._pipeline.retry_s(1))
            else:
                failed.append((ticket, result))
        # At once: what has left its lane must not come again before it is acked, or the ack has an old receipt.
        await self._pipeline.settle(settled)
        for ticket, result in failed:
            await self._release(ticket, result)

    async def _release(self, ticket: Ticket, result: SinkResult) -> None:
        pipeline, change = self._pipeline, ticket.change
        self._lanes.leave(ticket)
        if result.wait_s is not None:
            wait_s = result.wait_s
            pipeline.emit(events.Snoozed(pipeline=pipeline.name, key=change.key, version=change.version, wait_s=wait_s))
        else:
            wait_s = pipeline.retry_s(ticket.delivery.count)
            pipeline.emit(pipeline.failed(ticket, result.cause, ticket.delivery.count, wait_s))
        await pipeline.release([ticket], wait_s)

    async def _ended(self, shown: Sequence[Ticket], clean: Sequence[Ticket]) -> None:
        # If it cannot be noted, the keys count as written, and as what a worker may have died of.
        with suppress(UnavailableError):
            await self._journal.ended([t.change.key for t in shown], [t.change.key for t in clean])

    def _since(self) -> float:
        return self._pipeline.wall() - self._pipeline.outage.seconds

    # The ledger.

    async def _probe(self) -> None:
        """Ask until there is an answer."""
        attempts = 0
        while self._pipeline.outage.is_down:
            attempts += 1
            await asyncio.sleep(min(PROBE_MAX_S, self._pipeline.retry_s(attempts)))
            try:
                # A write, each time: a ledger that can only be read is not back.
                await self._pipeline.control_store.acquire("probe", 0.0)
            except UnavailableError as error:
                self._pipeline.outage.failed(str(error))
            else:
                self._pipeline.outage.answered()
        self._wakeup.notify()

    async def _find(self) -> None:
        """What cannot be found stops nothing."""
        try:
            await self._journal.find()
        except UnavailableError as error:
            self._report_trouble(error)

    def _report_trouble(self, error: UnavailableError) -> None:
        """Now and then: a journal that cannot be used is seen again with every batch."""
        now, retry_s = self._pipeline.clock(), self._pipeline.settings.maintenance_s
        if now >= self._trouble_due:
            self._trouble_due = now + retry_s
            name = self._pipeline.name
            self._pipeline.emit(events.Unavailable(pipeline=name, what="journal", cause=str(error), retry_s=retry_s))

    async def _hand_over(self) -> bool:
        """Make the noted keys suspect, and only then forget the notes."""
        pipeline = self._pipeline
        for file, contents in self._journal.pending():
            try:
                await self._mark_suspect(contents)
            except UnavailableError as error:
                await pipeline.back_off(LEDGER, error, 1)
                return False
            pipeline.outage.answered()
            pipeline.emit(events.MarkedSuspect(pipeline=pipeline.name, keys=len(contents.keys)))
            await self._journal.forget(file, contents)
        await self._tidy()
        return self._journal.is_empty

    async def _tidy(self) -> None:
        """What cannot be removed stops nothing, and is not handed over again as long as this worker lives."""
        try:
            await self._journal.tidy()
        except UnavailableError as error:
            self._report_trouble(error)

    async def _mark_suspect(self, contents: JournalContents) -> None:
        headers = contents.suspects()
        for start in range(0, len(headers), SUSPECTS_PER_CALL):
            await self._pipeline.admin.mark_suspect(headers[start : start + SUSPECTS_PER_CALL])
        if contents.is_full:
            await self._pipeline.admin.mark_suspect([], True)


def _may_show(result: SinkResult) -> bool:
    """Whether something of it may be in the sink."""
    is_written = result.outcome not in (Outcome.BUSY, Outcome.FAILED)
    return is_written or result.certainty is not Certainty.CLEAN
