"""One timed reindex in a fresh process: reads a table in Postgres, writes all rows, and checks what was written."""

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import msgspec

import keywise
from benchmarks import raw_reindex
from benchmarks.drain_postgres import vacuum
from keywise.adapters.http.client import HttpClient, Server
from keywise.core.events import Event, ReindexEnded, ReindexMoved, ShardAdvanced
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin
from keywise.reindex.plan import RunPlan

PIPELINE = "bench"
ROW_BYTES = 200
WAIT_S = 60.0
WRITTEN = "select count(*), count(*) filter (where version = (body::json ->> 'version')::bigint) from {table}"


class ReindexJob(msgspec.Struct, frozen=True):
    """What is read, and where it goes."""

    url: str
    """A Postgres database, empty at first, with the origin, the ledger and the queue."""
    rows: int
    opensearch: str = ""
    """The port of an engine, and an index there; the sink is a table in the database if there is none."""
    again: bool = False
    """The sink is full: every row is written once more."""

    @property
    def port(self) -> int:
        return int(self.opensearch.partition("/")[0])

    @property
    def index(self) -> str:
        return self.opensearch.partition("/")[2]

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        words = ["--url", self.url, "--rows", str(self.rows), "--opensearch", self.opensearch]
        return [*words, "--again"] if self.again else words


class Reindexed(msgspec.Struct, frozen=True):
    """How it went."""

    rows_per_s: float
    """Of the scan, from the first page to the last one."""
    cpu_us_per_row: float
    """Of the client, during the scan."""
    total_s: float
    """From its start to its end; for keywise with the sweep, and the looks of the worker for its next stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(REINDEXES))
    parser.add_argument("--url", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--opensearch", default="")
    parser.add_argument("--again", action="store_true")
    options = vars(parser.parse_args())
    reindex, job = REINDEXES[options.pop("what")], ReindexJob(**options)
    print(msgspec.json.encode(asyncio.run(reindex(job))).decode())


async def bare(job: ReindexJob) -> Reindexed:
    """One reader; each page is written before the next one is read."""
    await _prepare(job)
    reader, writer = await asyncpg.connect(job.url), await asyncpg.connect(job.url)
    await reader.execute(raw_reindex.PLANS)
    async with HttpClient(Server("http", "127.0.0.1", job.port if job.opensearch else 0)) as client:
        started, cpu = time.perf_counter(), time.process_time()
        if job.opensearch:
            rows = await raw_reindex.bulk(reader, client, job.index, again=job.again)
        else:
            rows = await raw_reindex.upsert(reader, writer, again=job.again)
        elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    await reader.close()
    await writer.close()
    assert rows == job.rows
    await _check(job, "pages")
    return Reindexed(rows / elapsed_s, 1e6 * cpu_s / rows, elapsed_s)


async def in_place(job: ReindexJob) -> Reindexed:
    """A complete run into the live target."""
    return await _run(job, RunPlan(), "pages")


async def beside(job: ReindexJob) -> Reindexed:
    """A run into a new table, up to its last row; the swap is another matter."""
    return await _run(job, RunPlan(into="pages_2"), "pages_2")


async def _run(job: ReindexJob, plan: RunPlan, table: str) -> Reindexed:
    await _prepare(job)
    app = keywise.App(job.url)
    sink = f"opensearch://127.0.0.1:{job.opensearch}" if job.opensearch else f"{job.url}?table=pages"
    pages = app.pipeline(PIPELINE, key="id", version="version")
    pages.source(job.url).origin(f"{job.url}?table=origin&key=id").sink(sink)
    clock = RunClock(job.rows, app.stop, waits_for_end=not plan.into)
    app.observers.append(clock)
    async with app:
        await _start(app, plan)
        await vacuum(job.url)
        await app.run(handle_signals=False)
    assert clock.rows == job.rows, f"{clock.rows} rows of {job.rows} were read"
    await _check(job, table)
    return Reindexed(job.rows / clock.scan_s, 1e6 * clock.cpu_s / job.rows, clock.total_s)


class RunClock:
    """An observer that measures a run from the worker's first look at it, and then ends the work."""

    def __init__(self, rows: int, stop: Callable[[], None], *, waits_for_end: bool) -> None:
        self.rows = 0
        self.scan_s = self.cpu_s = self.total_s = 0.0
        self._all, self._stop, self._waits_for_end = rows, stop, waits_for_end

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, ReindexMoved) and event.stage == "scanning":
            self._started, self._cpu = now, time.process_time()
        elif isinstance(event, ShardAdvanced):
            self.rows += event.page_rows
            if self.rows == self._all:
                self.scan_s = self.total_s = now - self._started
                self.cpu_s = time.process_time() - self._cpu
                if not self._waits_for_end:
                    self._stop()
        elif isinstance(event, ReindexEnded):
            self.total_s = now - self._started
            self._stop()


async def _start(app: keywise.App, plan: RunPlan) -> None:
    """Start a run as the command does."""
    async with app.open(PIPELINE, work=False) as pipeline, running_heartbeat(pipeline) as heartbeat:
        note = AuditNote("bench")
        claimer = AdminClaimer(pipeline, WaitBudget(pipeline, WAIT_S, lambda cause: None), heartbeat)
        await ReindexAdmin(PipelineAdmin(pipeline, note, claimer), note).start(plan)


async def _prepare(job: ReindexJob) -> None:
    """Make the origin, unless an earlier turn has, and let the server rest after it."""
    connection = await asyncpg.connect(job.url)
    try:
        if await connection.fetchval("select to_regclass('origin')") is None:
            await connection.execute(raw_reindex.TABLE.format(size=ROW_BYTES, rows=job.rows))
        await connection.execute(raw_reindex.TARGET)
        await connection.execute("vacuum analyze")
        await connection.execute("checkpoint")
    finally:
        await connection.close()


async def _check(job: ReindexJob, table: str) -> None:
    """Every row is there, at its own version."""
    if job.opensearch:
        found = right = await asyncio.to_thread(_documents, job)
    else:
        connection = await asyncpg.connect(job.url)
        found, right = await connection.fetchrow(WRITTEN.format(table=table))
        await connection.close()
    assert (found, right) == (job.rows, job.rows), f"of {job.rows} rows, {found} were written, and {right} are right"


def _documents(job: ReindexJob) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", job.port, timeout=WAIT_S)
    try:
        connection.request("POST", f"/{job.index}/_refresh")
        connection.getresponse().read()
        connection.request("GET", f"/{job.index}/_count")
        return int(json.loads(connection.getresponse().read())["count"])
    finally:
        connection.close()


REINDEXES: dict[str, Callable[[ReindexJob], Coroutine[Any, Any, Reindexed]]] = {
    "bare": bare,
    "in_place": in_place,
    "beside": beside,
}

if __name__ == "__main__":
    main()
