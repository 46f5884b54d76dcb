"""Follows one run for a command that waits: until it has ended, its target has caught up, or a swap is decided."""

import asyncio
from collections.abc import Callable

from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.shards import ShardLedger

LOOK_S = 0.5
"""How often it looks at the run."""
SWAPPED = "target swapped"
"""What the history record of a swap is called, which the worker writes that has swapped."""
RECORDS = 100
"""How many of the newest history records are searched for that one."""
RECORD_S = 3.0
"""How long to wait for it: workers write the history about twice a second."""


class RunWatch:
    """Looks at one run again and again, and shows each report."""

    def __init__(
        self, pipeline: OpenPipeline, shards: ShardLedger, run: ReindexRun, show: Callable[[RunReport], None]
    ) -> None:
        self._pipeline = pipeline
        self._shards = shards
        self._run = run
        self._show = show

    async def until_built(self) -> RunReport:
        """Return the report of a run that has ended, or whose target has caught up with the live one once.

        Raises `AdminError` if the run needs the operator.
        """
        return await self._until(self._is_built)

    async def until_decided(self) -> RunReport:
        """Return the report of a run that was swapped in or cancelled, or whose swap was refused: see `refusal_of`."""
        return await self._until(lambda report: not (report.run.is_active and report.run.swaps))

    async def swap_record(self) -> str:
        """Return the history record of the swap, which says for how long changes waited; empty if there is none."""
        pipeline = self._pipeline
        if pipeline.settings.history == "none":
            return ""
        until = pipeline.clock() + RECORD_S
        while True:
            records = await pipeline.history_store.history("", RECORDS)
            if found := [one.detail for one in records if one.what == SWAPPED and one.at >= self._run.started_at]:
                return found[0]
            if pipeline.clock() >= until:
                return ""
            await asyncio.sleep(LOOK_S)

    def _is_built(self, report: RunReport) -> bool:
        run = report.run
        if run.is_active and report.gone:
            raise AdminError(consent_text(self._pipeline.name, report))
        return not run.is_active or (run.state is RunState.CATCHING_UP and report.catch_up.passes > 0)

    async def _until(self, holds: Callable[[RunReport], bool]) -> RunReport:
        while True:
            report = await report_run(self._pipeline, self._shards)
            assert report is not None, "a run that was started stays in the controls"
            run = report.run
            if (run.generation, run.is_rollback) != (self._run.generation, self._run.is_rollback):
                raise AdminError(
                    f"reindex {run.generation} has begun meanwhile; see keywise reindex status {self._pipeline.name}"
                )
            self._show(report)
            if holds(report):
                return report
            await asyncio.sleep(LOOK_S)


def consent_text(name: str, report: RunReport) -> str:
    """Return the text that asks the operator for consent to delete gone keys, with the commands for yes and no."""
    gone = f"{report.gone:,} key{'s' * (report.gone != 1)}"
    return (
        f"the origin does not have {gone} of the ledger, which is more than a run deletes by itself; to delete them, "
        f"run keywise reindex resume {name} --delete-max {report.gone}; to keep them, run keywise reindex cancel {name}"
    )


def refusal_of(name: str, report: RunReport) -> str:
    """Return why the target of a run is not live, and what to do; empty if it is."""
    run = report.run
    if run.state is RunState.COMPLETE:
        return ""
    if run.state is RunState.CANCELLED:
        return f"reindex {run.generation} of {name} was cancelled, and {run.live} stays live"
    causes = "; ".join(report.catch_up.refused) or "the run was changed meanwhile"
    return (
        f"the swap to {run.into} was refused, and {run.live} stays live: {causes}; when the cause is gone, run keywise "
        f"reindex swap {name}, or give it up with keywise reindex cancel {name}"
    )
