"""Executors of claimed changes: one calls a sink, the other runs handlers inside the ledger's transaction."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from keywise.core import events
from keywise.core.change import Order, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import UnavailableError
from keywise.core.failures import cause_of_error, is_permanent
from keywise.core.limits import Snooze
from keywise.core.sink import APPLIED, AtomicSink, Sink, SinkResult
from keywise.core.transaction import Transaction
from keywise.core.transaction_context import transaction_of
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Ticket
from keywise.flow.pipeline import Pipeline
from keywise.flow.transactional import BULK_PART, write_all

FIRST_SLICE = 8
AWAY_ROUNDS_MAX = 4
"""A sink that cannot be reached is called less and less often, up to this step of the backoff."""
REMEMBERED_MAX = 10_000
"""How many changes `SinkHealth` remembers."""
SLICE_S = 0.1
"""If a transaction of handlers takes longer than this, the next one runs fewer handlers."""


class Job(msgspec.Struct):
    """A claimed change, and later the result of its execution."""

    ticket: Ticket
    claim: Claim
    result: SinkResult = APPLIED
    committed: bool = False
    """The executor's transaction has committed the mark already."""
    rest_s: float = 0.0
    """How long its worker backs off after it, because the sink is busy."""
    undone: bool = False
    """Nothing was written and no call is in flight: the claim can be released."""
    cut_off: bool = False
    """It failed because the ledger or the sink could not be reached: its outcome is unknown and costs no attempt."""


class Executor(Protocol):
    """Executes claimed changes."""

    side_by_side: int
    batch_max: int

    @property
    def short_max(self) -> int:
        """How many bulk changes go into one call while live changes may have to wait for it."""

    def goes_isolated(self, claim: Claim) -> bool:
        """Whether a change goes into a call of its own, because it could make the others of its batch fail."""

    async def execute(self, jobs: Sequence[Job]) -> float:
        """Set the result of each job and emit `Handled`. Return how many seconds the worker should back off."""


