"""Executors of claimed changes: one calls a sink, the other runs handlers inside the ledger's transaction."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import msgspec
from msgspec.structs import replace

from keywise.core import events
from keywise.core.change import Order, Outcome
from keywise.core.database import SingleWriterDatabase
from keywise.core.entry import Certainty, Claim, Commit
from keywise.core.errors import TransactionFailedError, UnavailableError
from keywise.core.failures import cause_of_error, is_permanent
from keywise.core.limits import Snooze
from keywise.core.sink import APPLIED, AtomicSink, Sink, SinkResult
from keywise.core.tracebacks import traceback_of
from keywise.core.transaction import Transaction
from keywise.core.transaction_context import transaction_of
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Ticket
from keywise.flow.leased.disposition import NOT_STARTED, CutOff, Disposition, Execution, NotStarted, Ran
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.transactional import BULK_PART, write_all

FIRST_SLICE = 8
AWAY_ROUNDS_MAX = 4
"""A sink that cannot be reached is called less and less often, up to this step of the backoff."""
REMEMBERED_MAX = 10_000
"""How many changes `SinkHealth` remembers."""
SLICE_S = 0.1
"""If a transaction of handlers takes longer than this, the next one runs fewer handlers."""


class Job(msgspec.Struct, frozen=True, gc=False):
    """A claimed change."""

    ticket: Ticket
    claim: Claim
    is_bulk: bool = False
    """It gives way to the others: it came from a bulk source, or takes long."""


class FinishedJob(msgspec.Struct, frozen=True, gc=False):
    """A claimed change after its execution, or in place of it, and what to do with the change."""

    ticket: Ticket
    claim: Claim
    """As it is since its last position: progress forgives the failures before it."""
    execution: Execution
    disposition: Disposition
    cause: str

    @property
    def result(self) -> SinkResult:
        """The sink's answer, or what stands in for it where there was none."""
        match self.execution:
            case Ran(result=result):
                return result
            case CutOff():
                return SinkResult(Outcome.FAILED, self.cause, certainty=Certainty.UNKNOWN)
            case NotStarted():
                return SinkResult(Outcome.FAILED, self.cause)

    @property
    def is_overdue(self) -> bool:
        """The claim ended before the answer came."""
        return isinstance(self.execution, CutOff) or (isinstance(self.execution, Ran) and self.execution.overdue)


class Executor(Protocol):
    """Executes claimed changes."""

    side_by_side: int
    batch_max: int
    has_long_jobs: bool
    """Whether some jobs take long. They then leave some worker tasks to the others."""
    long_max: int
    """How many calls with long jobs, or with bulk changes, run at a time while other jobs arrive."""

    @property
    def short_max(self) -> int:
        """How many bulk changes go into one call while live changes may have to wait for it."""

    def stop(self) -> None:
        """Let long jobs end at their next position: the worker stops."""

    def is_long(self, job: Job) -> bool:
        """Whether a job takes long, as far as is known."""

    def goes_apart(self, job: Job) -> bool:
        """Whether a change goes into a call of its own, because it could make the others of its batch fail."""

    async def execute(self, jobs: Sequence[Job]) -> list[Execution]:
        """Run the jobs and emit `Handled`; return one execution per job."""


