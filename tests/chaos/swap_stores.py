"""The stores of a hunt of swaps: each keeps a truth, and can tell everything that was written to its targets."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import msgspec
from aiohttp import web

from chaos.reindex_worker import PIPELINE
from chaos.swap_editor import Rows, key_of, rested
from chaos.swap_judge import Begun, Event, Moved, Written
from keywise.core.controls import Controls, controls_of
from servers.opensearch import OpenSearchServer
from servers.opensearch_recorder import Accepted, OpenSearchRecorder

NAME = "pages"
KEYS_MAX = 10_000
"""The most that one search returns."""
SINK_TIMEOUT_S = 3
"""How long a worker waits for an answer of OpenSearch."""


class ControlsNote(msgspec.Struct, frozen=True):
    """The controls as they were written at some time."""

    at: float
    controls: Controls
    differing: int | None
    """If a swap ended with this write: at how many keys the two scopes of the ledger differed then."""


class SwapStore(Rows, Protocol):
    """What a hunt needs of a store."""

    on: str
    ledger: str
    sink: str
    origin: str
    live: str
    """The target that is live at first."""

    async def create(self, keys: int) -> None:
        """Make the origin, with all keys at version 1."""

    async def watch(self) -> None:
        """Begin to note what is written. The sink and the ledger exist."""

    def target(self, number: int) -> str:
        """What the target of a run is called."""

    async def create_target(self, target: str) -> None:
        """Make an empty target that notes what is written to it, unless keywise makes it."""

    def begin(self) -> None:
        """Note that a run begins, unless the log says so."""

    async def history(self) -> Sequence[Event]: ...

    async def controls(self) -> Sequence[ControlsNote]: ...

    async def held(self) -> dict[str, int]:
        """The version of each key under the name; -1 where the body is of another version."""


class LogRow(msgspec.Struct, frozen=True, array_like=True):
    """A line of the log that triggers write."""

    op: str
    place: str
    key: str | None
    version: int | None
    detail: str | None
    at: float


def history_of(log: Iterable[LogRow], live: str) -> list[Event]:
    """What the triggers of tables have noted. A tombstone of a scope is one of the target that the scope describes."""
    history, other, beside, was_active = list[Event](), "", "", False
    for row in log:
        match row.op:
            case "write" | "delete":
                history.append(Written(row.place, row.key or "", row.version, row.op == "delete", row.at))
            case "tombstone" if row.place in (PIPELINE, other):
                target = live if row.place == PIPELINE else beside
                history.append(Written(target, row.key or "", row.version, deleted=True, at=row.at))
            case "live":
                history.append(Moved(row.place, row.at))
                live, beside = row.place, live
            case "controls":
                run = controls_of(row.detail or "{}").run
                if run is not None and run.is_beside and run.is_active:
                    other, beside = f"{PIPELINE}@{run.generation}", run.into
                    if not was_active:
                        history.append(Begun(row.at))
                was_active = run is not None and run.is_active
    return history


def controls_notes(log: Iterable[LogRow]) -> list[ControlsNote]:
    return [ControlsNote(row.at, controls_of(row.detail or "{}"), row.version) for row in log if row.op == "controls"]


# Postgres.

POSTGRES_TRUTH = 'create table truth (id text collate "C" primary key, version bigint not null, text text not null)'
POSTGRES_LOG = """
create table log (
    seq bigint generated always as identity, op text, place text, key text, version bigint, detail text,
    at double precision default extract(epoch from clock_timestamp())
);
create function note_row() returns trigger language plpgsql as $$ begin
    if tg_op = 'DELETE' then
        insert into log (op, place, key) values ('delete', tg_argv[0], old.key);
    else
        insert into log (op, place, key, version) values ('write', tg_argv[0], new.key, new.version);
    end if;
    return null;
end $$;
create function note_tombstone() returns trigger language plpgsql as $$ begin
    -- A claim and its renewals change the row of a tombstone too.
    if tg_op = 'INSERT' or (old.version, old.deleted) is distinct from (new.version, new.deleted) then
        insert into log (op, place, key, version)
        select 'tombstone', name, convert_from(new.key, 'utf8'), new.version from keywise_scopes where id = new.scope;
    end if;
    return null;
end $$;
create function note_live() returns trigger language plpgsql as $$ begin
    insert into log (op, place) values ('live', new.target);
    return null;
