"""A whole reindex for a schedule, which goes on after a crash: start, wait, verify, swap, and delete old targets."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from keywise.core.controls import SAMPLE_KEYS, Controls, ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.gate import GateResult
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport
from keywise.reindex.run_watch import RunWatch, refusal_of
from keywise.reindex.targets import drop_old, droppable_target, target_of

PATIENCE_S = 600.0
"""How long a full run waits for a worker, and for lines of the gate that may hold after another pass."""
STARTING_S = 10.0
"""How long another process has to start a run: then it counts as killed, and this one goes on in its place. If it was
only slow, its start is refused, and it follows the run too."""
STARTING_LOOK_S = 0.2
GATE_LOOK_S = 5.0
"""How long it waits before it asks the gate again: after a line did not hold, or a swap was refused."""


class FullPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule asks for."""

    run: RunPlan
    if_older_than_s: float | None = None
    """Do nothing if the last complete run ended less long ago; None: always begin."""
    keep: int = 1
    """How many targets that were live before stay in the store, including the spare."""
    accept_dead: int = 0
    pause_max_s: float | None = None
    sample_keys: int = SAMPLE_KEYS
    """How many keys the gate compares with the origin."""


class FullResult(msgspec.Struct, frozen=True):
    """What was done."""

    run: ReindexRun | None
    """The run that is complete: the one that was due, or an earlier one."""
    is_due: bool
    """Whether it was time for a run."""
    target: str = ""
    """The target that is live since the last swap; empty if there was none."""
    spare: str = ""
    dropped: Sequence[str] = ()
    """Targets that were deleted."""
    swapped: str = ""
    """The history record of the swap; empty if there is none."""
    dead: int = 0
    """How many rows of the run are dead letters."""
    ended_s_ago: float = 0.0
    """If no run was due: how long ago the last one ended."""


