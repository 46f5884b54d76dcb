"""Kills workers of a reindex while rows are edited, and judges every write that the store has accepted."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from chaos.fleet import pause
from chaos.reindex_editor import FILL, TABLE, Editor
from chaos.reindex_fleet import ReindexCrew, notes_path
from chaos.reindex_judge import Truth, WriteJudge, judge_content, judge_marks
from chaos.reindex_worker import PAGE, PIPELINE, ReadPage, ReindexAssignment, app_of
from keywise.core.change import Order
from keywise.core.clock import boot_time
from keywise.core.controls import RunState
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, needs_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.shards import entries_of
from running import scaled
from servers.opensearch import OpenSearchServer
from servers.opensearch_recorder import OpenSearchRecorder, opensearch_recorder

SCRIPT = str(Path(__file__).with_name("reindex_worker.py"))
LOOK_S = 0.1
READ_AT_ONCE = 5000
INDEX = "pages"
LOG = """
create table log (
    seq bigint generated always as identity, key text, version bigint, op text,
    transaction bigint default txid_current()
);
create function note_write() returns trigger language plpgsql as $$ begin
    if tg_op = 'DELETE' then
        -- The version is that of the tombstone which is marked in the same transaction.
        insert into log (key, op) values (old.key, 'delete');
    else
        insert into log (key, version, op) values (new.key, new.version, 'write');
    end if;
    return null;
end $$;
create function note_tombstone() returns trigger language plpgsql as $$ begin
    insert into log (key, version, op) values (convert_from(new.key, 'utf8'), new.version, 'tombstone');
    return null;
end $$;
create trigger noted after insert or update or delete on pages for each row execute function note_write();
create trigger buried after insert or update on keywise_marks for each row when (new.deleted)
    execute function note_tombstone();