end $$;
create function calm_marks(wanted text, another text)
returns table (key bytea, era integer, version bigint, deleted boolean) language sql stable as $$
    select key, coalesce(era, 0), version, coalesce(deleted, false) from keywise_marks as marks
    where scope = (select id from keywise_scopes where name = wanted) and not exists (
        select from keywise_active as active where active.key = marks.key
        and active.scope in (select id from keywise_scopes where name in (wanted, another))
    )
$$;
create function note_controls() returns trigger language plpgsql as $$
declare
    other text := 'pages@' || coalesce(new.controls::json ->> 'spare_generation', '0');
    differing bigint;
begin
    if (new.controls::json ->> 'target_epoch') is distinct from (old.controls::json ->> 'target_epoch') then
        select count(*) into differing from (
            (select * from calm_marks('pages', other) except select * from calm_marks(other, 'pages'))
            union all
            (select * from calm_marks(other, 'pages') except select * from calm_marks('pages', other))
        ) as differences;
    end if;
    insert into log (op, place, version, detail) values ('controls', new.name, differing, new.controls);
    return null;
end $$;
create trigger buried after insert or update on keywise_marks for each row when (new.deleted)
    execute function note_tombstone();
create trigger moved after insert or update on keywise_targets for each row when (new.is_live)
    execute function note_live();
create trigger controlled after update on keywise_scopes for each row
    when (new.name = 'pages' and new.controls is distinct from old.controls) execute function note_controls();
"""
POSTGRES_NOTED = (
    "create trigger noted after insert or update or delete on {table} for each row execute function note_row('{label}')"
)
LOG_ROWS = "select op, place, key, version, detail, at from log order by seq"
UPSERT = (
    "insert into truth values ({marks}) on conflict (id) do update set version = excluded.version, text = excluded.text"
)


class PostgresRows:
    """A database with the origin, the queue and the ledger."""

    live = f"{NAME}_0"

    def __init__(self, url: str, pool: asyncpg.Pool) -> None:
        self.ledger = url
        self.origin = f"{url}?table=truth&key=id"
        self.pool: Any = pool

    async def create(self, keys: int) -> None:
        await self.pool.execute(POSTGRES_TRUTH)
        rows = [(key_of(number), 1, "v1") for number in range(1, keys + 1)]
        await self.pool.copy_records_to_table("truth", records=rows)
        await self.pool.execute("analyze truth")

    async def watch(self) -> None:
        await self.pool.execute(POSTGRES_LOG)

    async def put(self, key: str, version: int) -> None:
        await self.pool.execute(UPSERT.format(marks="$1, $2, $3"), key, version, f"v{version}")

    async def delete(self, key: str) -> None:
        await self.pool.execute("delete from truth where id = $1", key)

    def begin(self) -> None: ...

    async def log(self) -> list[LogRow]:
        return [msgspec.convert(list(row), LogRow) for row in await self.pool.fetch(LOG_ROWS, timeout=600)]

    async def controls(self) -> Sequence[ControlsNote]:
        return controls_notes(await self.log())


class PostgresTables(PostgresRows):
    """Targets are tables beside the ledger."""

    on = "postgres"

    def __init__(self, url: str, pool: asyncpg.Pool) -> None:
        super().__init__(url, pool)
        self.sink = f"{url}?table={NAME}"

    async def watch(self) -> None:
        await super().watch()
        await self.pool.execute(POSTGRES_NOTED.format(table=NAME, label=self.live))

    def target(self, number: int) -> str:
        return f"{NAME}_{number}"

    async def create_target(self, target: str) -> None:
        async with self.pool.acquire() as connection, connection.transaction():
            await connection.execute(f"create table {target} (like {NAME} including all)")
            await connection.execute(POSTGRES_NOTED.format(table=target, label=target))

    async def history(self) -> Sequence[Event]:
        return history_of(await self.log(), self.live)

    async def held(self) -> dict[str, int]:
        text = "case when body::json ->> 'text' = 'v' || version then version else -1 end"
        return dict(await self.pool.fetch(f"select key, {text} from {NAME}"))


@asynccontextmanager
async def postgres_tables(url: str) -> AsyncIterator[PostgresTables]:
    async with asyncpg.create_pool(url, min_size=1, max_size=8) as pool:
        yield PostgresTables(url, pool)


# SQLite.

SQLITE_LOG = """
create table log (
    seq integer primary key autoincrement, op text, place text, key text, version integer, detail text,
    at real default ((julianday('now') - 2440587.5) * 86400.0)
);
create trigger buried_first after insert on keywise_marks when new.deleted begin
    insert into log (op, place, key, version)
    select 'tombstone', name, new.key, new.version from keywise_scopes where id = new.scope;
