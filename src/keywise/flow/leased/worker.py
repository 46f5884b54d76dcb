"""The worker of the leased strategies: claim, execute concurrently under renewed leases, commit, ack.

A claim also records that its change is in flight. Therefore handlers that write inside the ledger's transaction
(`TransactionExecutor`) are run by this worker too; only their commit is part of the transaction.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Protocol

from msgspec.structs import replace

from keywise.core import events
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Certainty, Claim, Commit, LeaseTerms, Level, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.ledger import Failure
from keywise.flow.dead_letters import DeadLetterStep
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Lanes, SettledTicket, Ticket
from keywise.flow.leased.acks import AckLoop
from keywise.flow.leased.dispatch import RESERVED_PART, ClaimWindow, DispatchQueue, WorkerBackoff
from keywise.flow.leased.disposition import (
    NOT_STARTED,
    Acted,
    CutOff,
    Disposition,
    Execution,
    NotStarted,
    OnProbation,
    Ran,
    Reject,
    Skip,
    Wait,
    dispose,
    exhausted,
    on_refusal,
)
from keywise.flow.leased.executors import Executor, FinishedJob, Job
from keywise.flow.leased.probation import ON_PROBATION, PAUSE_LEASES_MAX, AloneTurns, Company
from keywise.flow.leased.repairs import RepairLoop
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.repair import Repairer
from keywise.flow.settlement import Settlement
from keywise.flow.wakeup import Wakeup

_NEVER = float("inf")

NEVER_ALONE = "{key!r} has to run alone, because workers died with it, but other changes never ended within a lease"
NEVER_ALONE_ADVICE = "look for calls that take longer than the lease, and give handlers a time limit"

LEDGER_STEPS = (
    (Disposition.COMMIT, Disposition.ACK_ONLY),
    (Disposition.DEAD_LETTER,),
    (Disposition.INTERRUPTED,),
    (Disposition.RETRY,),
    (Disposition.RELEASE, Disposition.BACK_OFF, Disposition.SNOOZE),
)
"""The dispositions that one call of the ledger records together, in the order of the calls."""


class Fallback(Protocol):
    """What goes on while the ledger is down."""

    @property
    def due(self) -> float:
        """When `is_settled` wants to be called again at the latest."""

    @property
    def is_at_work(self) -> bool:
        """Whether it writes now, so that nothing may be claimed."""

    def stop(self) -> None: ...

    def close(self) -> None: ...

    async def is_settled(self, calls: Callable[[], int], repaired: Set[str]) -> bool:
        """Whether changes may be claimed.

        `calls` returns how many calls under claims still run, and `repaired` always has the keys whose repairs run:
        nothing else may write them.
        """

    async def adopt(self, finished: Sequence[FinishedJob]) -> None:
        """Settle finished changes that the ledger could not record. Raises UnavailableError if nothing was settled."""


class WaitForLedger:
    """The fallback that writes nothing: calls of the ledger are repeated until it is back."""

    due = _NEVER
    is_at_work = False

    def stop(self) -> None: ...

    def close(self) -> None: ...

    async def is_settled(self, calls: Callable[[], int], repaired: Set[str]) -> bool:
        return True

    async def adopt(self, finished: Sequence[FinishedJob]) -> None:
        raise AssertionError("a pipeline without degraded mode waits for its ledger")


class LeasedWorker:
    """Claims in batches, executes concurrently, commits in batches.

    Five kinds of tasks share the work. The claim loop takes tickets from the lanes and puts granted ones into
    `_claimed`; worker tasks execute them and append them to `_done`; the commit loop concludes those in batches; the
    ack loop acks a batch while the next one is committed; the repair loop repairs suspect keys.
    `_open` counts the changes between claim and conclusion.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        settlement: Settlement,
        lanes: Lanes,
        heartbeat: Heartbeat,
        executor: Executor,
        fallback: Fallback,
    ) -> None:
        self._pipeline = pipeline
        self._settlement = settlement
        self._lanes = lanes
        self._heartbeat = heartbeat
        heartbeat.on_progress = lanes.arrivals.notify
        self._executor = executor
        self._fallback = fallback
        self._stopping = False
        self._open = 0
        self._window = ClaimWindow(executor.side_by_side, executor.batch_max, pipeline.settings.batch_max)
        self._open_bulk = 0
        self._separates = bool(pipeline.bulk) or executor.has_long_jobs
        """Whether bulk changes and long jobs wait in a queue of their own, and leave some workers to the others."""
        has_reserve = pipeline.has_both_lanes or executor.has_long_jobs
        self._live_workers = executor.side_by_side // RESERVED_PART if has_reserve else 0
        self._claimed: DispatchQueue[Job] = DispatchQueue(executor.long_max, pipeline.clock)
        self._backoff = WorkerBackoff(executor.side_by_side)
        self._done: list[FinishedJob] = []
        self._done_wakeup = Wakeup()
        self._acks = AckLoop(settlement)
        self._calls = 0
        self._company = Company(executor.side_by_side, pipeline.settings.lease_s, pipeline.clock)
        self._alone_turns = AloneTurns(PAUSE_LEASES_MAX * pipeline.settings.lease_s)
        self._repairer = Repairer(pipeline, heartbeat)
        self._repairs = RepairLoop(
            pipeline, self._repairer, self._company, lanes.arrivals, lambda: not self._fallback.is_at_work
        )

    def stop(self) -> None:
        self._stopping = True
        self._executor.stop()
        self._backoff.end()
        self._fallback.stop()
        self._repairs.stop()
        self._lanes.arrivals.notify()

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._fallback.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(self._commit_until_stopped())
            acking = group.create_task(self._acks.run())
            group.create_task(self._repairs.run())
            workers = [
                group.create_task(self._work_until_stopped(live_only=number < self._live_workers))
                for number in range(self._executor.side_by_side)
            ]
            await self._claim_until_stopped()
            self._claimed.close()
            await asyncio.gather(*workers)
            await self._until_idle()
            committing.cancel()
            await self._acks.until_idle()
            acking.cancel()

    # Claim.

    async def _claim_until_stopped(self) -> None:
        """Claim changes until stopped. Each round does the first thing that is due, then checks again."""
        while not self._stopping:
            # While the ledger is down, the fallback works here. Afterwards it makes the keys suspect that it wrote,
            # and no change is claimed before the ledger knows them all.
            if not await self._fallback.is_settled(lambda: self._calls, self._repairer.keys):
                continue
            # What has to run alone goes first: ordinary changes would keep this process from being idle.
            if self._may_run_alone() and await self._run_alone():
                continue
            if await self._claim_on_probation():
                continue
            # Claim in larger batches rather than one change at a time; see ClaimWindow.
            free, now = self._window.limit - self._open, self._pipeline.clock()
            tickets = self._lanes.take(free, now, self._bulk_free(free)) if self._is_due(free) else []
            if tickets:
                self._window.adapt(len(self._claimed), now)
                await self._claim(tickets, Level.USUAL)
            else:
                # Sleep until something changes: a ticket arrives, a change is concluded, or a time has come.
                # A held lane that becomes due matters only if there is room to claim it.
                due = self._lanes.next_due() if free and self._is_due(free) else None
                window_due = self._company.window.next_free(now)
                soonest = min(due or _NEVER, self._fallback.due, self._alone_due(), window_due)
                await self._lanes.arrivals.wait(self._pipeline.until(soonest))

    def _is_due(self, free: int) -> bool:
        """Whether to claim now. With live and bulk sources always: a live change must overtake waiting bulk changes."""
        is_due = self._pipeline.has_both_lanes or self._window.is_due(free, len(self._claimed))
        return is_due and not self._backoff.all_resting

    def _bulk_free(self, free: int) -> int:
        if not self._pipeline.has_both_lanes:
            return free
        bulk_max = max(1, self._window.least - self._window.least // RESERVED_PART)
        return min(free, bulk_max - self._open_bulk)

    async def _claim_on_probation(self) -> bool:
        """Claim changes on probation, as many as the window has room for; False if there are none."""
        window, lanes = self._company.window, self._lanes
        level, free = window.next(
            self._pipeline.clock(),
            sole_waits=lanes.has_on_probation(Level.SOLE),
            others_wait=lanes.has_on_probation(Level.PROBATION),
        )
        # If all workers rest, claim nothing: the claim would wait unused.
        tickets = lanes.take_on_probation(level, free) if not self._backoff.all_resting else []
        if tickets:
            with window.claiming():
                await self._claim(tickets, level)
        return bool(tickets)

    def _may_run_alone(self) -> bool:
        if not self._has_alone():
            return False
        now = self._pipeline.clock()
        # A claimed change that has not begun waits too: draining would release it, and it would never begin.
        others_wait = len(self._claimed) > 0 or self._lanes.has_waiting(now)
        return self._alone_turns.is_due(now, others_wait=others_wait)

    def _has_alone(self) -> bool:
        return self._repairs.has_alone or self._lanes.has_on_probation(Level.ALONE)

    def _alone_due(self) -> float:
        """When the claim loop has to look again for a change that has to run alone, though nothing happens."""
        due = self._alone_turns.not_before
        return due if self._has_alone() and due > self._pipeline.clock() else _NEVER

    async def _run_alone(self) -> bool:
        """Run one change with nothing beside it, so that another crash can be attributed to it; False if none waits.

        It is claimed first, without noting its beginning: so only one process drains for it, and a death meanwhile
        does not count.
        """
        if (key := self._repairs.take_alone()) is not None:
            await self._repair_alone(key)
            return True
        tickets = self._lanes.take_on_probation(Level.ALONE)
        for job in await self._claim(tickets, Level.ALONE):
            with self._company.draining():
                await self._run_drained(job)
        return bool(tickets)

    async def _repair_alone(self, key: str) -> None:
        try:
            answer = await self._repairer.claim(key, Level.ALONE)
            if isinstance(answer, Refusal):
                return
            if answer.took_over:
                self._company.window.took_over(answer.level)
            if not self._repairer.would_run(answer):
                await self._repairer.run_under(answer)  # It only ends the claim: other keys need not wait for that.
                return
            with self._company.draining():
                if await self._is_drained(0, key):
                    await self._repairer.run_under(answer)
                else:
                    await self._repairer.release(answer)
        except UnavailableError as error:
            await self._pipeline.back_off(LEDGER, error, 1)

    async def _is_drained(self, most: int, key: str) -> bool:
        """Wait until at most so many changes are open, for a lease; False if other changes did not end in time."""
        pipeline, started = self._pipeline, self._pipeline.clock()
        self._undo(self._claimed.take_all())
        await self._until(lambda: self._is_idle(most), pipeline.settings.lease_s)
        if self._stopping:
            return False
        if self._is_idle(most):
            self._alone_turns.succeeded()
            return True
        now = pipeline.clock()
        if self._alone_turns.failed(now, now - started):
            cause = NEVER_ALONE.format(key=key)
            pipeline.emit(events.Alarmed(pipeline=pipeline.name, cause=cause, advice=NEVER_ALONE_ADVICE))
        return False

    async def _run_drained(self, job: Job) -> None:
        pipeline, claim = self._pipeline, job.claim
        if not await self._is_drained(1, claim.key):
            self._undo([job])
            return
        self._dispatch([job])
        alone_s = min(pipeline.settings.lease_s * 2**claim.late_deaths, pipeline.settings.runtime_max_s)
        await self._until(lambda: not self._open or self._has_progressed(claim), alone_s)
        if self._has_progressed(claim):
            return  # The ledger has forgiven the deaths: nothing has to wait for the other parts.
        # The change has outlasted its time alone. Record that first, then let other changes begin: a later death may be
        # their fault.
        # After a stop nothing else begins, so the change stays alone. If the claim is lost, nothing is left to store,
        # and a handler that ignores its cancellation must not keep the others waiting.
        while self._open and not self._stopping and self._heartbeat.holds(claim):
            if await self._heartbeat.accompany(pipeline.ledger, claim):
                return
            await self._until(lambda: not self._open, pipeline.retry_s(1))

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition that the end of a change may fulfil, until the time is up or the worker is stopped."""
        deadline = self._pipeline.clock() + limit_s
        while not condition() and not self._stopping and (left_s := deadline - self._pipeline.clock()) > 0:
            await self._lanes.arrivals.wait(left_s)

    def _has_progressed(self, claim: Claim) -> bool:
        return self._heartbeat.current(claim).level is not claim.level

    def _is_idle(self, most: int) -> bool:
        """Whether at most so many changes are open, no repair runs, and a worker is free to begin."""
        return self._open <= most and not self._company.repairs and not self._backoff.all_resting

    async def _until_idle(self) -> None:
        while self._open:
            await self._lanes.arrivals.wait()

    async def _claim(self, tickets: Sequence[Ticket], level: Level) -> list[Job]:
        """Claim changes and dispatch those that are granted; return those that have to run alone."""
        if not tickets:
            return []
        pipeline = self._pipeline
        terms = LeaseTerms(pipeline.owner, pipeline.settings.lease_s, level)
        # Before the call: the holder's deadline must not lie after the ledger's.
        asked_at = pipeline.clock()
        try:
            results = await pipeline.ledger.claim([ticket.change for ticket in tickets], terms)
        except UnavailableError as error:
            # If the claim arrived all the same, the next one comes from the same owner and is granted after the lease.
            for ticket in tickets:
                self._lanes.hold(ticket, pipeline.clock())
            await pipeline.back_off(LEDGER, error, 1)
            return []
        pipeline.outage.answered()
        by_key = {ticket.change.key: ticket for ticket in tickets}
        self._heartbeat.hold(results.granted, asked_at)
        jobs = self._opened([self._job(by_key[claim.key], claim) for claim in results.granted], level)
        self._dispatch([job for job in jobs if job.claim.level is not Level.ALONE])
        await self._refuse([(by_key[key], refusal) for key, refusal in results.refused.items()])
        return [job for job in jobs if job.claim.level is Level.ALONE]

    def _job(self, ticket: Ticket, claim: Claim) -> Job:
        job = Job(ticket, claim)
        if not self._separates:
            return job
        return replace(job, is_bulk=ticket.source in self._pipeline.bulk or self._executor.is_long(job))

    def _dispatch(self, jobs: Sequence[Job]) -> None:
        """Hand claimed changes to the worker tasks."""
        if self._separates:
            for job in jobs:
                self._claimed.put(job, is_bulk=job.is_bulk)
        else:
            self._claimed.put(*jobs)

    def _opened(self, jobs: list[Job], asked: Level) -> list[Job]:
        """Count granted claims as open; finish those that must not run: return the others.

        A change that has used up its crashes or attempts becomes a dead letter. A claim that was asked for alone may be
        granted on probation, if the key was committed and died with again meanwhile; without room it is released.
        """
        if not jobs:
            return []
        pipeline, window, now = self._pipeline, self._company.window, self._pipeline.clock()
        self._count([job.ticket for job in jobs], 1)
        pipeline.emit(events.BatchOpened(pipeline=pipeline.name, changes=len(jobs)))
        opened: list[Job] = []
        for job in jobs:
            claim = job.claim
            if claim.took_over:
                version = job.ticket.change.version
                pipeline.emit(
                    events.TookOver(pipeline=pipeline.name, key=claim.key, version=version, crashes=claim.crashes)
                )
                window.took_over(claim.level)
            has_room = True
            if claim.level in ON_PROBATION:
                has_room = asked is not Level.ALONE or window.has_room(claim.level, now)
                window.claimed(claim.token, claim.level)
            if not has_room or exhausted(claim, pipeline.settings):
                self._finish(job, NOT_STARTED)
            else:
                opened.append(job)
        return opened

    async def _refuse(self, refused: list[tuple[Ticket, Refusal]]) -> None:
        """Settle, dead-letter or hold the changes whose claims were refused, or put them on probation."""
        pipeline, lanes, settled = self._pipeline, self._lanes, list[SettledTicket]()
        rejected: list[tuple[Ticket, str]] = []
        for ticket, refusal in refused:
            match on_refusal(refusal, pipeline.rng):
                case Skip(outcome, mark):
                    settled += lanes.finish(ticket, outcome, mark)
                case Reject(cause):
                    rejected.append((ticket, cause))
                case OnProbation(level):
                    lanes.put_on_probation(ticket, level)
                case Wait(seconds, blocks_newer):
                    lanes.hold(ticket, pipeline.clock() + seconds, blocks_newer=blocks_newer)
                    pipeline.emit(self._settlement.refused(ticket, refusal.reason, seconds))
        if refused:
            await self._settlement.settle(settled)
            await self._dead_letter_unclaimed(rejected)
            self._lanes.departures.notify()

    async def _dead_letter_unclaimed(self, rejected: list[tuple[Ticket, str]]) -> None:
        pipeline, settled = self._pipeline, list[SettledTicket]()
        if not rejected:
            return
        requests = [DeadLetterRequest(self._settlement.letter(ticket, cause)) for ticket, cause in rejected]
        try:
            await pipeline.retry_until_reachable(LEDGER, DeadLetterStep(pipeline, requests))
        except UnavailableError:
            for ticket, _ in rejected:
                self._lanes.hold(ticket, pipeline.clock())
            return
        for ticket, cause in rejected:
            pipeline.emit(self._settlement.dead_lettered(ticket, cause))
            settled += self._lanes.dead_letter(ticket)
        await self._settlement.settle(settled)

    # Work.

    async def _work_until_stopped(self, *, live_only: bool) -> None:
        while (job := await self._claimed.get(live_only=live_only)) is not None:
            jobs = [job, *self._beside(job)]
            rest_s = 0.0
            if self._stopping or self._fallback.is_at_work or (self._company.is_draining and not _runs_alone(job)):
                self._undo(jobs)
            else:
                rest_s = await self._work_on(jobs)
            self._claimed.done(is_bulk=job.is_bulk)
            if rest_s:
                await self._backoff.wait(rest_s, lambda: self._undo(self._claimed.take_all()))
                self._lanes.arrivals.notify()

    def _beside(self, job: Job) -> list[Job]:
        """Take more jobs for the same call. A change that failed before or is on probation gets a call of its own."""
        if not self._may_share(job):
            return []
        is_bulk = job.is_bulk
        is_short = is_bulk and self._pipeline.has_both_lanes
        limit = self._executor.short_max if is_short else self._executor.batch_max
        return self._claimed.take_beside(self._may_share, limit - 1, is_bulk=is_bulk)

    def _may_share(self, job: Job) -> bool:
        return job.claim.level is Level.USUAL and not self._executor.goes_apart(job)

    async def _work_on(self, jobs: list[Job]) -> float:
        """Execute jobs; return how many seconds the worker should back off afterwards."""
        ledger, heartbeat = self._pipeline.ledger, self._heartbeat
        in_time = list[Job]()
        for job in jobs:
            claim = job.claim
            # On probation the beginning is noted first, so that a death counts against the change.
            is_begun = claim.level is Level.USUAL or await heartbeat.begin(ledger, claim)
            if not is_begun or heartbeat.has_ended(claim):
                self._undo([job])
                continue
            in_time.append(job)
            if claim.level in ON_PROBATION:
                self._company.window.begun(claim.token, self._pipeline.clock())
        self._calls += 1
        if in_time and not _runs_alone(in_time[0]):
            self._alone_turns.change_begun()
        try:
            executions = await self._executor.execute(in_time) if in_time else []
        finally:
            self._calls -= 1
        rest_s = 0.0
        for job, execution in zip(in_time, executions, strict=True):
            if not isinstance(execution, NotStarted):
                rest_s = max(rest_s, execution.rest_s)
            if isinstance(execution, Ran) and heartbeat.has_ended(job.claim):
                self._finish(job, replace(execution, overdue=True))
            else:
                self._finish(job, execution)
        return rest_s

    def _undo(self, jobs: Sequence[Job]) -> None:
        """Finish jobs that have not begun: their claims are released."""
        for job in jobs:
            self._finish(job, NOT_STARTED)

    def _finish(self, job: Job, execution: Execution) -> None:
        heartbeat, settings = self._heartbeat, self._pipeline.settings
        claim = heartbeat.current(job.claim) if heartbeat.has_progress else job.claim
        match execution:
            case Ran(result=result):
                cause = result.cause
            case CutOff(cause=cause):
                pass
            case _:
                cause = exhausted(claim, settings) or ""
        self._done.append(FinishedJob(job.ticket, claim, execution, dispose(execution, claim, settings), cause))
        self._done_wakeup.notify()

    # Commit.

    async def _commit_until_stopped(self) -> None:
        while True:
            await self._done_wakeup.wait()
            if finished := self._done:
                self._done = []
                for some in _by_step(finished):
                    await self._conclude(some)
                self._count([one.ticket for one in finished], -1)
                if not self._company.window.is_empty:
                    self._free_places(finished)
                self._pipeline.emit(events.BatchClosed(pipeline=self._pipeline.name, changes=len(finished)))
                self._lanes.arrivals.notify()
                self._lanes.departures.notify()

    def _free_places(self, finished: list[FinishedJob]) -> None:
        """Free the places of changes on probation. Progress has ended the level of some, but not their place."""
        window = self._company.window
        for one in finished:
            if one.claim.token in window:
                window.end(one.claim.token, clean=not isinstance(one.execution, NotStarted))

    async def _conclude(self, finished: list[FinishedJob]) -> None:
        """Record finished changes in the ledger, all in one call, and settle each as the ledger has answered."""
        if finished[0].disposition in (Disposition.COMMIT, Disposition.ACK_ONLY):
            # Extend first: a message that is redelivered during its own commit would be processed for nothing.
            await self._settlement.extend([one.ticket for one in finished], age=1 / 2)
        # Drawn once: the call may be repeated.
        retries = {
            one.claim.token: self._pipeline.retry_s(one.claim.attempts + 1)
            for one in finished
            if one.disposition is Disposition.RETRY
        }
        answers = await self._act(finished, self._recording(finished, retries))
        self._heartbeat.drop(one.claim for one in finished)
        if finished[0].disposition in (Disposition.COMMIT, Disposition.ACK_ONLY):
            await self._acks.settle(lambda: self._end(finished, answers, retries))
            return
        await self._settlement.settle(self._end(finished, answers, retries))
        for one, acted in zip(finished, answers, strict=True):
            if one.disposition is Disposition.SNOOZE and acted is Acted.SETTLED:
                await self._settlement.snooze(one.ticket, one.result.wait_s or 0.0)

    def _end(self, finished: list[FinishedJob], answers: list[Acted], retries: dict[int, float]) -> list[SettledTicket]:
        """Do in the lanes what the ledger has answered; return what is to be acked."""
        settled: list[SettledTicket] = []
        for one, acted in zip(finished, answers, strict=True):
            match acted:
                case Acted.SETTLED:
                    settled += self._settle(one, retries)
                case Acted.LOST:
                    self._lose(one)
                case Acted.JOURNALED:
                    pass
        self._lanes.arrivals.notify()
        self._lanes.departures.notify()
        return settled

    def _recording(
        self, finished: list[FinishedJob], retries: dict[int, float]
    ) -> Callable[[], Awaitable[list[Claim]]]:
        """Return the call that records finished changes of one step; it returns the claims that are lost."""
        ledger, claims = self._pipeline.ledger, [one.claim for one in finished]
        match finished[0].disposition:
            case Disposition.COMMIT | Disposition.ACK_ONLY:
                uncommitted = [one for one in finished if one.disposition is Disposition.COMMIT]
                commits = [Commit(one.claim, one.is_overdue) for one in uncommitted]
                self._heartbeat.end(one.claim for one in uncommitted)
                return lambda: ledger.commit(commits) if commits else _nothing_lost()
            case Disposition.DEAD_LETTER:
                requests = [
                    DeadLetterRequest(
                        self._settlement.letter(one.ticket, one.cause, one.result.traceback),
                        one.claim,
                        one.result.certainty,
                    )
                    for one in finished
                ]
                return DeadLetterStep(self._pipeline, requests)
            case Disposition.RETRY:
                failures = [
                    Failure(one.claim, one.result.certainty, retries[one.claim.token], one.is_overdue)
                    for one in finished
                ]
                return lambda: _nothing_lost(ledger.fail(failures))
            case Disposition.INTERRUPTED:
                interruptions = [
                    Failure(claim, Certainty.UNKNOWN, overdue=True, counts_attempt=False) for claim in claims
                ]
                return lambda: _nothing_lost(ledger.fail(interruptions))
            case Disposition.RELEASE | Disposition.BACK_OFF | Disposition.SNOOZE:
                return lambda: _nothing_lost(ledger.release(claims))

    async def _act(self, finished: list[FinishedJob], record: Callable[[], Awaitable[list[Claim]]]) -> list[Acted]:
        """Record finished changes in the ledger, or hand them to the fallback while the ledger is down."""
        while True:
            try:
                lost = {claim.token for claim in await self._pipeline.retry_until_reachable(LEDGER, record)}
                return [Acted.LOST if one.claim.token in lost else Acted.SETTLED for one in finished]
            except UnavailableError:
                pass  # The ledger is down, and the pipeline goes on without it.
            try:
                await self._fallback.adopt(finished)
                return [Acted.JOURNALED] * len(finished)
            except UnavailableError as error:
                await self._pipeline.back_off("journal", error, 1)

    def _settle(self, one: FinishedJob, retries: dict[int, float]) -> list[SettledTicket]:
        """Do with a change in its lane what the ledger has recorded; return what is to be acked."""
        pipeline, lanes, ticket = self._pipeline, self._lanes, one.ticket
        match one.disposition:
            case Disposition.COMMIT | Disposition.ACK_ONLY:
                return lanes.finish(ticket, one.result.outcome, ticket.change.order)
            case Disposition.DEAD_LETTER:
                pipeline.emit(self._settlement.dead_lettered(ticket, one.cause, one.result.traceback))
                return lanes.dead_letter(ticket)
            case Disposition.RETRY:
                retry_s = retries[one.claim.token]
                lanes.hold(ticket, pipeline.clock() + retry_s)
                attempts = one.claim.attempts + 1
                pipeline.emit(self._settlement.failed(ticket, one.cause, attempts, retry_s, one.result.traceback))
            case Disposition.INTERRUPTED:
                lanes.hold(ticket, pipeline.clock() + pipeline.retry_s(1))
            case Disposition.RELEASE:
                lanes.hold(ticket, pipeline.clock())
            case Disposition.BACK_OFF:
                # Not before the worker's own back-off ends: other workers would pick it up at once and fail again.
                rest_s = one.execution.rest_s if isinstance(one.execution, Ran) else 0.0
                lanes.hold(ticket, pipeline.clock() + max(rest_s, pipeline.retry_s(1)))
            case Disposition.SNOOZE:
                # Released to its source, for any delay: it then takes no room here, and survives a restart.
                lanes.leave(ticket)
        return []

    def _count(self, tickets: Sequence[Ticket], sign: int) -> None:
        self._open += sign * len(tickets)
        if bulk := self._pipeline.bulk:
            self._open_bulk += sign * sum(ticket.source in bulk for ticket in tickets)

    def _lose(self, one: FinishedJob) -> None:
        """The claim is lost. Put the change back: the next claim shows whether another worker has applied it."""
        self._pipeline.emit(events.ClaimLost(pipeline=self._pipeline.name, key=one.claim.key))
        self._lanes.hold(one.ticket, self._pipeline.clock())


def _by_step(finished: list[FinishedJob]) -> list[list[FinishedJob]]:
    """Group finished changes by the call of the ledger that records them, in the order of the calls."""
    if all(one.disposition is Disposition.COMMIT for one in finished):
        return [finished]
    groups = ([one for one in finished if one.disposition in step] for step in LEDGER_STEPS)
    return [some for some in groups if some]


def _runs_alone(job: Job) -> bool:
    return job.claim.level is Level.ALONE


async def _nothing_lost(act: Awaitable[None] | None = None) -> list[Claim]:
    if act is not None:
        await act
    return []