"""
WRITES = """
select key, version, op from log where op <> 'delete'
order by key, min(seq) over (partition by key, transaction), op = 'tombstone', seq
"""
"""What was written, key by key, the effects of a transaction before its mark, which may be written first."""


class ReindexHuntPlan(msgspec.Struct, frozen=True, kw_only=True):
    rows: int = 200_000
    row_bytes: int = 200
    shard_rows: int = 10_000
    workers: int = 4
    kills: int = 0
    """Kill so many at even distances of the run; 0: one each `every_s`, as long as it goes on."""
    every_s: float = 1.0
    updates_per_s: float = 500.0
    lease: str = "2s"
    margin: str = "500ms"
    seed: int = 0
    limit_s: float = 3600.0


class ReindexTally(msgspec.Struct):
    """What happened, and what is wrong with it."""

    on: str
    rows: int = 0
    kills: int = 0
    pages: int = 0
    rows_again: int = 0
    """Rows that were read again, because a worker was killed before their page had ended."""
    page_rows: int = 0
    """The most rows that one page had."""
    updates: int = 0
    writes: int = 0
    repeated: int = 0
    """Writes at the version that the store had already: most are rows of the run."""
    takeovers: int = 0
    postponed: int = 0
    dead_letters: int = 0
    fill_s: float = 0.0
    """How long the first run took, without kills and without edits."""
    run_s: float = 0.0
    counts: dict[str, int] = {}
    faults: list[str] = []


async def hunt_reindex(
    folder: Path,
    plan: ReindexHuntPlan,
    url: str,
    opensearch: OpenSearchServer | None = None,
    report: Callable[[ReindexTally, RunReport], None] = lambda tally, now: None,
) -> ReindexTally:
    """Fill the sink by a first run, and write all again by a second one, with kills and edits. `url` is an empty
    database, which has the queue, the ledger, the origin, and the sink if there is no OpenSearch."""
    tally = ReindexTally("postgres" if opensearch is None else "opensearch", rows=plan.rows)
    async with AsyncExitStack() as stack:
        store: TableStore | IndexStore
        if opensearch is None:
            store = TableStore(url)
        else:
            store = await stack.enter_async_context(_index_store(opensearch))
        assignments = [_assignment(url, store.url, folder, plan, number) for number in range(plan.workers + 1)]
        await _fill(url, plan)
        crew = ReindexCrew(folder, [(SCRIPT, _written(folder, one, n)) for n, one in enumerate(assignments[:-1])])
        stack.push_async_callback(crew.close)
        # What this process reads goes into notes of its own, which are not counted.
        app = await stack.enter_async_context(app_of(assignments[-1]))
        pipeline = await stack.enter_async_context(app.open(PIPELINE, work=False))
        await store.prepare()
        await crew.start()
        await _first_run(pipeline, crew, plan, tally, report)
        editor = Editor(app, url, plan.rows, plan.updates_per_s, plan.seed)
        generation = await _second_run(pipeline, crew, editor, plan, tally, report)
        await _finish(pipeline, crew)
        await _judge(pipeline, store, editor, tally, generation)
    tally.faults += crew.faults
    tally.takeovers = sum(line.startswith("tookover") for line in crew.notes)
    return tally


async def _first_run(
    pipeline: OpenPipeline,
    crew: ReindexCrew,
    plan: ReindexHuntPlan,
    tally: ReindexTally,
    report: Callable[[ReindexTally, RunReport], None],
) -> None:
    await _start(pipeline, plan)
    async for now in _looks(pipeline, plan):
        report(tally, now)
        tally.fill_s = now.seconds
    if again := _rows_again(_pages(crew.notes))[0]:
        tally.faults.append(f"{again} rows were read again, and no worker was killed")


async def _second_run(
    pipeline: OpenPipeline,
    crew: ReindexCrew,
    editor: Editor,
    plan: ReindexHuntPlan,
    tally: ReindexTally,
    report: Callable[[ReindexTally, RunReport], None],
) -> int:
    """Write every row again, with kills and edits; return the generation."""
    crew.forget()
    rng, kill_at = random.Random(plan.seed), 0.0
    editing = asyncio.create_task(editor.run())
    generation = await _start(pipeline, plan)
    async for now in _looks(pipeline, plan):
        if editing.done():
            break
        if not now.reconciles:
            tally.faults.append(f"the counts do not reconcile: {now.counts}")
        if _is_kill_due(plan, crew.kills, now, kill_at) and (able := crew.able()):
            kill_at = boot_time() + plan.every_s
            await crew.kill(rng.choice(able))
        tally.kills, tally.updates, tally.run_s, tally.counts = crew.kills, editor.sent, now.seconds, dict(now.counts)
        report(tally, now)
    editor.stop()
    await editing
    tally.updates, tally.postponed = editor.sent, tally.counts.get("postponed", 0)
    pages = _pages(crew.notes)
    tally.pages = len(pages)
    tally.rows_again, tally.page_rows = _rows_again(pages)
    return generation


def _is_kill_due(plan: ReindexHuntPlan, kills: int, now: RunReport, kill_at: float) -> bool:
    if now.run.state is not RunState.SCANNING or boot_time() < kill_at:
        return False
    return not plan.kills or (kills < plan.kills and now.rows_read >= plan.rows * (kills + 1) / (plan.kills + 2))


def _pages(notes: Iterable[str]) -> list[ReadPage]:
    return [msgspec.json.decode(line.removeprefix(PAGE), type=ReadPage) for line in notes if line.startswith(PAGE)]


def _rows_again(pages: Iterable[ReadPage]) -> tuple[int, int]:
    """How many rows were read more than once, and how many the largest page had."""
    by_start: dict[tuple[str, str], list[int]] = {}
    for page in pages:
        by_start.setdefault((page.shard, page.after), []).append(page.rows)
    again = sum(sum(sorted(rows)[:-1]) for rows in by_start.values())
    return again, max((max(rows) for rows in by_start.values()), default=0)


async def _start(pipeline: OpenPipeline, plan: ReindexHuntPlan) -> int:
    async with running_heartbeat(pipeline) as heartbeat:
        note = AuditNote("ada")
        claimer = AdminClaimer(pipeline, WaitBudget(pipeline, 60.0, lambda cause: None), heartbeat)
        admin = ReindexAdmin(PipelineAdmin(pipeline, note, claimer), note)
        # Edits that are under way may delete more keys from the origin than 1 % before their messages are read.
        return (await admin.start(RunPlan(shard_rows=plan.shard_rows, delete_max=plan.rows))).generation


async def _looks(pipeline: OpenPipeline, plan: ReindexHuntPlan) -> AsyncIterator[RunReport]:
    """Report the run again and again, until it is complete."""
    give_up_at = boot_time() + scaled(plan.limit_s)
    _, shards = needs_origin(pipeline)
    while True:
        now = await report_run(pipeline, shards)
        assert now is not None
        yield now
        if now.run.state is RunState.COMPLETE:
            return
        assert boot_time() < give_up_at, f"the run has not ended: {now}"
        await asyncio.to_thread(pause, LOOK_S)


async def _finish(pipeline: OpenPipeline, crew: ReindexCrew) -> None:
    """Wait until nothing is queued, held or suspect, and end the workers."""
    [(_, source)] = pipeline.sources
    async with asyncio.timeout(scaled(300.0)):
        while await source.depth() or (await pipeline.admin.counts()).suspects:
            await asyncio.to_thread(pause, LOOK_S)
    await crew.drain()


async def _judge(
    pipeline: OpenPipeline, store: "TableStore | IndexStore", editor: Editor, tally: ReindexTally, generation: int
) -> None:
    judge = WriteJudge()
    await store.replay(judge)
    tally.writes, tally.repeated = judge.writes, judge.repeated
    tally.faults += judge.faults
    tally.faults += judge_content(editor.truth, await store.held(editor.truth))
    marks: dict[str, tuple[Order | None, bool]] = {}
    async for key, entry in entries_of(pipeline.ledger):
        marks[key] = entry.mark, entry.deleted
    tally.faults += judge_marks(editor.truth, editor.edited, marks, generation)
    letters = await pipeline.admin.dead_letters(1000)
    tally.dead_letters = len(letters)
    tally.faults += [f"a dead letter: {letter.key}: {letter.cause}" for _, _, letter in letters[:5]]


class TableStore:
    """A table beside the ledger, with triggers that log every write and every tombstone."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}?table=pages&key=id"
        self._database_url = url

    async def prepare(self) -> None:
        connection = await asyncpg.connect(self._database_url)
        await connection.execute(
            LOG.replace("new.key, new.version", "new.id, new.version").replace("old.key", "old.id")
        )
        await connection.close()

    async def replay(self, judge: WriteJudge) -> None:
        connection = await asyncpg.connect(self._database_url)
        async with connection.transaction():
            async for key, version, op in connection.cursor(WRITES, prefetch=READ_AT_ONCE):
                judge.note(key, version, deleted=op == "tombstone")
        await connection.close()

    async def held(self, truth: Mapping[str, Truth]) -> dict[str, int]:
        connection = await asyncpg.connect(self._database_url)
        # A body that is not of its version counts as no version.
        rows = await connection.fetch(
            "select id, case when split_part(body::json ->> 'text', ' ', 1) = 'v' || version then version else -1 end "
            "from pages"
        )
        await connection.close()
        return dict(rows)


