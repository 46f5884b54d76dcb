"""The target that a run fills beside the live one: the checks before it is created, its opening and its end."""

from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

from msgspec.structs import replace

from keywise.core.controls import Controls, Move, ReindexRun, RunState
from keywise.core.errors import AdminError, DatabaseError
from keywise.core.ledger import TransferableLedger
from keywise.core.target import AliasSink, MovableSink, TargetNote
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.plan import RunPlan

GENERATION = "{generation}"
"""Stands for the generation of the run in the name of a target."""
NO_TOKEN = -1
"""No claim has this token, so a barrier that has it stays up."""


def target_of(plan: RunPlan, generation: int) -> str:
    """Return the name of the target that a plan asks for, at a generation; empty for a run in place."""
    return plan.into.replace(GENERATION, str(generation))


async def check_beside(pipeline: OpenPipeline, controls: Controls, plan: RunPlan) -> str:
    """Return the live target; raise `AdminError` if the target of the plan cannot be built beside it."""
    name, sink = pipeline.name, require_targets(pipeline)
    if plan.is_partial or plan.also_removed:
        raise AdminError(
            "a target beside the live one gets all rows but those of keys that an operator has removed; leave out "
            "--ids, --where, --limit and --also-removed"
        )
    if controls.era and isinstance(sink, AliasSink):
        raise AdminError(
            f"pipeline {name!r} is in era {controls.era}, and the store compares versions only; build the new target "
            "as a pipeline of its own"
        )
    if controls.spare and not plan.drops_old:
        raise AdminError(
            f"pipeline {name!r} can still go back to {controls.spare}; drop it first with keywise reindex drop {name}"
        )
    current = await sink.current_target()
    if controls.target and isinstance(sink, AliasSink) and current != controls.target:
        raise AdminError(
            f"the name of the sink stands for {current}, and the last swap moved it to {controls.target}; it was "
            "moved by other means, so move it back"
        )
    live = controls.target or current
    if plan.into in (live, current):
        raise AdminError(f"{plan.into} is the live target; name a new one")
    return live


async def fault_of_name(pipeline: OpenPipeline, live: str) -> str:
    """Return why the name of the sink does not stand for the live target, and so cannot move; empty if it does."""
    sink = require_targets(pipeline)
    try:
        current = await sink.current_target()
    except AdminError as error:
        return str(error)
    return "" if current == live else f"the name of the sink stands for {current}, and not for {live}"


def droppable_target(controls: Controls) -> tuple[str, int] | None:
    """Return the target that `drop` may delete, and the generation of its scope; None if there is none.

    It is the spare, or the target of a cancelled run.
    """
    run = controls.run
    if controls.spare:
        return controls.spare, controls.spare_generation
    if run is not None and run.state is RunState.CANCELLED and run.into and not run.is_dropped:
        return run.into, run.generation
    return None


def letters_command(name: str, run: ReindexRun) -> str:
    """Return the command that lists the dead letters of a run."""
    return f"keywise dead list --pipeline {name}{' --beside' if run.is_beside else ''}"


def target_beside(controls: Controls) -> tuple[str, int] | None:
    """Return the target beside the live one, and the generation of its scope; None if there is none."""
    run = controls.run_beside
    return (run.into, run.generation) if run is not None else droppable_target(controls)


async def create_beside(pipeline: OpenPipeline, run: ReindexRun, definition: bytes | None) -> None:
    """Create the target of a run, in the current era of the pipeline. It may be repeated after a crash."""
    sink = require_targets(pipeline)
    controls = await pipeline.control_store.controls()
    await sink.create_target(run.into, TargetNote(pipeline.name, run.generation), controls.target_epoch, definition)
    async with open_beside(pipeline, run) as other:
        store = other.control_store
        while (before := await store.controls()).era != controls.era:
            await store.replace_controls(before, replace(before, era=controls.era))
    # A target of this name was kept once, and deleted by hand since then.
    store = pipeline.control_store
    while run.into in (before := await store.controls()).kept:
        await store.replace_controls(before, replace(before, kept=tuple(one for one in before.kept if one != run.into)))