end;
create trigger buried after update on keywise_marks
when new.deleted and (old.version, old.deleted) is not (new.version, new.deleted) begin
    insert into log (op, place, key, version)
    select 'tombstone', name, new.key, new.version from keywise_scopes where id = new.scope;
end;
create trigger moved_first after insert on keywise_targets when new.is_live begin
    insert into log (op, place) values ('live', new.target);
end;
create trigger moved after update on keywise_targets when new.is_live begin
    insert into log (op, place) values ('live', new.target);
end;
create view calm_marks as
    select keywise_scopes.name, key, era, version, deleted from keywise_marks as marks
    join keywise_scopes on keywise_scopes.id = scope
    where not exists (select 1 from keywise_active as active where active.key = marks.key);
create trigger controlled after update on keywise_scopes
when new.name = 'pages' and new.controls is not old.controls begin
    insert into log (op, place, detail, version) values ('controls', new.name, new.controls,
        iif(json_extract(new.controls, '$.target_epoch') is json_extract(old.controls, '$.target_epoch'), null,
            (select count(*) from (
                select key, era, version, deleted from calm_marks where name = 'pages' except
                select key, era, version, deleted from calm_marks
                where name = 'pages@' || json_extract(new.controls, '$.spare_generation')))
            + (select count(*) from (
                select key, era, version, deleted from calm_marks
                where name = 'pages@' || json_extract(new.controls, '$.spare_generation') except
                select key, era, version, deleted from calm_marks where name = 'pages'))));
end;
"""
SQLITE_NOTED = """
create trigger {label}_inserted after insert on {table} begin
    insert into log (op, place, key, version) values ('write', '{label}', new.key, new.version);
end;
create trigger {label}_updated after update on {table} begin
    insert into log (op, place, key, version) values ('write', '{label}', new.key, new.version);
end;
create trigger {label}_deleted after delete on {table} begin
    insert into log (op, place, key) values ('delete', '{label}', old.key);