class IndexStore:
    """An index behind a proxy that notes every accepted write."""

    def __init__(self, server: OpenSearchServer, recorder: OpenSearchRecorder) -> None:
        self.url = f"{recorder.url}/{INDEX}"
        self._server = server
        self._recorder = recorder

    async def prepare(self) -> None:
        """The engine keeps no more of a deletion than it has to: the ledger has to remember it."""

    async def replay(self, judge: WriteJudge) -> None:
        for one in sorted(self._recorder.accepted, key=lambda one: one.number):
            judge.note(one.key, one.version, deleted=one.deleted)

    async def held(self, truth: Mapping[str, Truth]) -> dict[str, int]:
        return await asyncio.to_thread(self._held, list(truth))

    def _held(self, keys: Sequence[str]) -> dict[str, int]:
        held: dict[str, int] = {}
        for start in range(0, len(keys), READ_AT_ONCE):
            ids = keys[start : start + READ_AT_ONCE]
            documents = self._server.ask("POST", f"/{INDEX}/_mget?_source=text", {"ids": ids})["docs"]
            for one in documents:
                if one["found"]:
                    is_right = one["_source"]["text"].partition(" ")[0] == f"v{one['_version']}"
                    held[one["_id"]] = one["_version"] if is_right else -1
        self._server.ask("POST", f"/{INDEX}/_refresh")
        count = self._server.ask("GET", f"/{INDEX}/_count")["count"]
        assert count == len(held), f"the index has {count} documents, and {len(held)} of them have keys that were sent"
        return held


@asynccontextmanager
async def _index_store(server: OpenSearchServer) -> AsyncIterator[IndexStore]:
    server.index(INDEX, {"text": "text", "version": "long"}, gc_deletes="0ms", refresh_interval="200ms")
    async with opensearch_recorder(server.url) as recorder:
        yield IndexStore(server, recorder)


async def _fill(url: str, plan: ReindexHuntPlan) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(TABLE)
    await connection.execute(FILL.format(size=plan.row_bytes, rows=plan.rows))
    await connection.execute("analyze truth")
    await connection.close()


def _assignment(url: str, sink: str, folder: Path, plan: ReindexHuntPlan, number: int) -> ReindexAssignment:
    options: dict[str, Any] = {
        "lease": plan.lease,
        "margin": plan.margin,
        "poll": "100ms",
        "backoff": "50ms",
        "backoff_max": "1s",
        "repair": "200ms",
        "horizon": "2s",
        # A healthy change may be hit alone again and again, since here it is never the change that kills.
        "crashes_max": 50,
    }
    return ReindexAssignment(url, sink, f"{url}?table=truth&key=id", str(notes_path(folder, number)), options)


def _written(folder: Path, assignment: ReindexAssignment, number: int) -> str:
    path = folder / f"worker{number}.assignment"
    path.write_bytes(msgspec.json.encode(assignment))
    return str(path)
