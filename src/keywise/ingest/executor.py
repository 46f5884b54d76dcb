"""The executor of claimed objects: small ones share transactions and calls, and larger ones are written in parts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from keywise.core.change import Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import DatabaseError, KeywiseError, ObjectError, ObjectReplacedError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.sink import APPLIED, SinkResult
from keywise.core.tracebacks import traceback_of
from keywise.flow.leased.dispatch import RESERVED_PART
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
STORE = "store"
"""The name of the store in `Unavailable` events."""
ALONE_MAX = 10_000
"""How many objects are remembered as too large to share."""


class ObjectExecutor:
    """Works on claimed objects."""

    has_long_jobs = True

    def __init__(self, tools: ObjectTools) -> None:
        settings = tools.pipeline.settings
        self.side_by_side = settings.concurrency
        self.batch_max = min(OBJECTS_AT_ONCE, settings.batch_max)
        self.long_max = max(1, self.side_by_side - self.side_by_side // RESERVED_PART)
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
                self._note_success(job.claim)
        return executions

    async def _attempt(self, job: Job, act: Callable[[ObjectRun], Awaitable[T]]) -> T | Execution:
        """Do something with an object, and return its result, or how the attempt ends if it fails."""
        try:
            return await act(ObjectRun(self._tools, job))
        except Exception as error:
            return self._judge(job, error)

    def _note_success(self, claim: Claim) -> None:
        self._health.succeeded(claim)
        self._refusals = 0
        self._pipeline.report_answer(STORE)

    # Small objects.

    async def _execute_together(self, jobs: Sequence[Job]) -> list[Execution]:
        executions: dict[int, Execution] = {}
        small: list[tuple[Job, Portion]] = []
        size = 0
        for start in range(0, len(jobs), READS_AT_ONCE):
            some = jobs[start : start + READS_AT_ONCE]
            for job, found in zip(some, await asyncio.gather(*map(self._read, some)), strict=True):
                if isinstance(found, Portion):
                    small.append((job, found))
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
        return self._leave_alone(job) if found is None else found

    def _leave_alone(self, job: Job) -> Execution:
        """Release an object that cannot share a call; it is claimed again, and gets a call of its own."""
        self._alone[job.claim.key] = None
        if len(self._alone) > ALONE_MAX:
            del self._alone[next(iter(self._alone))]
        return NOT_STARTED

    async def _write(self, small: Sequence[tuple[Job, Portion]]) -> dict[int, Execution]:
        if not small:
            return {}
        try:
            await self._tools.writer.write([portion for _, portion in small])
        except Exception as error:
            if isinstance(error, DatabaseError):
                raise
            # Any of them may be the reason. If nothing of unknown outcome was written, each is tried alone, and only
            # one that fails alone costs an attempt.
            is_clean = self._tools.writer.fails_clean or _is_clean(error)
            return {
                job.claim.token: self._leave_alone(job) if is_clean else self._judge(job, error) for job, _ in small
            }
        return {job.claim.token: self._written(job, portion) for job, portion in small}

    def _written(self, job: Job, portion: Portion) -> Execution:
        """Return what becomes of an object whose only portion was written with others."""
        if portion.state in (PortionState.OPEN, PortionState.WRITTEN):
            # Its records have not ended, or an earlier version has more records behind it than one step deletes.
            return self._leave_alone(job)
        return Ran(APPLIED, committed=portion.state is PortionState.COMMITTED)

    # Endings.

    def _judge(self, job: Job, error: Exception) -> Execution:
        """Return how the attempt at an object ends that raised."""
        claim, fails_clean = self._tools.heartbeat.current(job.claim), self._tools.writer.fails_clean
        match error:
            case DatabaseError():
                raise error
            case WriteFailedError(result=result):
                return self._judge_result(claim, result)
            case ObjectReplacedError():
                # Only a small object comes here. Alone, it starts again at the next generation.
                return self._leave_alone(job)
            case ClaimLostError():
                return NOT_STARTED
            case StoreError() if self._health.is_away(claim):
                return self._away(str(error))
            case StoreError():
                # Other objects could be read meanwhile, so this one is to blame.
                return Ran(SinkResult(Outcome.FAILED, str(error)))
            case TimeoutError() if self._tools.heartbeat.is_cut_off([claim]):
                return CutOff("the claim ended before the object was written")
            case TimeoutError() if fails_clean:
                return Ran(SinkResult(Outcome.FAILED, "the claim ended before the part was written"))
            case UnavailableError() if fails_clean:
                # The transaction may have committed or not. In both cases the position says where to go on.
                return self._judge_result(claim, SinkResult(Outcome.BUSY, str(error)))
            case KeywiseError() if not isinstance(error, UnavailableError):
                return Ran(SinkResult(Outcome.FAILED, str(error), permanent=True))
            case _ if fails_clean:
                return Ran(SinkResult(Outcome.FAILED, cause_of_error(error), traceback=traceback_of(error)))
            case _:
                return Ran(unknown_result(error))

    def _judge_result(self, claim: Claim, result: SinkResult) -> Execution:
        """Return how an attempt ends by the answer of the sink. A sink that is away is not the fault of the object."""
        if result.outcome is not Outcome.BUSY or result.wait_s is not None:
            return Ran(result)
        if not self._health.is_away(claim):
            return Ran(replace(result, outcome=Outcome.FAILED))
        rest_s = self._rest_s("sink", result.cause)
        is_clean = result.certainty is Certainty.CLEAN
        # A write of unknown outcome must not be followed by a release.
        return Ran(result, rest_s=rest_s) if is_clean else CutOff(result.cause, rest_s)

    def _away(self, cause: str) -> Execution:
        """The store cannot be reached: the object is not to blame, and waits."""
        return Ran(SinkResult(Outcome.BUSY, cause), rest_s=self._rest_s(STORE, cause))

    def _rest_s(self, what: str, cause: str) -> float:
        """Report that the store or the sink is away; return how long the worker task backs off."""
        self._refusals += 1
        rounds = min(1 + self._refusals // self.side_by_side, AWAY_ROUNDS_MAX)
        return self._pipeline.report_unavailable(what, UnavailableError(cause), rounds)


def _is_clean(error: Exception) -> bool:
    """Whether no call of the sink is in flight, and each that ended has a known result."""
    if isinstance(error, WriteFailedError):
        return error.result.certainty is Certainty.CLEAN
    return isinstance(error, ClaimLostError | ObjectError)
