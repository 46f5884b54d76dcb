"""The executor of claimed objects: small ones share transactions and calls, and larger ones are written in parts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from keywise.core.change import Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import KeywiseError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.sink import APPLIED, SinkResult
from keywise.core.tracebacks import traceback_of
from keywise.flow.leased.disposition import NOT_STARTED, CutOff, Execution, Ran
from keywise.flow.leased.executors import AWAY_ROUNDS_MAX, Job, SinkHealth, report_handled, unknown_result
from keywise.ingest.announcement import decode_announcement
from keywise.ingest.object_run import ObjectRun, ObjectTools, StoreError
from keywise.ingest.portion import Portion, PortionState
from keywise.ingest.portion_writers import ClaimLostError, WriteFailedError

T = TypeVar("T")

SMALL_BYTES = 256 * 1024
"""Objects up to this size share transactions and calls with others."""
OBJECTS_AT_ONCE = 100
"""The most small objects that one worker task reads and writes together."""
READS_AT_ONCE = 16
PORTION_BYTES = 4 * 1024 * 1024
"""Small objects share a transaction until they have so many bytes together."""
RESERVED_PART = 4
"""One worker task in this many is reserved for small objects."""
ALONE_MAX = 10_000
"""How many objects are remembered as too large to share."""


class ObjectExecutor:
    """Works on claimed objects."""

    has_long_jobs = True

    def __init__(self, tools: ObjectTools) -> None:
        settings = tools.pipeline.settings
        self.side_by_side = settings.concurrency
        self.batch_max = min(OBJECTS_AT_ONCE, settings.batch_max)
        self.long_max = max(1, self.side_by_side - max(1, self.side_by_side // RESERVED_PART))
        self._tools = tools
        self._pipeline = tools.pipeline
        self._health = SinkHealth()
        """Of the store, as objects meet it."""
        self._alone: dict[str, None] = {}
        """Keys of objects that were found too large to share a call; the oldest are forgotten."""
        self._refusals = 0

    @property
    def short_max(self) -> int:
        return self.batch_max

    def stop(self) -> None:
        self._tools.stopping.set()

    def goes_apart(self, job: Job) -> bool:
        claim = job.claim
        return claim.attempts > 0 or claim in self._health or self.is_long(job)

    def is_long(self, job: Job) -> bool:
        """Whether an object takes long, as far as is known before it is read."""
        if job.claim.position is not None or job.claim.key in self._alone:
            return True
        return (decode_announcement(job.ticket.change.body).size or 0) > SMALL_BYTES

    async def execute(self, jobs: Sequence[Job]) -> list[Execution]:
        started = self._pipeline.clock()
        if len(jobs) == 1:
            executions = [await self._attempt(jobs[0], ObjectRun.run)]
        else:
            executions = await self._execute_together(jobs)
        report_handled(self._pipeline, jobs, started)
        for job, execution in zip(jobs, executions, strict=True):
            if isinstance(execution, Ran) and execution.committed:
                self._health.succeeded(job.claim)
        return executions

    async def _attempt(self, job: Job, act: Callable[[ObjectRun], Awaitable[T]]) -> T | Execution:
        """Do something with an object, and return its result, or how the attempt ends if it fails."""
        try:
            return await act(ObjectRun(self._tools, job))
        except Exception as error:
            return self._judge(job, error)

    # Small objects.

    async def _execute_together(self, jobs: Sequence[Job]) -> list[Execution]:
        executions: dict[int, Execution] = {}
        small: list[Portion] = []
        size = 0
        for start in range(0, len(jobs), READS_AT_ONCE):
            some = jobs[start : start + READS_AT_ONCE]
            for job, found in zip(some, await asyncio.gather(*map(self._read, some)), strict=True):
                if isinstance(found, Portion):
                    small.append(found)
                    size += found.size
                else:
                    executions[job.claim.token] = found
            if size >= PORTION_BYTES:
                executions |= await self._write(small)
                small, size = [], 0
        executions |= await self._write(small)
        return [executions[job.claim.token] for job in jobs]

    async def _read(self, job: Job) -> Portion | Execution:
        """Return a small object as one portion; otherwise what becomes of its job."""
        found = await self._attempt(job, lambda run: run.read_small(SMALL_BYTES))
        return self._leave_alone(job.claim) if found is None else found

    def _leave_alone(self, claim: Claim) -> Execution:
        """Release an object that cannot share a call; it is claimed again, and gets a call of its own."""
        self._alone[claim.key] = None
        if len(self._alone) > ALONE_MAX:
            del self._alone[next(iter(self._alone))]
        return NOT_STARTED

    async def _write(self, portions: list[Portion]) -> dict[int, Execution]:
        if not portions:
            return {}
        try:
            await self._tools.writer.write(portions)
        except (KeywiseError, TimeoutError) as error:
            if isinstance(error, UnavailableError):
                await self._pipeline.back_off("ledger", error, 1)
            # Any of them may be the reason. Each is tried alone, and only one that fails alone costs an attempt.
            return {one.claim.token: self._leave_alone(one.claim) for one in portions}
        states = {one.claim.token: one.state for one in portions}
        return {token: Ran(APPLIED, committed=state is PortionState.COMMITTED) for token, state in states.items()}

    # Endings.

    def _judge(self, job: Job, error: Exception) -> Execution:
        """Return how the attempt at an object ends that raised."""
        claim = self._tools.heartbeat.current(job.claim)
        match error:
            case WriteFailedError(result=result):
                return Ran(result, rest_s=self._rest_s(result))
            case ClaimLostError():
                return NOT_STARTED
            case StoreError() if self._health.is_away(claim):
                return self._away(str(error))
            case StoreError():
                # Other objects could be read meanwhile, so this one is to blame.
                return Ran(SinkResult(Outcome.FAILED, str(error)))
            case TimeoutError() if self._tools.heartbeat.is_cut_off([claim]):
                return CutOff("the claim ended before the object was written")
            case TimeoutError() if self._tools.writer.fails_clean:
                return Ran(SinkResult(Outcome.FAILED, "the claim ended before the part was written"))
            case UnavailableError() if self._tools.writer.fails_clean:
                # The transaction may have committed or not. In both cases the position says where to go on.
                return self._away(str(error))
            case KeywiseError():
                return Ran(SinkResult(Outcome.FAILED, str(error), permanent=True))
            case _ if self._tools.writer.fails_clean:
                return Ran(SinkResult(Outcome.FAILED, cause_of_error(error), traceback=traceback_of(error)))
            case _:
                return Ran(unknown_result(error))

    def _away(self, cause: str) -> Execution:
        """The store or the ledger cannot be reached: the object is not to blame, and waits."""
        result = SinkResult(Outcome.BUSY, cause, certainty=Certainty.CLEAN)
        return Ran(result, rest_s=self._rest_s(result))

    def _rest_s(self, result: SinkResult) -> float:
        if result.outcome is not Outcome.BUSY or result.wait_s is not None:
            return 0.0
        self._refusals += 1
        rounds = 1 + self._refusals // self.side_by_side
        return self._pipeline.report_unavailable("store", UnavailableError(result.cause), min(rounds, AWAY_ROUNDS_MAX))
