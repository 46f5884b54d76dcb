"""What an operator does with a reindex, from its start to a swap and a rollback; each act leaves a history record."""

from collections.abc import Callable

from msgspec.structs import replace

from keywise.core.controls import PAUSE_MAX_S, SAMPLE_KEYS, Controls, ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.core.origin import Origin
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.reindex.gate import Gate, GateResult
from keywise.reindex.notice import check_receiver
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import report_run
from keywise.reindex.run_state import BARRIER_IS_UP, replace_run
from keywise.reindex.shards import ShardLedger
from keywise.reindex.targets import (
    check_beside,
    check_spare,
    create_beside,
    drop_beside,
    droppable_target,
    open_beside,
    target_of,
)
from keywise.reindex.version_check import check_rows, check_versions

GENERATION_MAX = 2_000_000_000
"""Postgres keeps a generation in 32 bits, and removals by operators add to it."""


class ReindexAdmin:
    """The operator's acts on the runs of one pipeline."""

    def __init__(self, admin: PipelineAdmin, audit_note: AuditNote) -> None:
        self.pipeline: OpenPipeline = admin.pipeline
        self._admin = admin
        self._origin, self._shards = require_origin(self.pipeline)
        self._audit_note = audit_note

    async def start(self, plan: RunPlan, report: Callable[[str], None] = lambda text: None) -> ReindexRun:
        """Start a run, or complete a start that was interrupted; workers take part in the run from then on.

        A plan that names the generation of the last run returns that run, so a script may repeat its start after a
        crash. `report` gets each step.
        """
        controls = await self.pipeline.control_store.controls()
        before = controls.run
        live = await check_beside(self.pipeline, controls, plan) if plan.into else ""
        if before is not None and before.state is not RunState.STARTING and _is_same(before, plan):
            return before
        self._check_no_other(controls, plan)
        if plan.notify:
            await check_receiver(self.pipeline, plan.notify)
        report("dividing the origin into shards")
        shards = await plan.shards(self._origin)
        if plan.is_checked:
            report("comparing versions")
            await check_rows(self.pipeline, self._origin, shards[0])
            await check_versions(self.pipeline, self._origin)
        if plan.drops_old and (droppable := droppable_target(controls)) is not None:
            report(f"dropping {droppable[0]}")
            await self.drop(keeps_target=plan.keeps_old and bool(controls.spare))
            before = (await self.pipeline.control_store.controls()).run
        run = await self._begin(before, plan, live)
        if run.is_beside:
            report(f"creating {run.into}")
            try:
                await create_beside(self.pipeline, run, plan.definition)
            except AdminError:
                # A target that is refused now is refused by every repetition, so this start leaves no run behind.
                if run.starts == 1:
                    await replace_run(self.pipeline, run, before)
                raise
        # The run has all shards of this start, and no others. While it is starting, no worker reads a shard, so this
        # start may replace each one that an earlier start has written. It moves the run on only if no later start has
        # begun, because that one would have changed the run. From then on no start of this run begins any more, and an
        # earlier one that wakes up is refused by the ledger: the place of a shard begins at the number of its start.
        if not await self._shards.write(shards, run.generation, run.starts):
            raise self._changed_meanwhile()
        scanning = replace(run, state=RunState.SCANNING, shards=len(shards))
        if not await replace_run(self.pipeline, run, scanning):
            raise self._changed_meanwhile()
        into = f", into {run.into}" if run.is_beside else ""
        where = f", where {plan.where}" if plan.where else ""
        detail = f"generation {run.generation}, shards: {len(shards):,}{into}{where}"
        await self._admin.record("reindex started", detail=detail)
        return scanning

    def _check_no_other(self, controls: Controls, plan: RunPlan) -> None:
        """Raise `AdminError` if another run goes on, or a cancelled run has left its target.

        The controls store only the last run, so after this start `drop` could no longer find that target.
        """
        run, name = controls.run, self.pipeline.name
        if run is not None and run.is_active and not _is_same(run, plan):
            raise AdminError(
                f"reindex {run.generation} of pipeline {name!r} is {_state_of(run)}, and one runs at a time; see "
                f"keywise reindex status {name}, or end it with keywise reindex cancel {name}"
            )
        left = droppable_target(controls)
        if left is not None and not controls.spare and not plan.drops_old:
            raise AdminError(
                f"a cancelled run has left {left[0]} beside the live target; drop it first with keywise reindex drop "
                f"{name}"
            )

    async def _begin(self, before: ReindexRun | None, plan: RunPlan, live: str) -> ReindexRun:
        """Store the run as starting, with its generation and the number of this start: no other start can take both.

        The start of a run that was interrupted is completed with the options of this plan.
        """
        starts = 1
        if before is not None and before.state is RunState.STARTING and _is_same(before, plan):
            generation, starts = before.generation, before.starts + 1
        else:
            generation = await next_generation(self.pipeline, plan)
        run = ReindexRun(
            generation,
            starts=starts,
            starter=self.pipeline.owner,
            into=target_of(plan, generation),
            live=live,
            is_partial=plan.is_partial,
            also_removed=plan.also_removed,
            delete_max=plan.delete_max,
            started_at=await self.pipeline.admin.now(),
            by=self._audit_note.who,
            why=self._audit_note.why,
            notify=plan.notify,
        )
        if not await replace_run(self.pipeline, before, run):
            raise self._changed_meanwhile()
        return run

    def _changed_meanwhile(self) -> AdminError:
        return AdminError(
            f"another operator has started or changed a run meanwhile; see keywise reindex status {self.pipeline.name}"
        )

    async def pause(self) -> ReindexRun:
        """Stop reading: workers finish the pages and passes that they have begun, and every shard keeps its place."""
        return await self._change("paused", lambda run: replace(run, is_paused=True))

    async def resume(self, delete_max: int | None = None) -> ReindexRun:
        """Go on with a paused run, or consent to the deletion of up to `delete_max` more gone keys.

        Raises `AdminError` if the run would wait again at once, because `delete_max` is too low.
        """
        report = await report_run(self.pipeline, self._shards)
        deleted = 0 if report is None else report.deleted
        if report is not None and report.gone and (not report.run.is_paused or delete_max is not None):
            allowed = 0 if delete_max is None else delete_max
            if allowed < report.gone:
                gone = "1 key is" if report.gone == 1 else f"{report.gone:,} keys are"
                raise AdminError(
                    f"{gone} gone from the origin, more than the run may delete; allow it with --delete-max "
                    f"{report.gone}, or end the run with keywise reindex cancel {self.pipeline.name}"
                )

        def resumed(run: ReindexRun) -> ReindexRun:
            limit = run.delete_max if delete_max is None else delete_max + deleted
            return replace(run, is_paused=False, delete_max=limit)

        return await self._change("resumed", resumed)

    async def cancel(self) -> ReindexRun:
        """End a run where it is. In place, what it has written stays: each row is at its own version.

        A target beside the live one stays in its store until `drop`. Raises `AdminError` if a swap can only go forward.
        """
        ended_at = await self.pipeline.admin.now()
        return await self._change(
            "cancelled",
            lambda run: replace(run, state=RunState.CANCELLED, is_paused=False, swaps=False, ended_at=ended_at),
        )

    # Beside the live target.

    async def verify(
        self, sample_keys: int = SAMPLE_KEYS, *, accept_dead: int | None = None, pause_max_s: float | None = None
    ) -> GateResult:
        """Return what the gate finds now, under these limits of a swap; None: the limits that the run has."""
        run = await self._catching_up()
        report = await report_run(self.pipeline, self._shards)
        assert report is not None, "there is a run"
        run = _with_limits(run, accept_dead, pause_max_s)
        async with open_beside(self.pipeline, run) as other:
            lines = await Gate(self.pipeline, other, self._origin, sample_keys).lines(replace(report, run=run))
        return GateResult(run, lines)

    async def swap(
        self, accept_dead: int = 0, pause_max_s: float | None = None, sample_keys: int = SAMPLE_KEYS
    ) -> ReindexRun:
        """Request a swap: a worker carries it out as soon as the gate allows it. `ReindexRun.swaps` is the request."""
        await self._catching_up()

        def wanted(run: ReindexRun) -> ReindexRun:
            limited = _with_limits(run, accept_dead, pause_max_s)
            return replace(limited, sample_keys=sample_keys, swaps=True, is_paused=False)

        run, is_new = await self._replace("swapped", wanted)
        if is_new:
            await self._admin.record("swap requested", detail=f"generation {run.generation}, to {run.into}")
        return run

    async def rollback(self, pause_max_s: float | None = None, sample_keys: int = SAMPLE_KEYS) -> ReindexRun:
        """Request a swap to the spare. It catches up first, so nothing that was written since the last swap is lost."""
        controls = await self.controls_with_spare()
        await check_spare(self.pipeline, controls)
        back = ReindexRun(
            controls.spare_generation,
            RunState.CATCHING_UP,
            into=controls.spare,
            live=controls.target,
            is_rollback=True,
            swaps=True,
            started_at=await self.pipeline.admin.now(),
            pause_max_s=PAUSE_MAX_S if pause_max_s is None else pause_max_s,
            sample_keys=sample_keys,
            by=self._audit_note.who,
            why=self._audit_note.why,
        )
        if not await replace_run(self.pipeline, controls.run, back):
            raise self._changed_meanwhile()
        await self._admin.record("reindex rolled back", detail=f"from {back.live} to {back.into}")
        return back

    async def controls_with_spare(self) -> Controls:
        """Return the controls; raise `AdminError` if they have no spare to go back to, or a run is going on."""
        controls = await self._controls_without_run()
        if not controls.spare:
            raise AdminError(
                f"pipeline {self.pipeline.name!r} has no target to go back to: nothing was swapped, or the old target "
                "was dropped"
            )
        return controls

    async def drop(self, *, keeps_target: bool = False, keeps_always: bool = False) -> str:
        """Delete the target that is not live, and its scope in the ledger; return its name.

        With `keeps_target` the target stays in its store, but keywise can no longer go back to it. With `keeps_always`
        no later run deletes it either.
        """
        target, generation = await self.target_to_drop()
        stays = keeps_target or keeps_always
        await drop_beside(self.pipeline, target, generation, keeps_target=stays, keeps_always=keeps_always)
        await self._admin.record("target dropped", detail=f"{target}, kept in the store" if stays else target)
        return target

    async def target_to_drop(self) -> tuple[str, int]:
        """Return the target that `drop` deletes, and the generation of its scope; raise `AdminError` if it may not."""
        controls = await self._controls_without_run()
        if controls.move is not None:
            raise AdminError(BARRIER_IS_UP)
        if (droppable := droppable_target(controls)) is None:
            raise AdminError(
                f"pipeline {self.pipeline.name!r} has no target beside the live one, so nothing was dropped"
            )
        return droppable

    async def _controls_without_run(self) -> Controls:
        """Return the controls; raise `AdminError` if a run is going on, because it needs both targets."""
        controls = await self.pipeline.control_store.controls()
        run = controls.run
        if run is not None and run.is_active:
            raise AdminError(
                f"reindex {run.generation} of pipeline {self.pipeline.name!r} is {_state_of(run)}; end it first with "
                f"keywise reindex cancel {self.pipeline.name}"
            )
        return controls

    async def _catching_up(self) -> ReindexRun:
        """Return the run that catches up; raise `AdminError` if there is none, or its target has not all rows yet."""
        run = (await self.pipeline.control_store.controls()).run
        if run is None or not run.is_active or not run.is_beside:
            raise AdminError(
                f"no target is being built beside the live one of pipeline {self.pipeline.name!r}; start with keywise "
                f"reindex start {self.pipeline.name} --into NAME"
            )
        if run.state is not RunState.CATCHING_UP:
            raise AdminError(f"{run.into} has not all rows yet; see keywise reindex status {self.pipeline.name}")
        return run

    async def _change(self, what: str, change: Callable[[ReindexRun], ReindexRun]) -> ReindexRun:
        run, is_new = await self._replace(what, change)
        if is_new:
            await self._admin.record(f"reindex {what}", detail=f"generation {run.generation}")
        return run

    async def _replace(self, what: str, change: Callable[[ReindexRun], ReindexRun]) -> tuple[ReindexRun, bool]:
        """Change the run that is going on; return it, and whether the change made a difference."""
        while True:
            run = (await self.pipeline.control_store.controls()).run
            if run is None or not run.is_active:
                raise AdminError(
                    f"no reindex of pipeline {self.pipeline.name!r} is going on, so nothing was {what}; "
                    f"start one with keywise reindex start {self.pipeline.name}"
                )
            changed = change(run)
            if await replace_run(self.pipeline, run, changed):
                return changed, changed != run