end;
"""
LIVE_SQL = "select sql from sqlite_master where name = ?"


class SqliteTables:
    """One file with the origin, the queue, the ledger and the targets."""

    on = "sqlite"
    live = f"{NAME}_0"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = f"sqlite:///{path}"
        self.sink = f"{self.ledger}?table={NAME}"
        self.origin = f"{self.ledger}?table=truth&key=id"
        self._turn = asyncio.Lock()
        """One edit at a time waits for the file, or the editors would keep the workers from it."""

    async def create(self, keys: int) -> None:
        rows = [(key_of(number), 1, "v1") for number in range(1, keys + 1)]
        await self._write("create table truth (id text primary key, version integer not null, text text not null)")
        with closing(self._connect()) as connection, connection:
            connection.executemany("insert into truth values (?, ?, ?)", rows)

    async def watch(self) -> None:
        with closing(self._connect()) as connection:
            connection.executescript(SQLITE_LOG + SQLITE_NOTED.format(table=NAME, label=self.live))

    def target(self, number: int) -> str:
        return f"{NAME}_{number}"

    async def create_target(self, target: str) -> None:
        with closing(self._connect()) as connection:
            [(sql,)] = connection.execute(LIVE_SQL, (NAME,))
            # After a swap the name is in quotes.
            created = sql.replace(f'"{NAME}"', NAME).replace(NAME, target, 1)
            connection.executescript(f"begin immediate; {created};" + SQLITE_NOTED.format(table=target, label=target))
            connection.execute("commit")

    async def put(self, key: str, version: int) -> None:
        await self._write(UPSERT.format(marks="?, ?, ?"), key, version, f"v{version}")

    async def delete(self, key: str) -> None:
        await self._write("delete from truth where id = ?", key)

    async def log(self) -> list[LogRow]:
        return [msgspec.convert(row, LogRow) for row in self._read(LOG_ROWS)]

    async def history(self) -> Sequence[Event]:
        return history_of(await self.log(), self.live)

    async def controls(self) -> Sequence[ControlsNote]:
        return controls_notes(await self.log())

    def begin(self) -> None: ...

    async def held(self) -> dict[str, int]:
        text = "iif(json_extract(body, '$.text') = 'v' || version, version, -1)"
        return dict(self._read(f"select key, {text} from {NAME}"))

    def _read(self, statement: str) -> list[Any]:
        with closing(self._connect()) as connection:
            return connection.execute(statement).fetchall()

    async def _write(self, statement: str, *values: object) -> None:
        def act() -> None:
            with closing(self._connect()) as connection, connection:
                connection.execute(statement, values)

        async with self._turn:
            await asyncio.to_thread(act)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=120)
        connection.execute("pragma synchronous = off")
        return connection


# OpenSearch.


class SwapRecorder(OpenSearchRecorder):
    """A proxy that notes writes and moves of the name, and can deliver a move late, or keep its answer back."""

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self.late: list[int] = []
        """With which status late moves were answered."""
        self.held = 0
        """How many moves wait to be delivered."""
        self.is_late = False
        """Keep the next move from the server until `deliver`; its client gives up."""
        self.is_mute = False
        """Deliver the next move, and keep its answer."""
        self._delivery = asyncio.Event()
        self._history: list[list[tuple[int, Event]]] = [[]]
        """Writes with their numbers; a move or the start of a run begins another stretch of them."""
        self.on_accepted = self._note_accepted

    @property
    def history(self) -> list[Event]:
        """All events, the writes in the order of the engine."""
        return [event for stretch in self._history for _, event in sorted(stretch, key=itemgetter(0))]

    def begin(self, event: Begun | Moved) -> None:
        self._history.append([(-1, event)])

    def deliver(self) -> None:
        """Deliver what was held."""
        self._delivery.set()
        self._delivery = asyncio.Event()

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/_aliases":
            return await super().serve(request)
        actions = msgspec.json.decode(await request.read())["actions"]
        [*added] = [one["add"]["index"] for one in actions if "add" in one and one["add"]["alias"] == NAME]
        if not added:
            return await super().serve(request)
        is_late, is_mute = self.is_late, self.is_mute
        if is_late:
            self.is_late, self.held = False, self.held + 1
            await self._delivery.wait()
            self.held -= 1
        answer = await super().serve(request)
        if answer.status == 200:
            self.begin(Moved(added[0], time.time()))
        if is_late:
            self.late.append(answer.status)
        elif is_mute:
            self.is_mute = False
            await rested(asyncio.Event(), 2 * SINK_TIMEOUT_S)
        return answer

    def _note_accepted(self, one: Accepted) -> None:
        written = Written(one.index, one.key, one.version, one.deleted, time.time())
        self._history[-1].append((one.number, written))


class OpenSearchIndexes(PostgresRows):
    """Targets are indexes that an alias can stand for; the rest is in Postgres."""

    on = "opensearch"
    live = f"{NAME}-0"

    def __init__(self, url: str, pool: asyncpg.Pool, server: OpenSearchServer, recorder: SwapRecorder) -> None:
        super().__init__(url, pool)
        self.recorder = recorder
        self.sink = f"{recorder.url}/{NAME}?timeout={SINK_TIMEOUT_S}s"
        self._server = server

    async def create(self, keys: int) -> None:
        await super().create(keys)
        settings = {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": "500ms"}
        types = {"text": {"type": "text"}, "version": {"type": "long"}}
        body = {"aliases": {NAME: {}}, "settings": settings, "mappings": {"properties": types}}
        await self._ask("PUT", f"/{self.live}", body)

    def target(self, number: int) -> str:
        return f"{NAME}-{number}"

    async def create_target(self, target: str) -> None:
        """Keywise makes it like the live one."""

    def begin(self) -> None:
        self.recorder.begin(Begun(time.time()))

    async def history(self) -> Sequence[Event]:
        return self.recorder.history

    async def held(self) -> dict[str, int]:
        await self._ask("POST", f"/{NAME}/_refresh")
        found = await self._ask("POST", f"/{NAME}/_search", {"size": KEYS_MAX, "version": True})
        hits = found["hits"]["hits"]
        right = {hit["_id"]: hit["_source"]["text"] == f"v{hit['_version']}" for hit in hits}
        return {hit["_id"]: hit["_version"] if right[hit["_id"]] else -1 for hit in hits}

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        return await asyncio.to_thread(self._server.ask, method, path, body)


@asynccontextmanager
async def opensearch_indexes(url: str, server: OpenSearchServer) -> AsyncIterator[OpenSearchIndexes]:
    recorder = SwapRecorder(server.url)
    async with recorder.running(), asyncpg.create_pool(url, min_size=1, max_size=8) as pool:
        yield OpenSearchIndexes(url, pool, server, recorder)
