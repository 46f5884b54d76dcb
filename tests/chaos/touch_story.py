"""Every row of a DynamoDB table is touched again while the table throttles, rows change and workers are killed."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import keywise
from adapters.aws_credentials import CREDENTIALS
from chaos.fleet import pause
from keywise.core.clock import boot_time
from keywise.core.controls import RunState
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.shards import FOUND, GONE
from running import scaled
from servers.dynamodb import DynamoDbServer
from servers.dynamodb_faults import Asked, dynamodb_faults

PIPELINE = "records"
LOOK_S = 0.1
WRITES_AT_ONCE = 25
GENERATION = 456
"""The desired version of every row."""
SHARDS_OF_A_WORKER = 8
"""A worker that is killed holds no more shards than this."""
APP = """
ledger = "{ledger}"

[pipeline.records]
key = "id"
version = "version"
lease = "{lease}"
margin = "500ms"
horizon = "2s"
retry = {{ attempts = 3, backoff = "50ms", max = "500ms" }}
sources = ["{ledger}"]
sink = "dynamodb://{table}?touch=reindexVersion&region=us-east-1&endpoint={endpoint}"
origin = "dynamodb://{table}?segments={shards}&region=us-east-1&endpoint={endpoint}"
"""


class TouchPlan(msgspec.Struct, frozen=True, kw_only=True):
    shards: int = 100
    rows_per_shard: int = 150
    poisoned: int = 10
    """Rows without a version: they cannot be read, and become dead letters."""
    kills: int = 5
    every_s: float = 1.0
    workers: int = 3
    lease: str = "2s"
    throttle_every: int = 20
    edit_every: int = 100
    """One touch in so many finds that a live edit has just raised the version of its row."""
    seed: int = 0
    limit_s: float = 300.0

    @property
    def rows(self) -> int:
        return self.shards * self.rows_per_shard


class TouchTally(msgspec.Struct):
    """What happened, and what is wrong with it."""

    kills: int = 0
    throttled: int = 0
    edits: int = 0
    touches: int = 0
    """How often a row was to be touched; a touch that an edit has refused is repeated."""
    scans: int = 0
    """How often a shard was read from its beginning."""
    restarted: int = 0
    """How many of these shards had a page behind the first one read already."""
    stages: dict[str, int] = {}
    """How often the counts were looked at in each stage of the run."""
    dead_letters: int = 0
    untouched: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = {}
    faults: list[str] = []


async def play(
    folder: Path, server: DynamoDbServer, ledger: str, plan: TouchPlan, report: Callable[[RunReport, TouchTally], None]
) -> TouchTally:
    """Touch every row; return what happened."""
    tally, started = TouchTally(), boot_time()
    table = server.create_table(f"records{os.getpid()}x{random.SystemRandom().randrange(10**9)}")
    await asyncio.to_thread(_fill, server, table, plan)
    async with dynamodb_faults(server.url) as proxy:
        proxy.throttle_every, proxy.is_noting = plan.throttle_every, False
        proxy.before = _observed(server, table, plan, tally)
        path = folder / "pipeline.toml"
        text = APP.format(ledger=ledger, table=table, endpoint=proxy.url, shards=plan.shards, lease=plan.lease)
        path.write_text(text)
        async with _opened(path) as pipeline:
            generation = await _start(pipeline)
            await _kill_until_ended(folder, path, pipeline, plan, tally, report)
            await _judge(pipeline, server, table, plan, tally, generation)
        tally.throttled = proxy.throttled
    first_reads = plan.shards + tally.kills * SHARDS_OF_A_WORKER
    if tally.scans > first_reads:
        tally.faults.append(f"{tally.scans} shards were read from their beginning; {first_reads} are explained")
    if tally.restarted:
        tally.faults.append(f"{tally.restarted} shards were read from their beginning though they had come further")
    if tally.touches < plan.rows - plan.poisoned + tally.edits:
        tally.faults.append(f"{tally.touches} touches are too few for {tally.edits} that an edit has refused")
    tally.seconds = boot_time() - started
    return tally


def _fill(server: DynamoDbServer, table: str, plan: TouchPlan) -> None:
    items: list[dict[str, Any]] = []
    for number in range(plan.rows):
        item = {"id": {"S": f"record {number}"}, "title": {"S": f"Title {number}"}}
        items.append(item if number < plan.poisoned else item | {"version": {"N": "1"}})
    for start in range(0, len(items), WRITES_AT_ONCE):
        puts = [{"PutRequest": {"Item": item}} for item in items[start : start + WRITES_AT_ONCE]]
        server.ask("BatchWriteItem", RequestItems={table: puts})


def _observed(server: DynamoDbServer, table: str, plan: TouchPlan, tally: TouchTally) -> Callable[[str, Asked], None]:
    """Return what the proxy does before it passes a request on: it counts, and edits a row right before its touch."""
    begun = set[int]()

    def before(action: str, asked: Asked) -> None:
        # A worker that starts also looks whether the table is empty, and names no segment.
        is_page = action == "Scan" and "Segment" in asked
        if is_page and "ExclusiveStartKey" in asked:
            begun.add(asked["Segment"])
        elif is_page:
            tally.scans += 1
            tally.restarted += asked["Segment"] in begun
        if action != "UpdateItem":
            return
        tally.touches += 1
        if tally.touches % plan.edit_every == 0:
            tally.edits += 1
            server.ask(
                "UpdateItem",
                TableName=table,
                Key=asked["Key"],
                UpdateExpression="SET #v = #v + :one",
                ExpressionAttributeNames={"#v": "version"},
                ExpressionAttributeValues={":one": {"N": "1"}},
            )

    return before


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[OpenPipeline]:
    async with keywise.load(path).open(PIPELINE, work=False) as pipeline:
        yield pipeline


async def _start(pipeline: OpenPipeline) -> int:
    async with running_heartbeat(pipeline) as heartbeat:
        note = AuditNote("ada")
        claimer = AdminClaimer(pipeline, WaitBudget(pipeline, 60.0, lambda cause: None), heartbeat)
        admin = ReindexAdmin(PipelineAdmin(pipeline, note, claimer), note)
        started = await admin.start(RunPlan(generation=GENERATION))
        assert await admin.start(RunPlan(generation=GENERATION)) == started, "the same number is the same run"
        return started.generation


async def _kill_until_ended(
    folder: Path,
    path: Path,
    pipeline: OpenPipeline,
    plan: TouchPlan,
    tally: TouchTally,
    report: Callable[[RunReport, TouchTally], None],
) -> None:
    rng, give_up_at, kill_at = random.Random(plan.seed), boot_time() + scaled(plan.limit_s), boot_time()
    _, shards = require_origin(pipeline)
    workers = [await _worker(folder, path) for _ in range(plan.workers)]
    rows_read = 0
    try:
        while True:
            now = await report_run(pipeline, shards)
            assert now is not None
            tally.stages[now.run.state.value] = tally.stages.get(now.run.state.value, 0) + 1
            report(now, tally)
            if now.run.state is RunState.COMPLETE:
                break
            assert boot_time() < give_up_at, f"the run has not ended: {now}"
            if now.rows_read < rows_read or not _reconciles(now):
                tally.faults.append(
                    f"{now.run.state.value}: {now.counts} and {now.swept} do not reconcile, {rows_read} rows were read "
                    "before"
                )
            # A worker dies only after some progress: without it, all of them would die before they have begun.
            if now.rows_read > rows_read and tally.kills < plan.kills and boot_time() >= kill_at:
                victim = rng.randrange(len(workers))
                workers[victim].kill()
                await workers[victim].wait()
                workers[victim] = await _worker(folder, path)
                tally.kills += 1
                kill_at = boot_time() + rng.uniform(0.0, 2 * plan.every_s)
            rows_read = now.rows_read
            await asyncio.to_thread(pause, LOOK_S)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            if (status := await worker.wait()) != 0:
                tally.faults.append(f"a worker ended with {status}")
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def _worker(folder: Path, path: Path) -> asyncio.subprocess.Process:
    with (folder / "workers.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "keywise", "run", str(path), stdout=log, stderr=log, env=os.environ | CREDENTIALS
        )


async def _judge(
    pipeline: OpenPipeline, server: DynamoDbServer, table: str, plan: TouchPlan, tally: TouchTally, generation: int
) -> None:
    letters = await pipeline.admin.dead_letters(1000)
    tally.dead_letters = len({letter.body for _, _, letter in letters})
    if tally.dead_letters != plan.poisoned:
        causes = {letter.cause for _, _, letter in letters}
        tally.faults.append(f"{plan.poisoned} rows are poisoned, and {tally.dead_letters} are dead letters: {causes}")
    for item in await asyncio.to_thread(server.items, table):
        is_poisoned, touched = "version" not in item, item.get("reindexVersion", {}).get("N")
        if not is_poisoned and touched != str(generation):
            tally.untouched += 1
            tally.faults.append(f"{item['id']['S']} is at {touched}, and not at {generation}")
    _, shards = require_origin(pipeline)
    end = await report_run(pipeline, shards)
    assert end is not None
    tally.counts = dict(end.counts)
    if not _reconciles(end) or end.rows_read != plan.rows or end.counts.get("dead", 0) != plan.poisoned:
        tally.faults.append(f"{plan.rows} rows, of which {plan.poisoned} poisoned, do not reconcile with {end.counts}")


def _reconciles(report: RunReport) -> bool:
    """Whether every row that was read has ended somewhere, and in the end every one that the sweep has found."""
    swept = Counter(report.swept)
    looked_up = swept.pop(FOUND, 0) + swept.pop(GONE, 0)
    return report.reconciles and (report.run.is_active or looked_up == swept.total())