async def next_generation(pipeline: OpenPipeline, plan: RunPlan) -> int:
    """Return the generation of a new run; raise `AdminError` if the plan names one that its pipeline has reached.

    It has a limit, because no ledger could store the marks of a higher one, and its workers would stop.
    """
    highest = await pipeline.control_store.highest_generation()
    known = max(highest, (await pipeline.control_store.controls()).generation)
    generation = plan.generation if plan.generation is not None else known + 1
    if generation <= known:
        raise AdminError(
            f"generation {generation} is not above {known}, which this pipeline has reached; leave out --to, or name a "
            "higher one"
        )
    if generation > GENERATION_MAX:
        raise AdminError(f"generation {generation} is above the highest one, {GENERATION_MAX}; leave out --to")
    return generation


def _with_limits(run: ReindexRun, accept_dead: int | None, pause_max_s: float | None) -> ReindexRun:
    """Return the run with these limits of a swap; None leaves a limit as it is."""
    dead = run.accept_dead if accept_dead is None else accept_dead
    return replace(run, accept_dead=dead, pause_max_s=run.pause_max_s if pause_max_s is None else pause_max_s)


def _state_of(run: ReindexRun) -> str:
    return "paused" if run.is_paused else run.state.value


def _is_same(run: ReindexRun, plan: RunPlan) -> bool:
    """Whether a plan asks for this run again: a script may repeat its start after a crash."""
    # A plan for all rows does not complete a start for some rows: it is more likely another operator's.
    is_like = plan.is_partial == run.is_partial and target_of(plan, run.generation) == run.into
    is_unfinished = run.state is RunState.STARTING and plan.generation is None
    return is_like and run.state is not RunState.CANCELLED and (is_unfinished or plan.generation == run.generation)


def require_origin(pipeline: OpenPipeline) -> tuple[Origin, ShardLedger]:
    """Return the origin of a pipeline and the ledger of its shards; raise `AdminError` if it cannot be reindexed."""
    if pipeline.origin is None:
        raise AdminError(
            f"pipeline {pipeline.name!r} has no origin to read rows from; name the table that has them: "
            f'{pipeline.name}.origin("postgresql://...?table=pages&key=id"), in a TOML file: origin = "URL"'
        )
    if pipeline.shard_ledger is None:
        raise AdminError(
            f"pipeline {pipeline.name!r} writes while its ledger is down, and a reindex needs the ledger for each row; "
            'write on_ledger_down="wait"'
        )
    return pipeline.origin, ShardLedger(pipeline.shard_ledger, pipeline.owner, pipeline.settings, pipeline.clock)
