"""Background jobs of a consumer: flush the reporters, trim the history, prune the ledger."""

import asyncio
from contextlib import suppress

from keywise.core import events
from keywise.core.errors import UnavailableError
from keywise.flow.pipeline import OpenPipeline

FLUSH_S = 0.5


class Maintenance:
    """Runs the background jobs of one pipeline.

    Every consumer flushes its own reporters. Trimming and pruning are done by one consumer per interval.
    """

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._pipeline = pipeline
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Flush the reporters once more, and end."""
        self._stop.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            trimming = group.create_task(self._trim_and_prune())
            await self._report()
            trimming.cancel()

    async def _report(self) -> None:
        pipeline = self._pipeline
        if not pipeline.reporters:
            await self._stop.wait()
        while not self._stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._stop.wait()
            for reporter in pipeline.reporters:
                for event in reporter.due(pipeline.name, pipeline.clock()):
                    pipeline.emit(event)
                # The reporter keeps its records for the next flush. Other calls report the outage.
                with suppress(UnavailableError):
                    await reporter.flush(pipeline.history_store, pipeline.admin, is_last=self._stop.is_set())

    async def _trim_and_prune(self) -> None:
        pipeline, every_s = self._pipeline, self._pipeline.settings.maintenance_s
        while True:
            try:
                await self._trim_history()
                await self._prune()
                pipeline.report_answer("maintenance")
            except UnavailableError as error:
                pipeline.count_unavailable("maintenance", error, every_s)
            await asyncio.sleep(every_s)

    async def _trim_history(self) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        if await pipeline.control_store.acquire("trim history", settings.maintenance_s):
            await pipeline.history_store.trim(settings.history_age_s, settings.history_lines_max)

    async def _prune(self) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        if settings.retention_s is None or not await pipeline.control_store.acquire("prune", settings.maintenance_s):
            return
        if (await pipeline.control_store.controls()).run_beside is not None:
            # A pass compares the marks of both targets: a key that one of them forgets would look like a new one.
            return
        keys = await pipeline.ledger.prune(settings.retention_s)
        if keys:
            pipeline.emit(events.Pruned(pipeline=pipeline.name, keys=keys))