async def drop_beside(
    pipeline: OpenPipeline, target: str, generation: int, *, keeps_target: bool, keeps_always: bool = False
) -> None:
    """Clear the scope of a target that is not live, delete it from its store unless it is kept, and forget it.

    A target that is kept is deleted by a later `drop_old`, unless it is kept always.
    `generation` is that of the run whose scope describes it. It may be repeated after a crash: the controls forget the
    target last.
    """
    sink, store = require_targets(pipeline), pipeline.control_store
    assert pipeline.open_target is not None, "a run beside has started"
    # The scope is cleared first, because opening a sink may create its target. If the target cannot be opened, an
    # earlier call has cleared the scope and deleted the target. Or the target was deleted by other means; then its
    # entries stay in a scope that no later run uses.
    async with AsyncExitStack() as stack:
        other = None
        with suppress(DatabaseError):
            other = await stack.enter_async_context(pipeline.open_target(target, generation))
        if other is not None:
            assert isinstance(other.ledger, TransferableLedger), "a run starts only on a ledger that lists its entries"
            await _close(other, target)
            await other.ledger.transfer.clear()
    if not keeps_target:
        await sink.drop_target(target)
    while droppable_target(before := await store.controls()) == (target, generation):
        assert before.run is not None, "a run has filled it"
        dropped = replace(before.run, is_dropped=True)
        kept = (*before.kept, target) if keeps_always else before.kept
        await store.replace_controls(before, replace(before, spare="", spare_generation=0, run=dropped, kept=kept))


async def check_spare(pipeline: OpenPipeline, controls: Controls) -> None:
    """Raise `AdminError` if a `drop` of the spare was interrupted before the controls forgot it."""
    assert pipeline.open_target is not None, "a run beside has filled it"
    spare = controls.spare
    try:
        async with pipeline.open_target(spare, controls.spare_generation) as other:
            is_dropped = (await other.control_store.controls()).move == _closing(spare)
    except DatabaseError:
        is_dropped = True
    if is_dropped:
        raise AdminError(
            f"a drop of {spare} was interrupted, so nothing can go back to it; complete it with keywise reindex drop "
            f"{pipeline.name}"
        )


async def _close(other: OpenPipeline, target: str) -> None:
    """Make the ledger refuse every later claim in the scope of a dropped target.

    Otherwise a worker that was stopped while it filled the target would go on, and write into a later target of the
    same name.
    """
    store = other.control_store
    while (before := await store.controls()).move != _closing(target):
        await store.replace_controls(before, replace(before, move=_closing(target)))


def _closing(target: str) -> Move:
    """Return the barrier that stays in the scope of a dropped target."""
    return Move(target, target, NO_TOKEN)


async def drop_old(pipeline: OpenPipeline, keep: int) -> list[str]:
    """Delete old targets that runs of this pipeline have built, the oldest first; return their names.

    `keep` is how many stay besides the live one and the one that a run fills now; the spare always stays, and counts.
    Targets that an operator has kept on purpose stay too, and do not count.
    """
    sink = require_targets(pipeline)
    # The targets come first: the controls then know every run that has created one of them.
    targets = await sink.targets(pipeline.name)
    controls = await pipeline.control_store.controls()
    run = controls.run
    filled = run.into if run is not None and run.is_active else ""
    stay = {await sink.current_target(), controls.target, controls.spare, filled, *controls.kept}
    old = [target for target in targets if target not in stay]
    dropped = old[: max(0, len(old) - max(0, keep - bool(controls.spare)))]
    for target in dropped:
        await sink.drop_target(target)
    return dropped


def open_beside(pipeline: OpenPipeline, run: ReindexRun) -> AbstractAsyncContextManager[OpenPipeline]:
    """Open the pipeline on the target of a run, in its scope of the ledger."""
    assert pipeline.open_target is not None, "a run beside starts only if its sink has targets"
    return pipeline.open_target(run.into, run.generation)


def require_targets(pipeline: OpenPipeline) -> MovableSink:
    """Return the sink of a pipeline; raise `AdminError` if no target can be built beside its live one."""
    if not isinstance(pipeline.sink, MovableSink) or pipeline.open_target is None:
        raise AdminError(
            f"the sink of pipeline {pipeline.name!r} has one target only: a second one can be built beside an alias of "
            "OpenSearch, or a table in the ledger's database; leave out --into to reindex in place"
        )
    return pipeline.sink