class SinkExecutor:
    """Calls a plain or conditional sink, and cancels the call when a claim ends."""

    def __init__(self, pipeline: Pipeline, sink: Sink, heartbeat: Heartbeat) -> None:
        self.side_by_side = pipeline.settings.concurrency
        self.batch_max = sink.batch_max
        self._pipeline = pipeline
        self._sink = sink
        self._heartbeat = heartbeat
        self._refusals = 0
        """How many calls in a row the sink has rejected as busy."""
        self._health = SinkHealth()

    @property
    def short_max(self) -> int:
        return max(1, self.batch_max // BULK_PART)

    def goes_isolated(self, claim: Claim) -> bool:
        return claim.attempts > 0 or claim in self._health

    async def execute(self, jobs: Sequence[Job]) -> float:
        claims, started = [job.claim for job in jobs], self._pipeline.clock()
        try:
            async with self._heartbeat.limit(claims):
                results = await self._sink.apply([job.ticket.change for job in jobs], claims)
        except Exception as error:
            results = [unknown_result(error)] * len(jobs)
            is_cut_off = isinstance(error, TimeoutError) and self._heartbeat.is_cut_off(claims)
            for job in jobs:
                job.cut_off = is_cut_off
        report_handled(self._pipeline, jobs, started)
        for job, result in zip(jobs, results, strict=True):
            self._judge(job, result)
        rest_s = self._rest_s(results)
        for job in jobs:
            job.rest_s = rest_s
        return rest_s

    def _judge(self, job: Job, result: SinkResult) -> None:
        job.result = result
        if result.outcome is Outcome.BUSY and result.certainty is not Certainty.CLEAN:
            # The sink seems to be unreachable, but may have written the change: the claim must not be released.
            job.result = replace(result, outcome=Outcome.FAILED, wait_s=None)
            job.cut_off = self._health.is_away(job.claim)
        elif result.outcome is not Outcome.BUSY and result.outcome is not Outcome.FAILED:
            self._health.succeeded(job.claim)

    def _rest_s(self, results: Sequence[SinkResult]) -> float:
        if all(result.outcome is Outcome.BUSY and result.wait_s is None for result in results):
            # The sink rejects every change now. Without a back-off, the worker would claim, fail and release
            # one change after another. All workers count together, so a round is one refusal of each.
            self._refusals += 1
            rounds = 1 + self._refusals // self.side_by_side
            error = UnavailableError(results[0].cause)
            return self._pipeline.report_unavailable("sink", error, min(rounds, AWAY_ROUNDS_MAX))
        self._refusals = 0
        return 0.0


class SinkHealth:
    """Distinguishes an unreachable sink from a change that makes the sink look unreachable.

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


def report_handled(pipeline: Pipeline, jobs: Sequence[Job], started: float) -> None:
    keys = [job.claim.key for job in jobs]
    pipeline.emit(events.Handled(pipeline=pipeline.name, keys=keys, seconds=pipeline.clock() - started))


def unknown_result(error: Exception) -> SinkResult:
    """Return the result of a call that raised or was cancelled: its outcome is unknown."""
    cause = "the claim ended before the sink answered" if isinstance(error, TimeoutError) else cause_of_error(error)
    return SinkResult(Outcome.FAILED, cause, certainty=Certainty.UNKNOWN)


class TransactionExecutor:
    """Runs handlers one after another in a transaction of the ledger that also commits their claims."""

    side_by_side = 1

    def __init__(self, pipeline: Pipeline, sink: AtomicSink, heartbeat: Heartbeat) -> None:
        self.batch_max = pipeline.settings.batch_max
        self._pipeline = pipeline
        self._sink = sink
        self._heartbeat = heartbeat
        self._slice = FIRST_SLICE
        self._has_begun = False

    @property
    def short_max(self) -> int:
        return self._slice

    def goes_isolated(self, claim: Claim) -> bool:
        return claim.attempts > 0

    async def execute(self, jobs: Sequence[Job]) -> float:
        """Run the handlers in slices, one transaction each. Slow handlers get short ones: they hold database locks."""
        rest, begun = list(jobs), self._pipeline.clock()
        while rest:
            some, rest = rest[: self._slice], rest[self._slice :]
            started = self._pipeline.clock()
            await self._do_some(some)
            is_quick = self._pipeline.clock() - started < SLICE_S
            self._slice = min(2 * self._slice, self.batch_max) if is_quick else max(1, self._slice // 2)
        report_handled(self._pipeline, jobs, begun)
        return 0.0

    async def _do_some(self, pending: list[Job]) -> None:
        while pending:
            try:
                await self._transact(pending)
                return
            except _CommitsRefusedError as refused:
                # Other workers have taken these keys. The transaction was rolled back; run the others again.
                tokens = {claim.token for claim in refused.claims}
                for job in pending:
                    if job.claim.token in tokens:
                        # The worker commits it again outside of this transaction, and learns there that it is lost.
                        job.result, job.committed = APPLIED, False
                pending = [job for job in pending if job.claim.token not in tokens]
            except UnavailableError as error:
                # The transaction may have committed or not. Releasing the claim is safe in both cases: the effects
                # and the mark commit together, so the next claim finds the change applied or not begun.
                for job in pending:
                    job.undone, job.committed = True, False
                await self._pipeline.back_off("ledger", error, 1)
                return
            except TimeoutError:
                # The transaction was rolled back. Each change is retried alone, so that only the slow one fails again.
                late = SinkResult(Outcome.FAILED, "the claim ended before the handler did")
                for job in pending:
                    job.result, job.undone, job.committed = late, not self._has_begun, False
                return

    async def _transact(self, jobs: list[Job]) -> None:
        self._has_begun = False
        ledger, limit = self._pipeline.ledger, self._heartbeat.limit([job.claim for job in jobs])
        async with limit, transaction_of(ledger.database, ledger.transaction()) as transaction:
            self._has_begun = True
            await self._do_in(transaction, jobs)

    async def _do_in(self, transaction: Transaction, jobs: list[Job]) -> None:
        errors = await write_all(transaction, self._sink, [job.ticket.change for job in jobs])
        good = [job for index, job in enumerate(jobs) if index not in errors]
        if refused := await transaction.commit([job.claim for job in good]):
            raise _CommitsRefusedError(refused)
        for job in good:
            job.result, job.committed = APPLIED, True
        for index, error in errors.items():
            # The savepoint was rolled back, so nothing that the handler wrote remains.
            if isinstance(error, Snooze):
                jobs[index].result = SinkResult(Outcome.BUSY, str(error), wait_s=error.delay_s)
                continue
            jobs[index].result = SinkResult(Outcome.FAILED, cause_of_error(error), permanent=is_permanent(error))


class _CommitsRefusedError(Exception):
    """Some commits were refused inside a transaction; raising it rolls the transaction back."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims


def dead_result(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, permanent=True)
