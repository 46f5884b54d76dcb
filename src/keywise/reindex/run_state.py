"""Moves a run from one state to the next; of several workers and operators that try at once, one succeeds."""

from functools import partial

from msgspec.structs import replace

from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.flow.pipeline import LEDGER, OpenPipeline

BARRIER_IS_UP = "the barrier of the last swap is still up; a worker lifts it, so make sure that one runs, and try again"


async def move_run(pipeline: OpenPipeline, run: ReindexRun, state: RunState) -> bool:
    """Move a run to another state; return False if it has changed meanwhile."""
    has_ended = state in (RunState.COMPLETE, RunState.CANCELLED)
    ended_at = await pipeline.retry_until_reachable(LEDGER, pipeline.admin.now) if has_ended else 0.0
    return await replace_run(pipeline, run, replace(run, state=state, ended_at=ended_at))


async def replace_run(pipeline: OpenPipeline, before: ReindexRun | None, after: ReindexRun | None) -> bool:
    """Store a run, or none, in place of `before`; return False if the stored run is another one by now.

    Raises `AdminError` if a new run would begin behind the barrier of an earlier run, because a worker lifts only the
    barrier of the run that is stored; and if a run would be cancelled whose swap can only go forward.
    """
    is_new = after is not None and after.is_active and (before is None or not before.is_active)
    is_cancel = after is not None and after.state is RunState.CANCELLED
    while True:
        controls = await pipeline.retry_until_reachable(LEDGER, pipeline.control_store.controls)
        if controls.run == after:
            return True  # The answer to an earlier call was lost.
        if controls.run != before:
            return False
        if is_new and controls.move is not None:
            raise AdminError(BARRIER_IS_UP)
        if is_cancel and controls.move is not None and controls.move.is_called:
            raise AdminError(f"the swap to {controls.move.after} can no longer be called off; it ends in a moment")
        reached = controls.generation if after is None else max(controls.generation, after.generation)
        changed = replace(controls, run=after, generation=reached)
        if await pipeline.retry_until_reachable(
            LEDGER, partial(pipeline.control_store.replace_controls, controls, changed)
        ):
            pipeline.controls = changed
            return True
        # An operator has set something else meanwhile, such as a pause.
