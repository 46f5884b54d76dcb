"""The last stage of a run beside the live target: one worker lets the other target catch up, and swaps on request.

Any worker may do it, one at a time. If it dies during a swap, its successor completes the swap if the name may have
moved already, and calls it off otherwise.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from msgspec.structs import replace

from keywise.core import events
from keywise.core.controls import Controls, ReindexRun, RunState
from keywise.core.entry import Claim, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.origin import Origin
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.repair import Repairer
from keywise.operate.waiting import running_heartbeat
from keywise.reindex.attempts import report_failure
from keywise.reindex.barrier import Barrier, OvertakenError
from keywise.reindex.catch_up import CatchUp
from keywise.reindex.gate import Gate, GateLine, failing
from keywise.reindex.report import report_run
from keywise.reindex.run_state import replace_run
from keywise.reindex.shards import CATCH_UP, CatchUpProgress, ShardLedger
from keywise.reindex.swap import CALLED_OFF, Swap
from keywise.reindex.target_writer import TargetWriter

REST_S, REST_MAX_S = 0.5, 60.0
"""The shortest and the longest rest between two passes; in between, it is twice as long as the last pass took."""
SWAP_REST_S = 0.2
"""The rest between two passes while a swap is requested."""
TRIES_MAX = 10
"""How often a swap is called off behind its barrier before it is refused. Changes wait during each try."""
WAIT_MAX_S = 600.0
"""How long a requested swap waits for lines of the gate that may hold after another pass, before it is refused."""
SUSPECTS_AT_ONCE = 100
"""How many suspect keys are repaired after one pass."""


class CatchUpStage:
    """One attempt of a worker to catch up and to swap. It works under a claim, so one worker does it at a time."""

    def __init__(
        self, pipeline: OpenPipeline, other: OpenPipeline, origin: Origin, shards: ShardLedger, run: ReindexRun
    ) -> None:
        self._pipeline, self._target = pipeline, other
        self._origin = origin
        self._shards = shards
        self._run = run
        self._progress = CatchUpProgress(run_started_at=run.started_at)
        self._requested_at: float | None = None
        """When this worker first saw the request for a swap; None: no swap is requested."""
        self._tries = 0
        self._began = 0.0
        """When the last pass began."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Catch up until the run ends, is paused, or another worker takes over."""
        claim = await self._shards.claim(CATCH_UP, self._run.generation)
        if isinstance(claim, Refusal):
            return
        try:
            # If the run is no longer current, the swap is done. A rollback may have begun, in which the same scope
            # describes another target.
            if await self._is_current():
                self._progress = self._kept(claim)
                await self._work(claim, is_over)
            await self._shards.release(claim)
        except OvertakenError:
            pass
        except UnavailableError:
            with suppress(UnavailableError):
                await self._shards.release(claim)
            if not is_over():
                raise
        except Exception as error:
            # The origin runs user code, or a store refuses something. Some worker tries again later.
            await self._shards.fail(report_failure(self._pipeline, claim, error))
        finally:
            self._shards.stop_renewing(claim)

    async def _work(self, claim: Claim, is_over: Callable[[], bool]) -> None:
        """Complete or call off the swap of an earlier worker, then do passes until the target is live, or `is_over`."""
        live = _with_token(self._pipeline, claim)
        other = _with_token(self._target, claim)
        barrier = Barrier(live, other, claim.token)
        target = self._run.into
        async with running_heartbeat(live) as of_live, running_heartbeat(other) as of_other:
            writers = TargetWriter(live, of_live), TargetWriter(other, of_other)
            keep = partial(self._keep_within, claim)
            catch_up = CatchUp(live, other, self._origin, writers, keep, is_over)
            swap = Swap(live, other, barrier, catch_up)
            controls = await barrier.take_over(self._run.live, target)
            if controls.move is not None:
                if controls.move.is_called:
                    await swap.finish(controls)
                    return
                await barrier.lift()
            if not await self._is_current():
                return  # The earlier worker has completed its swap just before this one overtook it.
            repairer = Repairer(other, of_other, despite_pause=True)
            while not is_over():
                if await self._catch_up_once(claim, catch_up, swap):
                    return
                await self._repair(other, repairer)
                await self._rest(is_over)

    async def _catch_up_once(self, claim: Claim, catch_up: CatchUp, swap: Swap) -> bool:
        """Do a pass, and try to swap if the operator wants that; return whether the target is live now."""
        run, kept, began = await self._current_run(), self._progress, self._pipeline.clock()
        found = await catch_up.run(run.delete_max, kept.deleted)
        self._progress = replace(
            found,
            steps=self._progress.steps,
            run_started_at=kept.run_started_at,
            behind_before=kept.behind,
            interval_s=began - self._began if kept.passes else 0.0,
            # When the operator asks for a swap again, the causes of the last refusal are out of date.
            refused=() if run.swaps and self._requested_at is None else kept.refused,
        )
        self._began = began
        await self._keep(claim)
        if run.swaps and run.is_active:
            if self._requested_at is None:
                self._requested_at = began
            return await self._swap(claim, run, swap)
        self._forget_request()
        return False

    async def _swap(self, claim: Claim, run: ReindexRun, swap: Swap) -> bool:
        """Try to swap if the gate allows it; return whether the target is live now.

        After the next pass it tries again, unless the swap is refused: because a line of the gate needs the operator,
        has not held for `WAIT_MAX_S`, or the swap was called off `TRIES_MAX` times. A line that may hold after another
        pass gets that time, because a suspect key is repaired after the horizon, and an origin may lag for a while.
        """
        report = await report_run(self._pipeline, self._shards)
        assert report is not None, "a run that was started stays in the controls"
        gate = Gate(self._pipeline, self._target, self._origin, run.sample_keys)
        try:
            lines = failing(await gate.lines(report))
        except UnavailableError as error:
            # The origin or the sink is away; a ledger that is away shows with the next call.
            lines = [GateLine("available", str(error), False, is_transient=True)]
        refused, is_transient = tuple(line.text for line in lines), all(line.is_transient for line in lines)
        if not lines:
            if not (cause := await swap.run(run)):
                return True
            refused = (f"{CALLED_OFF}{cause}",)
            self._tries += 1
        self._progress = replace(self._progress, refused=refused)
        await self._keep(claim)
        if not is_transient or self._tries >= TRIES_MAX or self._has_waited():
            await self._refuse(run, refused[0])
        return False

    async def _refuse(self, run: ReindexRun, cause: str) -> None:
        """Withdraw the operator's request for a swap; the run goes on catching up."""
        self._forget_request()
        if await replace_run(self._pipeline, run, replace(run, swaps=False)):
            name = self._pipeline.name
            self._pipeline.emit(events.SwapRefused(pipeline=name, generation=run.generation, cause=cause))

    def _has_waited(self) -> bool:
        return self._requested_at is not None and self._pipeline.clock() >= self._requested_at + WAIT_MAX_S

    def _forget_request(self) -> None:
        self._requested_at, self._tries = None, 0

    async def _is_current(self) -> bool:
        """Whether the run still catches up, or has a swap to complete or call off.

        This worker may have begun with controls that it read before a swap. The answer stays true while it holds the
        claim, because only the holder swaps.
        """
        controls = await self._controls()
        run, is_moving = controls.run, controls.move is not None
        return run is not None and self._is_same(run) and (run.state is RunState.CATCHING_UP or is_moving)

    def _is_same(self, run: ReindexRun) -> bool:
        return run.identity == self._run.identity

    async def _current_run(self) -> ReindexRun:
        run = (await self._controls()).run
        return run if run is not None and self._is_same(run) else replace(self._run, swaps=False)

    async def _controls(self) -> Controls:
        return await self._pipeline.retry_until_reachable(LEDGER, self._pipeline.control_store.controls)

    async def _repair(self, other: OpenPipeline, repairer: Repairer) -> None:
        """Repair suspect keys of the other target; the consumers of the pipeline repair those of the live one."""
        if other.has_suspects:
            keys = await other.admin.suspects(SUSPECTS_AT_ONCE, other.settings.horizon_s)
            await repairer.run(keys)

    def _kept(self, claim: Claim) -> CatchUpProgress:
        """Return the progress that this worker begins with: what it must not forget of the workers before it."""
        if claim.position is None:
            return self._progress
        steps, before = claim.position.place, msgspec.json.decode(claim.position.note, type=CatchUpProgress)
        deleted = before.deleted if before.run_started_at == self._run.started_at else 0
        return replace(self._progress, steps=steps, deleted=deleted)

    async def _keep_within(self, claim: Claim, deleted: int) -> None:
        """Store, in the middle of a pass, how many gone keys are deleted; raise as `_keep` does.

        It is stored before the deletions, so that those of a worker that dies among them count.
        """
        if deleted > self._progress.deleted:
            self._progress = replace(self._progress, deleted=deleted, gone=0)  # Nothing is waited for any more.
        await self._store(claim)

    async def _keep(self, claim: Claim) -> None:
        """Store the progress; raise `OvertakenError` if another worker holds the claim by now."""
        self._progress = replace(self._progress, steps=self._progress.steps + 1)
        await self._store(claim)

    async def _store(self, claim: Claim) -> None:
        if await self._shards.advance(claim, self._progress.position) is None:
            raise OvertakenError

    async def _rest(self, is_over: Callable[[], bool]) -> None:
        """Rest before the next pass, at most until the operator asks for the swap."""
        is_wanted = (await self._current_run()).swaps
        rest_s = SWAP_REST_S if is_wanted else min(REST_MAX_S, max(REST_S, 2 * self._progress.seconds))
        until = self._pipeline.clock() + rest_s
        while (left_s := until - self._pipeline.clock()) > 0:
            run = self._pipeline.controls.run
            if is_over() or (run is not None and run.swaps and not is_wanted):
                return
            await asyncio.sleep(min(REST_S, left_s))


async def call_off_swap(pipeline: OpenPipeline, shards: ShardLedger, run: ReindexRun) -> None:
    """Lift the barrier of a swap whose target cannot be opened any more, unless the swap can only go forward."""
    claim = await shards.claim(CATCH_UP, run.generation)
    if isinstance(claim, Refusal):
        return
    try:
        live = _with_token(pipeline, claim)
        barrier = Barrier(live, live, claim.token)
        await barrier.take_over_live()
        await barrier.lift()
    except OvertakenError:
        pass
    finally:
        shards.stop_renewing(claim)
        await shards.release(claim)


def _with_token(pipeline: OpenPipeline, claim: Claim) -> OpenPipeline:
    """Return the pipeline for the holder of a claim, whose token passes the barrier."""
    return dataclasses.replace(pipeline, move_token=claim.token, owner=f"{pipeline.owner}-swap")
