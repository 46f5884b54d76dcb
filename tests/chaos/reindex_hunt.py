"""Kills workers of a reindex while rows are edited, and judges every write that the store has accepted."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from msgspec import structs

from chaos.fleet import pause
from chaos.reindex_editor import FILL, TABLE, Editor
from chaos.reindex_fleet import ReindexCrew, notes_path
from chaos.reindex_judge import Truth, WriteJudge, judge_content, judge_marks
from chaos.reindex_worker import PAGE, PIPELINE, ReadPage, ReindexAssignment, operator_app
from keywise.core.change import Order
from keywise.core.clock import boot_time
from keywise.core.controls import RunState
from keywise.core.errors import AdminError
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.shards import entries_of
from keywise.reindex.worker import SHARDS_AT_ONCE
from running import scaled
from servers.opensearch import OpenSearchServer
from servers.opensearch_recorder import OpenSearchRecorder, opensearch_recorder

SCRIPT = str(Path(__file__).with_name("reindex_worker.py"))
LOOK_S = 0.1
READ_AT_ONCE = 5000
BACKLOG_S = 4.0
"""The editor waits while the pipeline is so many seconds of updates behind."""
OPERATOR_LEASE_S = 60.0
ALONE, BESIDE, KILLED = PHASES = ("without a run", "beside a run", "beside a run with kills")
"""The phases of live updates."""
INDEX = "pages"
LOG = """
create table log (
    seq bigint generated always as identity, key text, version bigint, op text,
    transaction bigint default txid_current(),
    at double precision default extract(epoch from clock_timestamp())
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
    -- A claim and its renewals change the row of a tombstone too.
    if tg_op = 'INSERT' or (old.version, old.deleted) is distinct from (new.version, new.deleted) then
        insert into log (key, version, op) values (convert_from(new.key, 'utf8'), new.version, 'tombstone');
    end if;
    return null;
end $$;
create trigger noted after insert or update or delete on pages for each row execute function note_write();
create trigger buried after insert or update on keywise_marks for each row when (new.deleted)
    execute function note_tombstone();
"""
WRITES = """
select key, version, op, at from log where op <> 'delete'
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
    live_s: float = 0.0
    """Measure live updates for so long without a run, and then beside a run without kills."""
    lease_s: float = 2.0
    """A machine on which a page takes longer than a third of it needs a longer one."""
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
    rows_again_alive: int = 0
    """Rows that were read again though their worker lives: its lease had expired, or the rows did not end."""
    page_rows: int = 0
    """The most rows that one page had."""
    updates: int = 0
    """In the run with kills, and before it."""
    updates_per_s: dict[str, float] = {}
    """Of each phase; a machine that is too slow gets fewer than planned."""
    p99_s: dict[str, float] = {}
    """The live p99 of each phase."""
    writes: int = 0
    repeated: int = 0
    """Writes at the version that the store had already: most are rows of the run."""
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
    """Fill the sink by a first run, and write all again by another one, with kills and edits. `url` is an empty
    database, which has the queue, the ledger, the origin, and the sink if there is no OpenSearch."""
    async with AsyncExitStack() as stack:
        store: TableStore | IndexStore
        if opensearch is None:
            store = TableStore(url)
        else:
            store = await stack.enter_async_context(_index_store(opensearch))
        await _fill(url, plan)
        assignments = [_assignment(url, store.url, folder, plan, number) for number in range(plan.workers)]
        # This process has no claims to lose, and calls of the ledger take a third of a lease at the most.
        operator = structs.replace(plan, lease_s=OPERATOR_LEASE_S)
        app = await stack.enter_async_context(operator_app(_assignment(url, store.url, folder, operator, plan.workers)))
        pipeline = await stack.enter_async_context(app.open(PIPELINE, work=False))
        await store.prepare()
        crew = ReindexCrew(folder, [(SCRIPT, _written(folder, one, n)) for n, one in enumerate(assignments)])
        stack.push_async_callback(crew.close)
        await crew.start()
        editor = Editor(app, url, plan.rows, plan.updates_per_s, plan.seed)
        hunt = ReindexHunt(plan, pipeline, crew, editor, report)
        hunt.tally.on = "postgres" if opensearch is None else "opensearch"
        await hunt.run()
        await hunt.judge(store)
    return hunt.tally


class ReindexHunt:
    """One hunt: workers with their killer, an editor, and an operator who starts three runs."""

    def __init__(
        self,
        plan: ReindexHuntPlan,
        pipeline: OpenPipeline,
        crew: ReindexCrew,
        editor: Editor,
        report: Callable[[ReindexTally, RunReport], None],
    ) -> None:
        self.tally = ReindexTally("", plan.rows)
        self._plan, self._pipeline, self._crew, self._editor, self._report = plan, pipeline, crew, editor, report
        self._generation = 0
        """Of the last run."""
        self._phase: tuple[str, float, int] = "", 0.0, 0
        """The phase of live updates, when it began, and how many were sent by then."""
        _, self._shards = require_origin(pipeline)

    async def run(self) -> None:
        await self._start()
        async for now in self._looks():
            self.tally.fill_s = now.seconds
        async with asyncio.TaskGroup() as group:
            editing = group.create_task(self._editor.run())
            if self._plan.live_s:
                await self._measure()
            await self._kill_on()
            self._editor.stop()
            await editing
        await self._finish()

    async def _measure(self) -> None:
        """Let live updates flow without a run, and then beside one that is not disturbed and ends early."""
        self._begin(ALONE)
        until = boot_time() + self._plan.live_s
        while boot_time() < until:
            await self._look_at_queue()
        await self._start()
        self._begin(BESIDE)
        until = boot_time() + self._plan.live_s
        async for now in self._looks():
            if boot_time() >= until or now.run.state is not RunState.SCANNING:
                break
        self._begin("")
        if now.run.is_active:
            async with self._acting() as admin:
                await admin.cancel()

    async def _kill_on(self) -> None:
        """Write every row again while workers are killed."""
        plan, crew, tally = self._plan, self._crew, self.tally
        rng, kill_at = random.Random(plan.seed), 0.0
        crew.forget()
        await self._start()
        self._begin(KILLED)
        async for now in self._looks():
            if not now.reconciles:
                tally.faults.append(f"the counts do not reconcile: {now.counts}")
            if self._is_kill_due(now, kill_at) and (able := crew.able()):
                kill_at = boot_time() + plan.every_s
                await crew.kill(rng.choice(able))
            tally.kills, tally.updates = len(crew.killed), self._editor.sent
            tally.run_s, tally.counts = now.seconds, dict(now.counts)
        self._begin("")
        tally.updates, tally.postponed = self._editor.sent, tally.counts.get("postponed", 0)
        pages = [
            msgspec.json.decode(one.removeprefix(PAGE), type=ReadPage) for one in crew.notes if one.startswith(PAGE)
        ]
        tally.pages, tally.page_rows = len(pages), max(page.rows for page in pages)
        tally.rows_again, tally.rows_again_alive = rows_again(pages, frozenset(crew.killed))
        allowed = tally.kills * SHARDS_AT_ONCE * tally.page_rows
        if tally.rows_again > allowed:
            tally.faults.append(f"{tally.rows_again} rows were read again; {tally.kills} kills explain {allowed}")

    def _is_kill_due(self, now: RunReport, kill_at: float) -> bool:
        plan, kills = self._plan, len(self._crew.killed)
        if now.run.state is not RunState.SCANNING or boot_time() < kill_at:
            return False
        # Rows are deleted meanwhile, so fewer are read than there were; and the last kills have to be in time.
        return not plan.kills or (kills < plan.kills and now.rows_read >= 0.75 * plan.rows * (kills + 1) / plan.kills)

    def _begin(self, phase: str) -> None:
        """Begin a phase of live updates, and end the one before it."""
        before, since, sent = self._phase
        if before:
            self.tally.updates_per_s[before] = (self._editor.sent - sent) / (boot_time() - since)
        self._phase = phase, boot_time(), self._editor.sent
        self._editor.waits.phase = phase

    async def _start(self) -> None:
        # Edits that are under way may delete more keys from the origin than 1 % before their messages are read.
        plan = RunPlan(shard_rows=self._plan.shard_rows, delete_max=self._plan.rows)
        give_up_at = boot_time() + scaled(60.0)
        async with self._acting() as admin:
            while True:
                try:
                    self._generation = (await admin.start(plan)).generation
                    return
                except AdminError as error:
                    # The shards of a run that was cancelled a moment ago are held until their pages have ended.
                    assert "still holds" in str(error) and boot_time() < give_up_at, error
                await self._look_at_queue()

    @asynccontextmanager
    async def _acting(self) -> AsyncIterator[ReindexAdmin]:
        async with running_heartbeat(self._pipeline) as heartbeat:
            note = AuditNote("ada")
            claimer = AdminClaimer(self._pipeline, WaitBudget(self._pipeline, 60.0, lambda cause: None), heartbeat)
            yield ReindexAdmin(PipelineAdmin(self._pipeline, note, claimer), note)

    async def _looks(self) -> AsyncIterator[RunReport]:
        """Report the run again and again, until it is complete."""
        give_up_at = boot_time() + scaled(self._plan.limit_s)
        while True:
            now = await report_run(self._pipeline, self._shards)
            assert now is not None
            self._report(self.tally, now)
            yield now
            if now.run.state is RunState.COMPLETE:
                return
            assert boot_time() < give_up_at, f"the run has not ended: {now}"
            await self._look_at_queue()

    async def _look_at_queue(self) -> None:
        """Rest a moment, and hold the editor back if live updates queue up."""
        [(_, source)] = self._pipeline.sources
        self._editor.is_behind = (await source.depth() or 0) > BACKLOG_S * self._plan.updates_per_s
        await asyncio.to_thread(pause, LOOK_S)

    async def _finish(self) -> None:
        """Wait until nothing is queued, held or suspect, and end the workers."""
        [(_, source)] = self._pipeline.sources
        async with asyncio.timeout(scaled(300.0)):
            while await source.depth() or (await self._pipeline.admin.counts()).suspects:
                await asyncio.to_thread(pause, LOOK_S)
        await self._crew.drain()

    async def judge(self, store: "TableStore | IndexStore") -> None:
        editor, tally = self._editor, self.tally
        judge = WriteJudge(editor.waits)
        await store.replay(judge)
        tally.writes, tally.repeated = judge.writes, judge.repeated
        tally.faults += judge.faults
        tally.faults += judge_content(editor.truth, await store.held(editor.truth))
        marks: dict[str, tuple[Order | None, bool]] = {}
        async for key, entry in entries_of(self._pipeline.ledger):
            marks[key] = entry.mark, entry.deleted
        tally.faults += judge_marks(editor.truth, editor.edited, marks, self._generation)
        letters = await self._pipeline.admin.dead_letters(1000)
        tally.dead_letters = len(letters)
        tally.faults += [f"a dead letter: {letter.key}: {letter.cause}" for _, _, letter in letters[:5]]
        tally.faults += self._crew.faults
        tally.p99_s = {one: p99 for one in PHASES if (p99 := editor.waits.p99(one)) is not None}


def rows_again(pages: Iterable[ReadPage], killed: Collection[int]) -> tuple[int, int]:
    """How many rows were read again because their worker was killed, and how many although it lives."""
    by_start: dict[tuple[str, str], list[ReadPage]] = {}
    for page in pages:
        by_start.setdefault((page.shard, page.after), []).append(page)
    by_kill = otherwise = 0
    for same in by_start.values():
        rows, again = max(page.rows for page in same), len(same) - 1
        explained = min(again, sum(page.reader in killed for page in same))
        by_kill, otherwise = by_kill + explained * rows, otherwise + (again - explained) * rows
    return by_kill, otherwise


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
            async for key, version, op, at in connection.cursor(WRITES, prefetch=READ_AT_ONCE):
                judge.note(key, version, at, deleted=op == "tombstone")
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
            judge.note(one.key, one.version, one.at, deleted=one.deleted)

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
        "lease": f"{plan.lease_s:g}s",
        "margin": f"{plan.lease_s / 4:g}s",
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
