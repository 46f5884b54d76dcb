"""Moves a run from one state to the next; of several workers and operators that try at once, one succeeds."""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from keywise.core.controls import Controls, ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.flow.pipeline import LEDGER, OpenPipeline


async def move_run(pipeline: OpenPipeline, run: ReindexRun, state: RunState) -> bool:
    """Move a run to another state; return False if it has changed meanwhile."""
    has_ended = state in (RunState.COMPLETE, RunState.CANCELLED)
    ended_at = await pipeline.retry_until_reachable(LEDGER, pipeline.admin.now) if has_ended else 0.0
    return await replace_run(pipeline, run, replace(run, state=state, ended_at=ended_at))


async def replace_run(
    pipeline: OpenPipeline,
    before: ReindexRun | None,
    after: ReindexRun | None,
    check: Callable[[Controls], None] = lambda controls: None,
) -> bool:
    """Store a run, or none, in place of `before`; return False if the stored run is another one by now.

    `check` gets the controls that are replaced, and may raise an error instead.
    Raises `AdminError` if a new run would begin behind the barrier of an earlier one. Workers look after the barrier of
    the run that is stored, so no worker would lift it.
    """
    is_new = after is not None and after.is_active and (before is None or not before.is_active)
    while True:
        controls = await pipeline.retry_until_reachable(LEDGER, pipeline.control_store.controls)
        if controls.run == after:
            return True  # The answer to an earlier call was lost.
        if controls.run != before:
            return False
        if is_new and controls.move is not None:
            raise AdminError("a swap is being called off; try again in some seconds")
        check(controls)
        reached = controls.generation if after is None else max(controls.generation, after.generation)
        changed = replace(controls, run=after, generation=reached)
        if await pipeline.retry_until_reachable(
            LEDGER, partial(pipeline.control_store.replace_controls, controls, changed)
        ):
            pipeline.controls = changed
            return True
        # An operator has set something else meanwhile, such as a pause.
