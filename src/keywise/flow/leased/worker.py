"""The worker of the leased strategies: claim, execute concurrently under renewed leases, commit, ack.

A claim also records that its change is in flight. Therefore handlers that write inside the ledger's transaction
(`TransactionExecutor`) are run by this worker too; only their commit is part of the transaction.
"""

import asyncio
from collections.abc import Awaitable, Callable

from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Certainty, Claim, LeaseTerms, Refusal, RefusalReason
from keywise.core.errors import UnavailableError
from keywise.core.failures import cause_of_refusal, concerns_key, look_again_s
from keywise.core.ledger import Failure
from keywise.core.sink import SinkResult
from keywise.flow.degraded.writer import DegradedWorker
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Lanes, SettledTicket, Ticket
from keywise.flow.leased.dispatch import RESERVED_PART, ClaimWindow, DispatchQueue, WorkerBackoff
from keywise.flow.leased.executors import Executor, Job, dead_result
from keywise.flow.pipeline import LEDGER, Pipeline
from keywise.flow.repair import Repairer
from keywise.flow.wakeup import Wakeup


class LeasedWorker:
    """Claims in batches, executes concurrently, commits in batches.

    Three kinds of tasks share the work. The claim loop takes tickets from the lanes and puts granted ones into
    `_claimed`; worker tasks execute them and append them to `_done`; the commit loop concludes those in batches.
    `_open` counts the changes between claim and conclusion.
    """

    def __init__(
        self, pipeline: Pipeline, lanes: Lanes, heartbeat: Heartbeat, executor: Executor, wakeup: Wakeup, room: Wakeup
    ) -> None:
        self._pipeline = pipeline
        self._lanes = lanes
        self._heartbeat = heartbeat
        self._executor = executor
        self._repairer = Repairer(pipeline, heartbeat)
        self._wakeup = wakeup
        self._room = room
        self._stopping = False
        self._open = 0
        self._window = ClaimWindow(executor.side_by_side, executor.batch_max, pipeline.settings.batch_max)
        self._open_bulk = 0
        self._live_workers = executor.side_by_side // RESERVED_PART if pipeline.has_both_lanes else 0
        # One bulk call for many changes keeps a sink busy; a second one beside it would only delay live changes.
        self._claimed: DispatchQueue[Job] = DispatchQueue(
            1 if executor.batch_max > 1 else executor.side_by_side, pipeline.clock
        )
        self._backoff = WorkerBackoff(executor.side_by_side)
        self._done: list[Job] = []
        self._done_wakeup = Wakeup()
        self._calls = 0
        self._degraded: DegradedWorker | None = None
        if pipeline.journal_store is not None:
            self._degraded = DegradedWorker(pipeline, lanes, executor, pipeline.journal_store, wakeup, room)

    def stop(self) -> None:
        self._stopping = True
        self._backoff.end()
        if self._degraded is not None:
            self._degraded.stop()
        self._wakeup.notify()

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            if self._degraded is not None:
                self._degraded.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(self._commit_until_stopped())
            workers = [
                group.create_task(self._work_until_stopped(live_only=number < self._live_workers))
                for number in range(self._executor.side_by_side)
            ]
            await self._claim_until_stopped()
            self._claimed.close()
            await asyncio.gather(*workers)
            await self._until_idle()
            committing.cancel()

    # Claim.

    async def _claim_until_stopped(self) -> None:
        """Claim changes until stopped. Each round does the first thing that is due, then checks again."""
        while not self._stopping:
            # While the ledger is down, this call writes without it. Afterwards it makes the written keys suspect,
            # and no change is claimed before the ledger knows them all.
            if self._degraded is not None and not await self._degraded.is_settled(lambda: self._calls):
                continue
            # Isolated changes go before ordinary ones, which would otherwise keep the worker from ever being idle.
            if self._lanes.has_isolated and await self._claim_isolated():
                continue
            # A repair runs isolated too: it calls user code.
            if self._repairer.due <= self._pipeline.clock() and (suspects := await self._repairer.suspects()):
                await self._until_idle()
                await self._repairer.run(suspects)
            # Claim in larger batches rather than one change at a time; see ClaimWindow.
            free, now = self._window.limit - self._open, self._pipeline.clock()
            tickets = self._lanes.take(free, now, self._bulk_free(free)) if self._is_due(free) else []
            if tickets:
                self._window.adapt(len(self._claimed), now)
                await self._claim(tickets, isolated=False)
            else:
                # Sleep until something changes: a ticket arrives, a change is concluded, or a time has come.
                # A held lane that becomes due matters only if there is room to claim it.
                due = self._lanes.next_due() if free and self._is_due(free) else None
                look_at = self._degraded.due if self._degraded is not None else _NEVER
                await self._wakeup.wait(self._pipeline.until(min(due or _NEVER, self._repairer.due, look_at)))

    def _is_due(self, free: int) -> bool:
        """Whether to claim now. With live and bulk sources always: a live change must overtake waiting bulk changes."""
        is_due = self._pipeline.has_both_lanes or self._window.is_due(free, len(self._claimed))
        return is_due and not self._backoff.all_resting

    def _bulk_free(self, free: int) -> int:
        if not self._pipeline.has_both_lanes:
            return free
        bulk_max = max(1, self._window.least - self._window.least // RESERVED_PART)
        return min(free, bulk_max - self._open_bulk)

    async def _claim_isolated(self) -> bool:
        """Run one change with nothing beside it, so that another crash can be attributed to it."""
        await self._until_idle()
        ticket = self._lanes.take_isolated()
        if ticket is None:
            return False
        await self._claim([ticket], isolated=True)
        await self._until_idle()
        return True

    async def _until_idle(self) -> None:
        while self._open:
            await self._wakeup.wait()

    async def _claim(self, tickets: list[Ticket], *, isolated: bool) -> None:
        pipeline = self._pipeline
        terms = LeaseTerms(pipeline.owner, pipeline.settings.lease_s, isolated)
        # Before the call: the holder's deadline must not lie after the ledger's.
        asked_at = pipeline.clock()
        try:
            results = await pipeline.ledger.claim([ticket.change for ticket in tickets], terms)
        except UnavailableError as error:
            # If the claim arrived all the same, the next one comes from the same owner and is granted after the lease.
            for ticket in tickets:
                self._lanes.hold(ticket, pipeline.clock())
            await pipeline.back_off(LEDGER, error, 1)
            return
        pipeline.outage.answered()
        by_key = {ticket.change.key: ticket for ticket in tickets}
        self._heartbeat.hold(results.granted, asked_at)
        jobs = [Job(by_key[claim.key], claim) for claim in results.granted]
        self._begin(jobs)
        await self._refuse([(by_key[key], refusal) for key, refusal in results.refused.items()])

    def _begin(self, jobs: list[Job]) -> None:
        """Hand claimed changes to the worker tasks; dead-letter those that have used up their crashes or attempts."""
        if not jobs:
            return
        pipeline, settings = self._pipeline, self._pipeline.settings
        self._count(jobs, 1)
        pipeline.emit(events.BatchOpened(pipeline=pipeline.name, changes=len(jobs)))
        for job in jobs:
            claim = job.claim
            if claim.took_over:
                version = job.ticket.change.version
                pipeline.emit(
                    events.TookOver(pipeline=pipeline.name, key=claim.key, version=version, crashes=claim.crashes)
                )
            if claim.crashes >= settings.crashes_max:
                self._finish_job(job, dead_result(f"{claim.crashes} workers died alone with this change"))
            elif claim.attempts >= settings.attempts_max:
                # An unknown outcome is not dead-lettered at once, but here, after its lease has expired.
                self._finish_job(job, dead_result(f"the outcome of the last of {claim.attempts} attempts is unknown"))
            else:
                self._claimed.put(job, is_bulk=self._is_bulk(job))

    async def _refuse(self, refused: list[tuple[Ticket, Refusal]]) -> None:
        """Settle, dead-letter, isolate or hold the changes whose claims were refused."""
        pipeline, lanes, settled = self._pipeline, self._lanes, list[SettledTicket]()
        hopeless: list[tuple[Ticket, str]] = []
        for ticket, refusal in refused:
            match refusal.reason:
                case RefusalReason.STALE | RefusalReason.DUPLICATE:
                    assert refusal.mark is not None, "only a mark makes a change stale"
                    settled += lanes.finish(ticket, Outcome(refusal.reason.value), refusal.mark)
                case RefusalReason.MIXED | RefusalReason.FORGOTTEN:
                    hopeless.append((ticket, cause_of_refusal(refusal)))
                case RefusalReason.ISOLATED:
                    lanes.isolate(ticket)
                case _:
                    wait_s = look_again_s(refusal, pipeline.rng)
                    lanes.hold(ticket, pipeline.clock() + wait_s, blocks_newer=concerns_key(refusal))
                    pipeline.emit(pipeline.refused(ticket, refusal.reason, wait_s))
        if refused:
            await pipeline.settle(settled)
            await self._dead_letter_unclaimed(hopeless)
            self._room.notify()

    async def _dead_letter_unclaimed(self, hopeless: list[tuple[Ticket, str]]) -> None:
        pipeline, settled = self._pipeline, list[SettledTicket]()
        if not hopeless:
            return
        requests = [DeadLetterRequest(pipeline.dead_letter(ticket, cause)) for ticket, cause in hopeless]
        try:
            await pipeline.retry_until_reachable(LEDGER, lambda: pipeline.ledger.dead_letter(requests))
        except UnavailableError:
            for ticket, _ in hopeless:
                self._lanes.hold(ticket, pipeline.clock())
            return
        for ticket, cause in hopeless:
            pipeline.emit(pipeline.dead_lettered(ticket, cause))
            settled += self._lanes.dead_letter(ticket)
        await pipeline.settle(settled)

    # Work.

    async def _work_until_stopped(self, *, live_only: bool) -> None:
        while (job := await self._claimed.get(live_only=live_only)) is not None:
            jobs = [job, *self._beside(job)]
            rest_s = 0.0
            if self._stopping or (self._degraded is not None and self._degraded.is_at_work):
                self._undo(jobs)
            else:
                rest_s = await self._work_on(jobs)
            self._claimed.done(is_bulk=self._is_bulk(job))
            if rest_s:
                await self._backoff.wait(rest_s, lambda: self._undo(self._claimed.take_all()))
                self._wakeup.notify()

    def _beside(self, job: Job) -> list[Job]:
        """Take more jobs for the same call. A change that failed before gets a call of its own: see `goes_isolated`."""
        if self._executor.goes_isolated(job.claim):
            return []
        is_bulk = self._is_bulk(job)
        is_short = is_bulk and self._pipeline.has_both_lanes
        limit = self._executor.short_max if is_short else self._executor.batch_max
        return self._claimed.take_beside(
            lambda one: not self._executor.goes_isolated(one.claim), limit - 1, is_bulk=is_bulk
        )

    async def _work_on(self, jobs: list[Job]) -> float:
        """Execute jobs; return how many seconds the worker should back off afterwards."""
        ledger, heartbeat = self._pipeline.ledger, self._heartbeat
        # An isolated claim is renewed first: the renewal records that user code runs, so that a crash is counted.
        begun = [job for job in jobs if not job.claim.isolated or await heartbeat.begin(ledger, job.claim)]
        in_time = [job for job in begun if heartbeat.left_s([job.claim]) > 0]
        timely = {job.claim.token for job in in_time}
        self._undo([job for job in jobs if job.claim.token not in timely])
        self._calls += 1
        try:
            rest_s = await self._executor.execute(in_time) if in_time else 0.0
        finally:
            self._calls -= 1
        for job in in_time:
            job.undone = job.undone or job.result.outcome is Outcome.BUSY
            job.claim.overdue = self._heartbeat.left_s([job.claim]) <= 0
            self._finish_job(job, job.result)
        return rest_s

    def _undo(self, jobs: list[Job]) -> None:
        """Finish jobs that have not begun: their claims are released."""
        for job in jobs:
            job.undone = True
            self._finish_job(job, job.result)

    def _finish_job(self, job: Job, result: SinkResult) -> None:
        job.result = result
        self._done.append(job)
        self._done_wakeup.notify()

    # Commit.

    async def _commit_until_stopped(self) -> None:
        while True:
            await self._done_wakeup.wait()
            if jobs := self._done:
                self._done = []
                await self._conclude(jobs)
                self._count(jobs, -1)
                self._pipeline.emit(events.BatchClosed(pipeline=self._pipeline.name, changes=len(jobs)))
                self._wakeup.notify()
                self._room.notify()

    async def _conclude(self, jobs: list[Job]) -> None:
        """Commit, fail or release finished jobs, and settle their deliveries."""
        undone = [job for job in jobs if job.undone]
        good = [job for job in jobs if not job.undone and job.result.outcome is not Outcome.FAILED]
        bad = [job for job in jobs if not job.undone and job.result.outcome is Outcome.FAILED]
        if good:
            await self._commit(good)
        if bad:
            await self._fail(bad)
        if undone:
            await self._release(undone)

    async def _commit(self, jobs: list[Job]) -> None:
        pipeline = self._pipeline
        # Extend first: a message that is redelivered during its own commit would be processed for nothing.
        await pipeline.extend([job.ticket for job in jobs], age=1 / 2)
        claims = [job.claim for job in jobs if not job.committed]
        self._heartbeat.end(claims)
        refused = await self._retry_until_reachable(jobs, lambda: pipeline.ledger.commit(claims)) if claims else []
        self._heartbeat.drop(job.claim for job in jobs)
        if refused is None:
            return
        lost = {claim.token for claim in refused}
        settled: list[SettledTicket] = []
        for job in jobs:
            if job.claim.token in lost:
                self._lose(job)
            else:
                settled += self._lanes.finish(job.ticket, job.result.outcome, job.ticket.change.order)
        await pipeline.settle(settled)

    async def _retry_until_reachable(
        self, jobs: list[Job], act: Callable[[], Awaitable[list[Claim]]]
    ) -> list[Claim] | None:
        """Repeat a call of the ledger until it is answered.

        None means that the ledger is down and the degraded worker has concluded the jobs without it.
        """
        while True:
            try:
                return await self._pipeline.retry_until_reachable(LEDGER, act)
            except UnavailableError:
                assert self._degraded is not None, "without a degraded worker, the call is repeated for ever"
            try:
                await self._degraded.conclude_claimed(jobs)
                return None
            except UnavailableError as error:
                await self._pipeline.back_off("journal", error, 1)

    async def _fail(self, jobs: list[Job]) -> None:
        hopeless = [job for job in jobs if self._is_hopeless(job)]
        await self._dead_letter(hopeless)
        await self._fail_cut_off([job for job in jobs if job.cut_off])
        rest = [job for job in jobs if not self._is_hopeless(job) and not job.cut_off]
        retries = {job.claim.token: self._pipeline.retry_s(job.claim.attempts + 1) for job in rest}
        failures = [Failure(job.claim, job.result.certainty, retries[job.claim.token]) for job in rest]
        done = (
            await self._retry_until_reachable(rest, lambda: _done(self._pipeline.ledger.fail(failures)))
            if failures
            else []
        )
        self._heartbeat.drop(job.claim for job in rest)
        for job in rest if done is not None else []:
            retry_s = retries[job.claim.token]
            self._lanes.hold(job.ticket, self._pipeline.clock() + retry_s)
            attempts = job.claim.attempts + 1
            self._pipeline.emit(self._pipeline.failed(job.ticket, job.result.cause, attempts, retry_s))

    async def _fail_cut_off(self, jobs: list[Job]) -> None:
        """Fail changes that could not finish because the ledger or the sink was unreachable.

        It costs no attempt. The outcome is unknown, so the lease has to expire before the next attempt.
        """
        for job in jobs:
            job.claim.overdue = job.claim.cut_off = True
        failures = [Failure(job.claim, Certainty.UNKNOWN, 0.0) for job in jobs]
        done = (
            await self._retry_until_reachable(jobs, lambda: _done(self._pipeline.ledger.fail(failures)))
            if failures
            else []
        )
        self._heartbeat.drop(job.claim for job in jobs)
        for job in jobs if done is not None else []:
            self._lanes.hold(job.ticket, self._pipeline.clock() + self._pipeline.retry_s(1))

    def _is_hopeless(self, job: Job) -> bool:
        if job.cut_off:
            return False
        if job.result.certainty is Certainty.UNKNOWN:
            return False  # The write may still land: decide after the lease has expired.
        return job.result.permanent or job.claim.attempts + 1 >= self._pipeline.settings.attempts_max

    async def _dead_letter(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        pipeline = self._pipeline
        requests = [
            DeadLetterRequest(pipeline.dead_letter(j.ticket, j.result.cause), j.claim, j.result.certainty) for j in jobs
        ]
        lost = await self._retry_until_reachable(jobs, lambda: pipeline.ledger.dead_letter(requests))
        self._heartbeat.drop(job.claim for job in jobs)
        if lost is None:
            return
        tokens = {claim.token for claim in lost}
        settled: list[SettledTicket] = []
        for job in jobs:
            if job.claim.token in tokens:
                self._lose(job)
                continue
            pipeline.emit(pipeline.dead_lettered(job.ticket, job.result.cause))
            settled += self._lanes.dead_letter(job.ticket)
        await pipeline.settle(settled)

    async def _release(self, jobs: list[Job]) -> None:
        claims = [job.claim for job in jobs]
        done = await self._retry_until_reachable(jobs, lambda: _done(self._pipeline.ledger.release(claims)))
        self._heartbeat.drop(claims)
        for job in jobs if done is not None else []:
            if job.result.wait_s is not None:
                await self._snooze(job.ticket, job.result.wait_s)
                continue
            # Retry after the worker's back-off; otherwise the other workers would pick it up at once and fail again.
            wait_s = max(job.rest_s, self._pipeline.retry_s(1)) if job.result.outcome is Outcome.BUSY else 0.0
            self._lanes.hold(job.ticket, self._pipeline.clock() + wait_s)

    async def _snooze(self, ticket: Ticket, wait_s: float) -> None:
        """Release a snoozed change to its source, for any delay: it then takes no room here, and survives a restart."""
        pipeline, change = self._pipeline, ticket.change
        self._lanes.leave(ticket)
        pipeline.emit(events.Snoozed(pipeline=pipeline.name, key=change.key, version=change.version, wait_s=wait_s))
        await pipeline.release([ticket], wait_s)

    def _count(self, jobs: list[Job], sign: int) -> None:
        self._open += sign * len(jobs)
        self._open_bulk += sign * sum(map(self._is_bulk, jobs))

    def _is_bulk(self, job: Job) -> bool:
        return job.ticket.source in self._pipeline.bulk

    def _lose(self, job: Job) -> None:
        """The claim is lost. Put the change back: the next claim shows whether another worker has applied it."""
        self._pipeline.emit(events.ClaimLost(pipeline=self._pipeline.name, key=job.claim.key))
        self._lanes.hold(job.ticket, self._pipeline.clock())


_NEVER = float("inf")


async def _done(act: Awaitable[None]) -> list[Claim]:
    await act
    return []
