"""What is done with claimed changes: a call of a sink, or handlers inside the ledger's transaction."""

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
"""A sink that is away is asked less and less often, up to this step of the backoff."""
REMEMBERED_MAX = 10_000
"""Changes of which a worker remembers that the sink seemed to be away."""
SLICE_S = 0.1
"""A transaction of handlers that takes longer than this gets fewer of them next time."""


class Job(msgspec.Struct):
    """A change under its claim."""

    ticket: Ticket
    claim: Claim
    result: SinkResult = APPLIED
    committed: bool = False
    """The work has committed its own mark."""
    rest_s: float = 0.0
    """How long the sink is left alone after it; only of a busy one."""
    undone: bool = False
    """Nothing was written and nothing is on its way: the claim can be given back."""
    cut_off: bool = False
    """It ended with its claim, which could not be renewed, or the sink is away: that is nothing to blame it for."""


class Executor(Protocol):
    """What is done with claimed changes."""

    side_by_side: int
    batch_max: int

    @property
    def short_max(self) -> int:
        """How many bulk changes are done at once while live ones may have to wait for them."""

    def goes_isolated(self, claim: Claim) -> bool:
        """Whether a change may take others along if it fails again."""

    async def execute(self, jobs: Sequence[Job]) -> float:
        """Set each job's result, and tell that they were handled. Return how long nothing should be begun after it."""


class SinkExecutor:
    """Calls a plain or conditional sink, for no longer than the claims last."""

    def __init__(self, pipeline: Pipeline, sink: Sink, heartbeat: Heartbeat) -> None:
        self.side_by_side = pipeline.settings.concurrency
        self.batch_max = sink.batch_max
        self._pipeline = pipeline
        self._sink = sink
        self._heartbeat = heartbeat
        self._refusals = 0
        """Calls in a row that the sink took nothing of."""
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
            # The sink seems to be away, and may have written it all the same: its claim must not be given back.
            job.result = replace(result, outcome=Outcome.FAILED, wait_s=None)
            job.cut_off = self._health.is_away(job.claim)
        elif result.outcome is not Outcome.BUSY and result.outcome is not Outcome.FAILED:
            self._health.succeeded(job.claim)

    def _rest_s(self, results: Sequence[SinkResult]) -> float:
        if all(result.outcome is Outcome.BUSY and result.wait_s is None for result in results):
            # It takes nothing now, whatever it is given: to hurry on to the next would be a storm of claims.
            self._refusals += 1
            rounds = 1 + self._refusals // self.side_by_side
            away = UnavailableError(results[0].cause)
            return self._pipeline.report_unavailable("sink", away, min(rounds, AWAY_ROUNDS_MAX))
        self._refusals = 0
        return 0.0


class SinkHealth:
    """Whether the sink is away, or one change makes it look so: then others pass between its tries."""

    def __init__(self) -> None:
        self._taken = 0
        """Changes that the sink took."""
        self._seen: dict[tuple[str, Order | None], int] = {}
        """How many these were when a change was last answered so."""

    def __contains__(self, claim: Claim) -> bool:
        return (claim.key, claim.order) in self._seen

    def succeeded(self, claim: Claim) -> None:
        self._taken += 1
        if self._seen:
            self._seen.pop((claim.key, claim.order), None)

    def is_away(self, claim: Claim) -> bool:
        """Of a change whose outcome is unknown because the sink seems to be away."""
        seen = self._seen.pop((claim.key, claim.order), self._taken)
        self._seen[claim.key, claim.order] = self._taken
        if len(self._seen) > REMEMBERED_MAX:
            del self._seen[next(iter(self._seen))]
        return seen == self._taken


def report_handled(pipeline: Pipeline, jobs: Sequence[Job], started: float) -> None:
    keys = [job.claim.key for job in jobs]
    pipeline.emit(events.Handled(pipeline=pipeline.name, keys=keys, seconds=pipeline.clock() - started))


def unknown_result(error: Exception) -> SinkResult:
    """What is made of a call that did not end by itself."""
    cause = "the claim ended before the sink answered" if isinstance(error, TimeoutError) else cause_of_error(error)
    return SinkResult(Outcome.FAILED, cause, certainty=Certainty.UNKNOWN)


class TransactionExecutor:
    """Runs handlers one after another inside a transaction that also holds their commit."""

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
        """Slow handlers get short transactions: others wait for the database meanwhile."""
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
                # Their keys are somebody else's; the others are tried again without them.
                tokens = {claim.token for claim in refused.claims}
                for job in pending:
                    if job.claim.token in tokens:
                        job.result, job.committed = APPLIED, False
                pending = [job for job in pending if job.claim.token not in tokens]
            except UnavailableError as error:
                # Whether the transaction arrived or not, the mark tells: giving the claim back is safe.
                for job in pending:
                    job.undone, job.committed = True, False
                await self._pipeline.back_off("ledger", error, 1)
                return
            except TimeoutError:
                # It was rolled back. Each is tried again alone, so that only the slow one fails for good.
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
            # The savepoint took back whatever the handler had written.
            if isinstance(error, Snooze):
                jobs[index].result = SinkResult(Outcome.BUSY, str(error), wait_s=error.delay_s)
                continue
            jobs[index].result = SinkResult(Outcome.FAILED, cause_of_error(error), permanent=is_permanent(error))


class _CommitsRefusedError(Exception):
    """Some commits were refused inside a transaction, which has to be rolled back."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims


def dead_result(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, permanent=True)
