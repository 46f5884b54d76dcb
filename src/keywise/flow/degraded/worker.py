"""The worker of degraded mode: it writes changes while the ledger is down, and journals each key first.

Without claims, two workers may write the same key at once, and an older change may be written after a newer one.
Therefore each of these keys becomes suspect once the ledger is back, and is repaired from the source of truth.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
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
from keywise.flow.leased.disposition import Disposition
from keywise.flow.leased.executors import Executor, FinishedJob, unknown_result
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.settlement import Settlement

PROBE_MAX_S = 5.0
"""The longest interval between two probes of the ledger."""
WITHHELD_LOOK_S = 5.0
SUSPECTS_PER_CALL = 1000
"""At most this many keys are marked as suspect by one call."""

CAUSE = "more keys were written without the ledger than the journal can hold: a full resync is due"
ADVICE = (
    "write everything again from the source of truth, for example with keywise reconcile --repair, and then run "
    "keywise repair --resynced"
)

Ending = tuple[Ticket, SinkResult]


class DegradedWorker:
    """Writes changes while the ledger is down, and afterwards marks the written keys as suspect in the ledger."""

    def __init__(
        self,
        pipeline: OpenPipeline,
        settlement: Settlement,
        lanes: Lanes,
        executor: Executor,
        journal_store: JournalStore,
    ) -> None:
        self.due = pipeline.clock()
        """When to look for journals of dead workers."""
        self.is_at_work = False
        self._trouble_due = self.due
        self._pipeline = pipeline
        self._settlement = settlement
        self._lanes = lanes
        self._executor = executor
        self._journal = DirtyKeyJournal(journal_store, pipeline.settings.journal_keys_max)
        self._pace = Pace(pipeline.rate)
        self._running = 0
        self._repaired: Set[str] = frozenset()
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        """Close the journals. Keys that the ledger does not know yet are left to the next worker."""
        self._journal.close()

    async def is_settled(self, calls: Callable[[], int], repaired: Set[str]) -> bool:
        """Whether changes may be claimed: the ledger answers, and knows every key that was written without it.

        While the ledger is down, this writes without it and returns False afterwards. `calls` returns how many calls
        under claims still run, and `repaired` always has the keys whose repairs run: those keys wait.
        """
        self._repaired = repaired
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

    async def adopt(self, finished: Sequence[FinishedJob]) -> None:
        """Settle claimed changes without the ledger: journal those that were written, and let the leases expire.

        Raises UnavailableError if the journal cannot be written; then nothing is settled.
        """
        endings = [(one.ticket, one.result) for one in finished if one.disposition is not Disposition.RELEASE]
        await self._journal.note([ticket.change for ticket, result in endings if _may_show(result)], self._since())
        self._put_back([one.ticket for one in finished if one.disposition is Disposition.RELEASE])
        await self._conclude(endings)

    # Work.

    async def _work_without(self, calls: Callable[[], int]) -> None:
        """Write changes until the ledger answers or the worker is stopped, then finish those that have begun."""
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe())
            while self._goes_on:
                free = self._executor.side_by_side - calls() - self._running
                tickets = self._lanes.take(max(0, free) * self._executor.batch_max, self._pipeline.clock())
                for call in await self._prepared(tickets):
                    self._running += 1
                    group.create_task(self._call(call))
                if not tickets:
                    await self._lanes.arrivals.wait(self._pipeline.until(self._lanes.next_due() if free > 0 else None))
            probing.cancel()

    @property
    def _goes_on(self) -> bool:
        return self._pipeline.is_without_ledger and not self._stopping

    async def _prepared(self, tickets: Sequence[Ticket]) -> list[list[Ticket]]:
        """Journal the changes that may be written now; return them in batches for one call each."""
        if not tickets:
            return []
        # Another worker may just have crashed on one of these changes: its journal shows which keys were in flight.
        await self._find()
        ready = self._let_through(tickets)
        try:
            await self._note(ready)
        except UnavailableError as error:
            self._put_back(ready)
            await self._pipeline.back_off("journal", error, 1)
            return []
        self._pipeline.report_answer("journal")
        if not self._goes_on:
            # The ledger came back meanwhile: the changes are claimed as usual, and the journal entries withdrawn.
            self._put_back(ready)
            await self._ended([], ready)
            return []
        size = self._executor.batch_max
        return [ready[start : start + size] for start in range(0, len(ready), size)]

    def _let_through(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return the changes that may be written now, and hold the others: withheld, paused, rate-limited, or rows."""
        now, withheld, ready = self._pipeline.clock(), self._journal.withheld, list[Ticket]()
        for ticket in tickets:
            key = ticket.change.key
            wait_s = self._pace.wait_s(key, now)
            if key in withheld or key in self._repaired:
                # A withheld key may have crashed another worker: only the ledger counts crashes, so wait for it.
                # A repair that began before the outage still writes its key.
                wait_s = WITHHELD_LOOK_S
            elif self._pipeline.controls.pauses_key(key):
                wait_s = PAUSE_LOOK_S
            if wait_s > 0:
                self._lanes.hold(ticket, now + wait_s, blocks_newer=True)
            elif ticket.change.is_row:
                # Only the ledger knows whether an operator has removed the key. A newer change need not wait for that.
                self._lanes.hold(ticket, now + WITHHELD_LOOK_S)
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
        self._lanes.arrivals.notify()
        self._lanes.departures.notify()

    async def _applied(self, tickets: list[Ticket]) -> Sequence[SinkResult]:
        pipeline, started = self._pipeline, self._pipeline.clock()
        sink: Sink = pipeline.sink  # type: ignore[assignment]
        changes = [ticket.change for ticket in tickets]
        try:
            # Limited to one lease, as under a claim: the keys can be handed to the ledger only after the last call.
            async with asyncio.timeout(pipeline.settings.lease_s):
                return await sink.apply(changes, [Claim(one.key, one.order, one.deleted, 0) for one in changes])
        except Exception as error:
            return [unknown_result(error)] * len(tickets)
        finally:
            keys = [change.key for change in changes]
            pipeline.emit(events.Handled(pipeline=pipeline.name, keys=keys, seconds=pipeline.clock() - started))

    async def _conclude(self, endings: Sequence[Ending]) -> None:
        """Ack what was written, and release what failed: counting attempts and dead-lettering need the ledger."""
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
        # Ack before anything else: a message that is redelivered after it has left its lane gets a new receipt,
        # and the ack with the old one would do nothing.
        await self._settlement.settle(settled)
        for ticket, result in failed:
            await self._release(ticket, result)

    async def _release(self, ticket: Ticket, result: SinkResult) -> None:
        pipeline, settlement = self._pipeline, self._settlement
        self._lanes.leave(ticket)
        if result.wait_s is not None:
            await settlement.snooze(ticket, result.wait_s)
            return
        wait_s = pipeline.retry_s(ticket.delivery.count)
        pipeline.emit(settlement.failed(ticket, result.cause, ticket.delivery.count, wait_s, result.traceback))
        await settlement.release([ticket], wait_s)

    async def _ended(self, shown: Sequence[Ticket], clean: Sequence[Ticket]) -> None:
        # If this fails, the keys stay in the journal as in flight: they count as written, and are withheld
        # if this worker dies.
        with suppress(UnavailableError):
            await self._journal.ended([t.change.key for t in shown], [t.change.key for t in clean])

    def _since(self) -> float:
        return self._pipeline.wall() - self._pipeline.outage.seconds

    # The ledger.

    async def _probe(self) -> None:
        """Probe the ledger until it answers."""
        attempts = 0
        while self._pipeline.outage.is_down:
            attempts += 1
            await asyncio.sleep(min(PROBE_MAX_S, self._pipeline.retry_s(attempts)))
            try:
                # The probe is a write: a ledger that can only be read is not back.
                await self._pipeline.control_store.acquire("probe", 0.0)
            except UnavailableError as error:
                self._pipeline.outage.failed(str(error))
            else:
                self._pipeline.outage.answered()
        self._lanes.arrivals.notify()

    async def _find(self) -> None:
        """Take over the journals of dead workers. An error is reported, and does not stop the work."""
        try:
            await self._journal.find()
        except UnavailableError as error:
            self._report_trouble(error)

    def _report_trouble(self, error: UnavailableError) -> None:
        """Report an error of the journal, but not more often than maintenance runs: it recurs with every batch."""
        now, retry_s = self._pipeline.clock(), self._pipeline.settings.maintenance_s
        if now >= self._trouble_due:
            self._trouble_due = now + retry_s
            self._pipeline.count_unavailable("journal", error, retry_s)

    async def _hand_over(self) -> bool:
        """Mark the journaled keys as suspect in the ledger, and only then forget the journals."""
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
        """Remove journals that were handed over. An error is reported, and does not stop the work.

        A journal that cannot be removed is not handed over again as long as this worker lives.
        """
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
    """Whether the change may be in the sink."""
    is_written = result.outcome not in (Outcome.BUSY, Outcome.FAILED)
    return is_written or result.certainty is not Certainty.CLEAN