class SinkExecutor:
    """Calls a plain or conditional sink, and cancels the call when a claim ends."""

    has_long_jobs = False

    def __init__(self, pipeline: OpenPipeline, sink: Sink, heartbeat: Heartbeat) -> None:
        self.side_by_side = pipeline.settings.concurrency
        self.batch_max = sink.batch_max
        # One bulk call for many changes keeps a sink busy; a second one beside it would only delay live changes.
        self.long_max = 1 if self.batch_max > 1 else self.side_by_side
        self._pipeline = pipeline
        self._sink = sink
        self._heartbeat = heartbeat
        self._refusals = 0
        """How many calls in a row the sink has rejected as busy."""
        self._health = SinkHealth()

    @property
    def short_max(self) -> int:
        return max(1, self.batch_max // BULK_PART)

    def stop(self) -> None:
        pass

    def is_long(self, job: Job) -> bool:
        return False

    def goes_apart(self, job: Job) -> bool:
        return job.claim.attempts > 0 or job.claim in self._health

    async def execute(self, jobs: Sequence[Job]) -> list[Execution]:
        claims, started = [job.claim for job in jobs], self._pipeline.clock()
        cut_off = None
        try:
            with self._heartbeat.limit(claims):
                results = await self._sink.apply([job.ticket.change for job in jobs], claims)
        except Exception as error:
            result = unknown_result(error)
            results = [result] * len(jobs)
            if isinstance(error, TimeoutError) and self._heartbeat.is_cut_off(claims):
                cut_off = CutOff(result.cause)
        report_handled(self._pipeline, jobs, started)
        rest_s = self._rest_s(results)
        return [cut_off or self._judge(claim, result, rest_s) for claim, result in zip(claims, results, strict=True)]

    def _judge(self, claim: Claim, result: SinkResult, rest_s: float) -> Execution:
        if result.outcome is Outcome.BUSY and result.certainty is not Certainty.CLEAN:
            # The sink seems to be unreachable, but may have written the change: the claim must not be released.
            if self._health.is_away(claim):
                return CutOff(result.cause, rest_s)
            result = replace(result, outcome=Outcome.FAILED, wait_s=None)
        elif result.outcome is not Outcome.BUSY and result.outcome is not Outcome.FAILED:
            self._health.succeeded(claim)
        return Ran(result, rest_s=rest_s)

    def _rest_s(self, results: Sequence[SinkResult]) -> float:
        if all(map(_is_rejection, results)):
            # The sink rejects every change now. Without a back-off, the worker would claim, fail and release
            # one change after another. All workers count together, so a round is one refusal of each.
            self._refusals += 1
            rounds = 1 + self._refusals // self.side_by_side
            error = UnavailableError(results[0].cause)
            return self._pipeline.report_unavailable("sink", error, min(rounds, AWAY_ROUNDS_MAX))
        self._refusals = 0
        if any(map(_is_answer, results)):
            self._pipeline.report_answer("sink")
        return 0.0


def _is_rejection(result: SinkResult) -> bool:
    return result.outcome is Outcome.BUSY and result.wait_s is None


def _is_answer(result: SinkResult) -> bool:
    return result.outcome is not Outcome.BUSY and result.certainty is not Certainty.UNKNOWN


class SinkHealth:
    """Distinguishes an unreachable sink, or database, from a change that makes it look unreachable.

    If other changes succeed between two attempts of a change, the sink can be reached, and the change is to blame.
    """

    def __init__(self) -> None:
        self._taken = 0
        """How many changes the sink has accepted."""
        self._seen: dict[tuple[str, Order | None], int] = {}
        """The value of `_taken` when the sink last looked unreachable for a change."""

    def __contains__(self, claim: Claim) -> bool:
        return (claim.key, claim.order) in self._seen

    def succeeded(self, claim: Claim) -> None:
        self._taken += 1
        if self._seen:
            self._seen.pop((claim.key, claim.order), None)

    def is_away(self, claim: Claim) -> bool:
        """Whether the sink is unreachable, given a change that it seemed unreachable for; False blames the change."""
        seen = self._seen.pop((claim.key, claim.order), self._taken)
        self._seen[claim.key, claim.order] = self._taken
        if len(self._seen) > REMEMBERED_MAX:
            del self._seen[next(iter(self._seen))]
        return seen == self._taken


def report_handled(pipeline: OpenPipeline, jobs: Sequence[Job], started: float) -> None:
    keys = [job.claim.key for job in jobs]
    pipeline.emit(events.Handled(pipeline=pipeline.name, keys=keys, seconds=pipeline.clock() - started))


def unknown_result(error: Exception) -> SinkResult:
    """Return the result of a call that raised or was cancelled: its outcome is unknown."""
    if isinstance(error, TimeoutError):
        return SinkResult(Outcome.FAILED, "the claim ended before the sink answered", certainty=Certainty.UNKNOWN)
    return SinkResult(Outcome.FAILED, cause_of_error(error), certainty=Certainty.UNKNOWN, traceback=traceback_of(error))


class TransactionExecutor:
    """Runs handlers one after another in a transaction of the ledger that also commits their claims."""

    side_by_side = long_max = 1
    has_long_jobs = False

    def __init__(self, pipeline: OpenPipeline, sink: AtomicSink, heartbeat: Heartbeat) -> None:
        self.batch_max = pipeline.settings.batch_max
        self._pipeline = pipeline
        self._sink = sink
        self._heartbeat = heartbeat
        database = pipeline.ledger.database
        self._is_exclusive = isinstance(database, SingleWriterDatabase) and database.has_one_writer
        self._slice = FIRST_SLICE
        self._has_begun = False
        self._health = SinkHealth()
        """Of the ledger's database, as the handlers meet it."""

    @property
    def short_max(self) -> int:
        return self._slice

    def stop(self) -> None:
        pass

    def is_long(self, job: Job) -> bool:
        return False

    def goes_apart(self, job: Job) -> bool:
        return job.claim.attempts > 0 or job.claim in self._health

    async def execute(self, jobs: Sequence[Job]) -> list[Execution]:
        """Run the handlers in slices, one transaction each. Slow handlers get short ones: they hold database locks."""
        rest, begun, executions = list(jobs), self._pipeline.clock(), dict[int, Execution]()
        while rest:
            some, rest = rest[: self._slice], rest[self._slice :]
            started = self._pipeline.clock()
            executions |= await self._execute_slice(some)
            is_quick = self._pipeline.clock() - started < SLICE_S
            self._slice = min(2 * self._slice, self.batch_max) if is_quick else max(1, self._slice // 2)
        report_handled(self._pipeline, jobs, begun)
        return [executions[job.claim.token] for job in jobs]

    async def _execute_slice(self, jobs: Sequence[Job]) -> dict[int, Execution]:
        """Execute jobs in one transaction, or in several if they cannot share one; return by token."""
        executions, groups = dict[int, Execution](), [list(jobs)]
        while groups:
            group = groups.pop(0)
            try:
                done = await self._transact(group)
                executions |= done
                for job in group:
                    if isinstance(one := done[job.claim.token], Ran) and one.committed:
                        self._health.succeeded(job.claim)
            except _CommitsRefusedError as refused:
                # Other workers have taken these keys. The transaction was rolled back; run the others again.
                # The worker commits the refused ones outside of this transaction, and learns there that they are lost.
                executions |= {claim.token: Ran(APPLIED) for claim in refused.claims}
                if rest := [job for job in group if job.claim.token not in executions]:
                    groups.insert(0, rest)
            except TransactionFailedError as error:
                if len(group) == 1:
                    executions |= _all(group, Ran(_result_of_error(error.__cause__ or error)))
                else:
                    # The database may blame one job for another's fault. Run each alone; only a job that fails alone
                    # costs an attempt.
                    groups = [[job] for job in group] + groups
            except UnavailableError as error:
                # The transaction may have committed or not. Releasing the claim is safe in both cases: the effects
                # and the mark commit together, so the next claim finds the change applied or not begun.
                await self._pipeline.back_off("ledger", error, 1)
                return executions | self._judge_lost(group, error) | _all([*chain(*groups)], NOT_STARTED)
            except TimeoutError:
                # The transaction was rolled back. Each change is retried alone, so that only the slow one fails again.
                late = Ran(SinkResult(Outcome.FAILED, "the claim ended before the handler did"))
                executions |= _all(group, late if self._has_begun else NOT_STARTED)
        return executions

    def _judge_lost(self, group: Sequence[Job], error: UnavailableError) -> dict[int, Execution]:
        """Judge changes whose transaction was lost. A handler can cause that: each change is tried alone next time.

        If the transaction of one alone is lost again, though others have succeeded in between, it costs an attempt.
        """
        are_innocent = [not self._has_begun or self._health.is_away(job.claim) for job in group]
        if len(group) > 1 or all(are_innocent):
            return _all(group, NOT_STARTED)
        return _all(group, Ran(_result_of_error(error)))

    async def _transact(self, jobs: list[Job]) -> dict[int, Execution]:
        self._has_begun = False
        ledger, claims = self._pipeline.ledger, [job.claim for job in jobs]
        # If the claims end before the transaction has begun, its commit is refused.
        with self._heartbeat.limit(claims, is_exclusive=self._is_exclusive):
            async with transaction_of(ledger.database, ledger.transaction()) as transaction:
                self._has_begun = True
                return await self._execute_in(transaction, jobs)

    async def _execute_in(self, transaction: Transaction, jobs: list[Job]) -> dict[int, Execution]:
        errors = await write_all(transaction, self._sink, [job.ticket.change for job in jobs])
        good = [job for index, job in enumerate(jobs) if index not in errors]
        self._heartbeat.end(job.claim for job in good)
        if refused := await transaction.commit([Commit(job.claim) for job in good]):
            raise _CommitsRefusedError(refused)
        # The savepoint of a handler that raised was rolled back, so nothing that it wrote remains.
        failed = {jobs[index].claim.token: Ran(_result_of_error(error)) for index, error in errors.items()}
        return _all(good, Ran(APPLIED, committed=True)) | failed


def _all(jobs: Sequence[Job], execution: Execution) -> dict[int, Execution]:
    return {job.claim.token: execution for job in jobs}


def _result_of_error(error: BaseException) -> SinkResult:
    if isinstance(error, Snooze):
        return SinkResult(Outcome.BUSY, str(error), wait_s=error.delay_s)
    return SinkResult(
        Outcome.FAILED, cause_of_error(error), permanent=is_permanent(error), traceback=traceback_of(error)
    )


class _CommitsRefusedError(Exception):
    """Some commits were refused inside a transaction; raising it rolls the transaction back."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
