"""A shop whose table is written again from a catalogue, the origin of its pipeline; workers run in this process."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import keywise
from app.shop import QUICK, Shop
from keywise.core.controls import Controls, ReindexRun, RunState
from keywise.core.entry import Entry
from keywise.core.errors import UnavailableError
from keywise.core.origin import Page, Shard
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.shards import entries_of
from running import scaled

SOON = {"horizon": "200ms", "repair": "50ms", **QUICK}
ENDED = (RunState.COMPLETE, RunState.CANCELLED)
LIMIT_S = 30.0


def row(key: str, version: int, **more: Any) -> dict[str, Any]:
    """A row, which is a message too."""
    return {"key": key, "version": version, **more}


class Catalogue:
    """An origin in memory, in which a test changes rows and causes failures; pages are in the order of the keys."""

    is_consistent = True

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows: dict[str, Any] = {one["key"]: one for one in rows}
        self.hidden: set[str] = set()
        """Keys that no scan meets, as if they came behind the cursor."""
        self.scans: list[tuple[str, str, int]] = []
        """The shard, the cursor and the number of rows of each page that was read."""
        self.fetched: list[Sequence[str]] = []
        self.before_scan: Callable[[Shard, str], Awaitable[None]] = _nothing
        self.before_fetch: Callable[[Sequence[str]], Awaitable[None]] = _nothing

    def put(self, *rows: dict[str, Any]) -> None:
        self.rows |= {one["key"]: one for one in rows}

    def shards(self, size: int) -> list[Shard]:
        keys = sorted(self.rows)
        return [
            Shard(f"from {start}", str(start), len(keys[start : start + size])) for start in range(0, len(keys), size)
        ] or [Shard("none", "0", 0)]

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        """The bounds are the number of the first row; the cursor is the last key."""
        await self.before_scan(shard, after)
        start, count = int(shard.bounds), shard.rows or 0
        keys = sorted(self.rows)[start : start + count]
        left = [key for key in keys if key > after]
        page = [self.rows[key] for key in left[:limit] if key not in self.hidden]
        self.scans.append((shard.name, after, len(page)))
        return Page(page, left[:limit][-1] if left else after or "end", is_last=len(left) <= limit)

    async def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        await self.before_fetch(keys)
        self.fetched.append(list(keys))
        return {key: self.rows[key] for key in keys if key in self.rows}


async def _nothing(*_: object) -> None:
    pass


class Works(Shop):
    """The shop, its operator, and workers in this process."""

    def __init__(
        self, folder: Path, origin: Any, *, ledger: str = "", sink: str = "", handler: Any = None, **options: Any
    ) -> None:
        super().__init__(folder)
        if ledger:
            self.url = ledger
            self.app = keywise.App(ledger, observers=[self.events.append])
        route = {} if "read" in options else {"key": "key", "version": "version", "deleted": {"gone": [True]}}
        self.definition = self.app.pipeline("shop", **(route | SOON | options))
        self.definition.source(self.url).origin(origin)
        self.origin = origin
        if handler is None:
            self.definition.sink(sink or f"{self.url}?table=stock")
        else:
            self.definition.apply(handler)

    # The operator.

    @asynccontextmanager
    async def operated(self) -> AsyncIterator[tuple[PipelineAdmin, ReindexAdmin]]:
        async with self.opened() as pipeline, running_heartbeat(pipeline) as heartbeat:
            note = AuditNote("ada", "a test")
            admin = PipelineAdmin(
                pipeline, note, AdminClaimer(pipeline, WaitBudget(pipeline, 60.0, lambda cause: None), heartbeat)
            )
            yield admin, ReindexAdmin(admin, note)

    async def start(self, **plan: Any) -> ReindexRun:
        """Start a run. The origin forgets the pages that were read for its checks."""
        async with self.operated() as (_, reindex):
            started = await reindex.start(RunPlan(**plan))
        if isinstance(self.origin, Catalogue):
            self.origin.scans.clear()
        return started

    async def pause(self) -> ReindexRun:
        async with self.operated() as (_, reindex):
            return await reindex.pause()

    async def resume(self, delete_max: int | None = None) -> ReindexRun:
        async with self.operated() as (_, reindex):
            return await reindex.resume(delete_max)

    async def cancel(self) -> ReindexRun:
        async with self.operated() as (_, reindex):
            return await reindex.cancel()

    async def remove(self, *keys: str) -> None:
        async with self.operated() as (admin, _):
            for key in keys:
                await admin.remove(key)

    async def controls(self) -> Controls:
        async with self.opened() as pipeline:
            return await pipeline.control_store.controls()

    async def report(self) -> RunReport:
        async with self.opened() as pipeline:
            return await report_of(pipeline)

    async def shard_entries(self) -> dict[str, Entry]:
        async with self.opened() as pipeline:
            _, shards = require_origin(pipeline)
            return {key: entry async for key, entry in shards.entries()}

    async def marks(self) -> dict[str, Any]:
        """The mark of every key that the ledger knows."""
        async with self.opened() as pipeline:
            return {key: entry.mark async for key, entry in entries_of(pipeline.ledger)}

    # Workers.

    async def handles(self, *bodies: dict[str, Any]) -> None:
        await self.app.send("shop", *bodies)
        await self.work_until_empty(limit_s=LIMIT_S)

    async def runs(self, *, limit_s: float = LIMIT_S, **plan: Any) -> RunReport:
        """Start a run and work until it has ended."""
        await self.start(**plan)
        return await self.work_until_ended(limit_s=limit_s)

    async def work_until_ended(self, *, limit_s: float = LIMIT_S) -> RunReport:
        """Work until no run goes on, or until the run waits for the operator."""
        async with self.working(limit_s=limit_s) as works:
            return await works.until_ended()

    @asynccontextmanager
    async def working(self, *, limit_s: float = LIMIT_S) -> AsyncIterator["Working"]:
        """Let the app run while the test acts, and drain at the end."""
        running = asyncio.create_task(self.app.run(handle_signals=False))
        async with AsyncExitStack() as stack:
            pipeline = await stack.enter_async_context(self.opened())
            try:
                async with asyncio.timeout(scaled(limit_s)):
                    yield Working(pipeline, running)
            finally:
                while not running.done():
                    self.app.stop()
                    await asyncio.wait([running], timeout=0.05)
        await running


class Working:
    """A running app, beside which a test acts and looks."""

    def __init__(self, pipeline: OpenPipeline, running: asyncio.Task[None]) -> None:
        self.pipeline = pipeline
        self._running = running

    async def until(self, done: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
        """Wait for a condition; the limit is that of the block."""
        while not self._running.done():
            found = done()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.wait([self._running], timeout=0.01)
        await self._running
        raise AssertionError("the app has ended")

    async def until_ended(self) -> RunReport:
        async def is_over() -> bool:
            report = await report_of(self.pipeline)
            return not report.run.is_active or bool(report.gone)

        await self.until(is_over)
        return await report_of(self.pipeline)

    async def until_empty(self) -> None:
        [(_, source)] = self.pipeline.sources

        async def is_empty() -> bool:
            return await source.depth() == 0

        await self.until(is_empty)


async def report_of(pipeline: OpenPipeline) -> RunReport:
    _, shards = require_origin(pipeline)
    report = await report_run(pipeline, shards)
    assert report is not None, "there was a run"
    return report


class Away:
    """An origin's `before_scan` or `before_fetch` that fails so many times, and then works."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.left = times
        self._error = error or UnavailableError("away")

    async def __call__(self, *_: object) -> None:
        if self.left > 0:
            self.left -= 1
            raise self._error


def sqlite_rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(statement).fetchall()


def bodies_of(file: Path) -> dict[str, dict[str, Any]]:
    """What the table of the shop holds, by key."""
    return {key: json.loads(body) for key, body in sqlite_rows(file, "select key, body from stock")}