class FullRun:
    """Carries out one plan. `show` gets each report of the run, and `say` the text of each step."""

    def __init__(
        self,
        admin: PipelineAdmin,
        audit_note: AuditNote,
        plan: FullPlan,
        show: Callable[[RunReport], None] = lambda report: None,
        say: Callable[[str], None] = lambda text: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._pipeline = admin.pipeline
        self._admin = admin
        self._reindex = ReindexAdmin(admin, audit_note)
        _, self._shards = require_origin(admin.pipeline)
        self._plan = plan
        self._show, self._say = show, say
        self._patience_s = patience_s
        self._dropped: list[str] = []

    async def run(self) -> FullResult:
        """Do what is due. Raises `AdminError` if it is refused, an operator has ended it, or it needs an operator."""
        controls = await self._pipeline.control_store.controls()
        run = controls.run
        if run is None or not self._goes_on(run):
            ended_s_ago = await self._ended_s_ago(run)
            if ended_s_ago is not None and ended_s_ago < (self._plan.if_older_than_s or 0.0):
                # An earlier process may have been killed after its swap, before it deleted the old targets.
                return await self._result(run, is_due=False, ended_s_ago=ended_s_ago)
        run = await self._start(controls)
        watch = RunWatch(self._pipeline, self._shards, run, self._look)
        report = await watch.until_built()
        if report.run.state is RunState.CATCHING_UP:
            report = await self._swap(watch, report)
        if refusal := refusal_of(self._pipeline.name, report):
            raise AdminError(refusal)
        swapped = await watch.swap_record() if run.is_beside else ""
        return await self._result(report.run, is_due=True, swapped=swapped, dead=report.dead)

    def _goes_on(self, run: ReindexRun) -> bool:
        """Whether this run was started for the same plan, by an earlier process, and has not ended."""
        is_same = run.into == target_of(self._plan.run, run.generation)
        return run.is_active and is_same and not (run.is_partial or run.is_rollback)

    async def _ended_s_ago(self, run: ReindexRun | None) -> float | None:
        """Return how long ago the last run ended, if it is complete and was not partial; else None."""
        if run is None or run.state is not RunState.COMPLETE or run.is_partial:
            return None
        return max(0.0, await self._pipeline.admin.now() - run.ended_at)

    async def _start(self, controls: Controls) -> ReindexRun:
        """Return the run of another process that goes on, or start one."""
        if (run := await self._joined(controls)) is not None:
            return run
        keeps_old, droppable = self._plan.keep > 1, droppable_target(controls)
        plan = replace(self._plan.run, drops_old=bool(self._plan.run.into), keeps_old=keeps_old)
        try:
            started = await self._reindex.start(plan, self._say)
        except AdminError:
            # Another process may have started the same run in between.
            if (run := await self._joined(await self._pipeline.control_store.controls())) is not None:
                return run
            raise
        if droppable is not None and plan.drops_old and not (keeps_old and controls.spare):
            self._dropped.append(droppable[0])
        return started

    async def _joined(self, controls: Controls) -> ReindexRun | None:
        """Return the run of another process that goes on; None if there is none, or its start was interrupted."""
        run = controls.run
        while run is not None and self._goes_on(run):
            if run.state is not RunState.STARTING:
                self._say(f"going on with reindex {run.generation}")
                return run
            if await self._pipeline.admin.now() - run.started_at > STARTING_S:
                return None
            await asyncio.sleep(STARTING_LOOK_S)
            run = (await self._pipeline.control_store.controls()).run
        return None

    def _look(self, report: RunReport) -> None:
        """Show a report; raise `AdminError` if the run is paused, or no worker takes part in it."""
        run, name = report.run, self._pipeline.name
        self._show(report)
        if run.is_paused:
            raise AdminError(
                f"reindex {run.generation} of {name} is paused; it goes on with keywise reindex resume {name}"
            )
        if report.is_unattended and report.quiet_s >= self._patience_s:
            raise AdminError(
                f"no worker has taken part in reindex {run.generation} of {name} for {report.quiet_s:.0f} s; start one "
                "with keywise run, and repeat this command to go on"
            )

    # The swap.

    async def _swap(self, watch: RunWatch, report: RunReport) -> RunReport:
        """Ask for the swap as soon as the gate allows it, and return the report after the swap.

        Until the patience ends, it asks the gate again after another pass, and requests a refused swap again.
        """
        until = self._pipeline.clock() + self._patience_s
        is_requested = report.run.swaps  # Another process, or an operator, may have requested it.
        while True:
            try:
                is_requested = is_requested or await self._request_swap(until)
            except AdminError:
                # Another process that follows this run may have requested the swap, or it has happened meanwhile.
                report = await watch.until_decided()
                if report.run.is_active:
                    raise
                return report
            if is_requested:
                report = await watch.until_decided()
                if not report.run.is_active or self._pipeline.clock() >= until:
                    return report
                is_requested = False
            await asyncio.sleep(GATE_LOOK_S)

    async def _request_swap(self, until: float) -> bool:
        """Request the swap if the gate is open; return whether it is.

        Raises `AdminError` if a line of the gate needs an operator, or the time is up.
        """
        self._say("looking at the gate")
        plan = self._plan
        gate = await self._reindex.verify(plan.sample_keys, accept_dead=plan.accept_dead, pause_max_s=plan.pause_max_s)
        if gate.is_refused or (not gate.is_open and self._pipeline.clock() >= until):
            raise AdminError(_refused_by(gate))
        if gate.is_open:
            await self._reindex.swap(plan.accept_dead, plan.pause_max_s, plan.sample_keys)
        return gate.is_open

    async def _result(self, run: ReindexRun | None, *, is_due: bool, **more: Any) -> FullResult:
        """Delete the targets that the plan does not keep, and return what was done."""
        old = await drop_old(self._pipeline, self._plan.keep) if self._plan.run.into else []
        for target in old:
            await self._admin.record("target dropped", detail=target)
        controls = await self._pipeline.control_store.controls()
        result = FullResult(run, is_due, controls.target, controls.spare, self._dropped + old)
        return replace(result, **more)


def _refused_by(gate: GateResult) -> str:
    run = gate.run
    causes = "; ".join(line.text for line in gate.failing)
    return f"the gate refuses {run.into} of reindex {run.generation}, and {run.live} stays live: {causes}"
