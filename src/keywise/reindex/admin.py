"""What an operator does with a reindex: start, pause, resume and cancel it; each act leaves a record in the history."""

from collections.abc import Callable

from msgspec.structs import replace

from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.core.origin import Origin
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.reindex.notice import check_receiver
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import report_run
from keywise.reindex.run_state import replace_run
from keywise.reindex.shards import ShardLedger
from keywise.reindex.version_check import check_rows, check_versions


class ReindexAdmin:
    """The operator's acts on the runs of one pipeline."""

    def __init__(self, admin: PipelineAdmin, audit_note: AuditNote) -> None:
        self.pipeline: OpenPipeline = admin.pipeline
        self._admin = admin
        self._origin, self._shards = needs_origin(self.pipeline)
        self._audit_note = audit_note

    async def start(self, plan: RunPlan, report: Callable[[str], None] = lambda text: None) -> ReindexRun:
        """Start a run; workers take part in it from then on. A start that was broken off is continued.

        The same generation again is the same run: a script may repeat its start after a crash.
        """
        before = (await self.pipeline.control_store.controls()).run
        if before is not None and before.state is not RunState.STARTING and _is_same(before, plan):
            return before
        if before is not None and before.is_active and before.state is not RunState.STARTING:
            raise AdminError(
                f"reindex {before.generation} of pipeline {self.pipeline.name!r} is {_state_of(before)}, and one runs "
                f"at a time; see keywise reindex status {self.pipeline.name}, or end it with keywise reindex cancel "
                f"{self.pipeline.name}"
            )
        if plan.notify:
            await check_receiver(self.pipeline, plan.notify)
        report("dividing the origin into shards")
        shards = await plan.shards(self._origin)
        if plan.is_checked:
            report("comparing versions")
            await check_rows(self.pipeline, self._origin, shards[0])
            await check_versions(self.pipeline, self._origin)
        run = await self._begin(before, plan)
        await self._shards.write(shards, run.generation)
        scanning = replace(run, state=RunState.SCANNING, shards=len(shards))
        if not await replace_run(self.pipeline, run, scanning):
            raise AdminError("another operator has changed the run meanwhile; see keywise reindex status")
        await self._admin.record("reindex started", detail=f"generation {run.generation}, shards: {len(shards):,}")
        return scanning

    async def _begin(self, before: ReindexRun | None, plan: RunPlan) -> ReindexRun:
        """Store the run as starting, with its generation: no other start can take the same one."""
        if before is not None and before.state is RunState.STARTING and _is_same(before, plan):
            return before
        run = ReindexRun(
            await next_generation(self.pipeline, before, plan),
            is_partial=plan.is_partial,
            also_removed=plan.also_removed,
            delete_max=plan.delete_max,
            started_at=await self.pipeline.admin.now(),
            by=self._audit_note.who,
            why=self._audit_note.why,
            notify=plan.notify,
        )
        if not await replace_run(self.pipeline, before, run):
            raise AdminError("another operator has started a run meanwhile; see keywise reindex status")
        return run

    async def pause(self) -> ReindexRun:
        """Let workers read no more pages; what they have begun ends, and every shard keeps its place."""
        return await self._change("paused", lambda run: replace(run, is_paused=True))

    async def resume(self, delete_max: int | None = None) -> ReindexRun:
        """Go on with a paused run, or with a sweep that has found more gone keys than it may delete.

        Raises `AdminError` if the sweep would stop again at once, because `delete_max` is too low.
        """
        report = await report_run(self.pipeline, self._shards)
        if report is not None and report.gone and (not report.run.is_paused or delete_max is not None):
            allowed = 0 if delete_max is None else delete_max
            if allowed < report.gone:
                raise AdminError(
                    f"the sweep has found {report.gone:,} gone keys and may not delete so many; allow it with "
                    f"--delete-max {report.gone}, or end the run with keywise reindex cancel {self.pipeline.name}"
                )

        def resumed(run: ReindexRun) -> ReindexRun:
            limit = delete_max if delete_max is not None else run.delete_max
            return replace(run, is_paused=False, delete_max=limit)

        return await self._change("resumed", resumed)

    async def cancel(self) -> ReindexRun:
        """End a run where it is. What it has written stays: each row is current, at its own version."""
        ended_at = await self.pipeline.admin.now()
        return await self._change(
            "cancelled", lambda run: replace(run, state=RunState.CANCELLED, is_paused=False, ended_at=ended_at)
        )

    async def _change(self, what: str, change: Callable[[ReindexRun], ReindexRun]) -> ReindexRun:
        while True:
            run = (await self.pipeline.control_store.controls()).run
            if run is None or not run.is_active:
                raise AdminError(
                    f"no reindex of pipeline {self.pipeline.name!r} is going on, so nothing was {what}; "
                    f"start one with keywise reindex start {self.pipeline.name}"
                )
            changed = change(run)
            if await replace_run(self.pipeline, run, changed):
                break
        if changed != run:
            await self._admin.record(f"reindex {what}", detail=f"generation {run.generation}")
        return changed


async def next_generation(pipeline: OpenPipeline, before: ReindexRun | None, plan: RunPlan) -> int:
    """Return the generation of a new run, above all that its pipeline has reached; raise `AdminError` if it is not."""
    highest = await pipeline.control_store.highest_generation()
    known = max(highest, before.generation if before is not None else 0)
    generation = plan.generation if plan.generation is not None else known + 1
    if generation <= known:
        raise AdminError(
            f"generation {generation} is not above {known}, which this pipeline has reached; leave out --to, or name a "
            "higher one"
        )
    return generation


def _state_of(run: ReindexRun) -> str:
    return "paused" if run.is_paused else run.state.value


def _is_same(run: ReindexRun, plan: RunPlan) -> bool:
    """Whether a plan names a run that exists: a script may start the same generation again after a crash."""
    if run.state is RunState.STARTING:
        return plan.generation in (None, run.generation)
    return plan.generation == run.generation


def needs_origin(pipeline: OpenPipeline) -> tuple[Origin, ShardLedger]:
    """Return the origin of a pipeline and its shards; raise `AdminError` if it has none."""
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
