"""A pipeline whose target is built beside the live one: rows of the test's own, a worker, and the operator's acts."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import keywise
from keywise.core.controls import Controls, ReindexRun, RunState
from keywise.core.events import Event
from keywise.core.origin import Page, Shard
from keywise.core.sink import ReadableSink
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.catch_up_stage import CatchUpStage
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import report_run

LOOK_S = 0.02
SETTINGS = {"lease": "2s", "margin": "500ms", "horizon": "300ms", "repair": "100ms", "maintenance": "1s"}


class Rows:
    """The source of truth, in memory. The worker and the commands see the same rows."""

    is_consistent = True

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows = {key: row(key, version) for key, version in rows.items()}
        self.page_rows = 1000
        """No page has more rows."""
        self.before_page: Callable[[str], Awaitable[None]] = _nothing
        """Called with the cursor of a page, before it is read."""
        self.before_fetch: Callable[[Sequence[str]], Awaitable[None]] = _nothing
        """Called with the keys, before they are fetched."""

    def put(self, key: str, version: int, **fields: Any) -> dict[str, Any]:
        self.rows[key] = row(key, version, **fields)
        return self.rows[key]

    async def shards(self, size: int) -> list[Shard]:
        return [Shard("all")]

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        await self.before_page(after)
        keys = sorted(key for key in self.rows if key > after)
        some = keys[: min(limit, self.page_rows)]
        return Page([self.rows[key] for key in some], some[-1] if some else "end", len(some) == len(keys))

    async def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        await self.before_fetch(keys)
        return {key: self.rows[key] for key in keys if key in self.rows}


async def _nothing(_: object) -> None:
    pass


class Catalogue:
    """An app with one pipeline, the events of its worker, and what an operator does with it."""

    def __init__(self, ledger: str, sink: str, rows: Mapping[str, int], **settings: Any) -> None:
        self.origin = Rows(rows)
        self.events: list[Event] = []
        self._ledger, self._sink = ledger, sink
        self._settings = {**SETTINGS, **settings}
        self.app = self.new_app(observers=[self.events.append])
        self._working: asyncio.Task[None] | None = None

    def new_app(self, observers: Sequence[Callable[[Event], None]] = ()) -> keywise.App:
        """An app as another process has it."""
        app = keywise.App(self._ledger, observers=observers)
        pages = app.pipeline("pages", key="id", version="v", deleted={"gone": [True]}, **self._settings)
        pages.source(self._ledger).sink(self._sink).origin(self.origin)
        return app

    async def change(self, key: str, version: int, **fields: Any) -> None:
        """Change a row, and announce it."""
        await self.app.send("pages", self.origin.put(key, version, **fields))

    async def delete(self, key: str, version: int) -> None:
        self.origin.rows.pop(key, None)
        await self.app.send("pages", row(key, version, gone=True))

    async def remove(self, *keys: str) -> None:
        """Remove keys as an operator does: their rows stay."""
        async with self.acting() as admin:
            for key in keys:
                await admin._admin.remove(key)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """A worker runs meanwhile."""
        async with self.app:
            self._working = asyncio.create_task(self.app.run(handle_signals=False))
            try:
                yield
            finally:
                self.app.stop()
                await self._working

    @asynccontextmanager
    async def acting(self) -> AsyncIterator[ReindexAdmin]:
        """The operator's acts, in an app of their own, as in a command."""
        app = self.new_app()
        async with app, app.open("pages", check_origin=False) as pipeline, running_heartbeat(pipeline) as heartbeat:
            note = AuditNote("tester", "a test")
            claimer = AdminClaimer(pipeline, WaitBudget(pipeline, 10, lambda text: None), heartbeat)
            pipeline.observers, pipeline.reporters = (), ()
            yield ReindexAdmin(PipelineAdmin(pipeline, note, claimer), note)

    async def build(self, into: str, **plan: Any) -> None:
        """Build a target until it catches up."""
        async with self.acting() as admin:
            await admin.start(RunPlan(into=into, is_checked=False, **plan))
            await self.until(admin.pipeline, lambda controls: run_of(controls).state is RunState.CATCHING_UP)

    async def swap(self, **options: Any) -> Controls:
        """Ask for a swap, and wait until it has ended or was refused; return the controls then."""
        async with self.acting() as admin:
            await admin.swap(**options)
            return await self.until(admin.pipeline, lambda controls: not run_of(controls).swaps)

    async def causes(self, admin: ReindexAdmin) -> Sequence[str]:
        """Wait until it is stored why the last swap was refused or called off; return the causes."""
        while True:
            report = await report_run(admin.pipeline, admin._shards)
            if report is not None and report.catch_up.refused:
                return report.catch_up.refused
            await self._look()

    async def roll_back(self) -> Controls:
        async with self.acting() as admin:
            await admin.rollback()
            return await self.until(admin.pipeline, lambda controls: not run_of(controls).swaps)

    async def run_late(self, run: ReindexRun) -> None:
        """Let another worker take part in a run as it has seen it some time ago, for one pass."""
        async with self.acting() as admin:
            pipeline = admin.pipeline
            assert pipeline.origin is not None and pipeline.open_target is not None
            _, shards = require_origin(pipeline)
            looks = itertools.count()
            async with pipeline.open_target(run.into, run.generation) as other:
                work = CatchUpStage(pipeline, other, pipeline.origin, shards, run)
                await work.run(lambda: next(looks) > 0)

    async def until(self, pipeline: OpenPipeline, holds: Callable[[Controls], bool]) -> Controls:
        while True:
            if holds(controls := await pipeline.control_store.controls()):
                return controls
            await self._look()

    async def content(self) -> dict[str, int | None]:
        """What the live target holds: the version of each key that was ever a row."""
        async with self.acting() as admin:
            sink = admin.pipeline.sink
            assert isinstance(sink, ReadableSink)
            return {key: one.version for key, one in sorted((await sink.read(self._keys())).items())}

    async def until_settled(self, key: str, version: int) -> None:
        """Wait until the ledger has this version of a key as its mark."""
        async with self.acting() as admin:
            while True:
                entry = await admin.pipeline.admin.inspect(key)
                if entry is not None and entry.mark is not None and entry.mark[1] >= version and not entry.token:
                    return
                await self._look()

    async def until_empty(self) -> None:
        """Wait until every message has ended."""
        async with self.acting() as admin:
            [(_, source)] = admin.pipeline.sources
            while await source.depth():
                await self._look()

    async def _look(self) -> None:
        """Let the worker go on for a moment; raise what has ended it."""
        assert self._working is not None, "only a worker brings about what is waited for"
        if self._working.done():
            raise AssertionError("the worker has ended") from self._working.exception()
        await asyncio.wait([self._working], timeout=LOOK_S)

    def _keys(self) -> list[str]:
        return [f"k{number}" for number in range(200)] + list(self.origin.rows)


def row(key: str, version: int, **fields: Any) -> dict[str, Any]:
    return {"id": key, "v": version, "text": f"{key} at {version}", **fields}


def run_of(controls: Controls) -> ReindexRun:
    assert controls.run is not None
    return controls.run
