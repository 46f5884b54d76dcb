"""Factories for the plugs on Postgres: benches on a real server, under names that nobody else uses."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from adapters.benches import BAD, VISIBILITY_S
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.origin import PostgresOrigin, PostgresReadDatabase
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.postgres.source import PostgresSource
from keywise.core.entry import LedgerPolicy
from keywise.core.statements import OriginTable, UserTable
from keywise.testing.conformance import KeyKind, LedgerBench, OriginBench, SinkBench, SourceBench, UncheckedError
from keywise.testing.conformance.benches.postgres import KEY_COLUMNS, PostgresBenchDatabase, created_rows
from servers import shared

_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{next(_numbers)}"


@asynccontextmanager
async def two_openings() -> AsyncIterator[tuple[PostgresBenchDatabase, PostgresBenchDatabase]]:
    """One database, opened twice as two processes would."""
    url = shared.postgres().url
    async with PostgresBenchDatabase(url) as one, PostgresBenchDatabase(url) as other:
        yield one, other


@asynccontextmanager
async def connected() -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared.postgres().url)
    try:
        yield connection
    finally:
        await connection.close()


async def until_waiting(connection: Any, table: str) -> None:
    """Wait until a statement on this table waits for a lock."""
    while not await connection.fetchval(_WAITERS, table):
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


def advance_all(*databases: PostgresBenchDatabase):
    def advance(seconds: float) -> None:
        for database in databases:
            database.move_clock(seconds)

    return advance


@asynccontextmanager
async def postgres_source() -> AsyncIterator[SourceBench]:
    name = fresh("queue")
    async with two_openings() as (one, other), AsyncExitStack() as stack:
        # A queue on each side of the one under test, whose messages must stay out of it.
        for queue in (f"{name} before", name, f"{name} after"):
            source = await stack.enter_async_context(PostgresSource(one, queue, VISIBILITY_S))
            if queue != name:
                await source.send([b"of another queue"] * 3)
                await source.receive(1, 0.0)
        mine = await stack.enter_async_context(PostgresSource(one, name, VISIBILITY_S))
        again = await stack.enter_async_context(PostgresSource(other, name, VISIBILITY_S))
        yield SourceBench(source=mine, another=again, advance=advance_all(one, other), transaction=one.transaction)


@asynccontextmanager
async def postgres_ledger(policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
    name = fresh("scope")
    async with (
        two_openings() as (one, other),
        PostgresLedger(one, name, policy) as ledger,
        PostgresLedger(other, name, policy) as again,
    ):
        yield LedgerBench(ledger=ledger, another=again, advance=advance_all(one, other))


def postgres_sink(body: str, columns: tuple[str, ...] = ()):
    """A table that keeps the body in a column of this type, or fields of it in columns of their own."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        table = fresh("stock")
        async with AsyncExitStack() as stack:
            database, other = await stack.enter_async_context(two_openings())
            await database.write(
                f"create table {table} (key text primary key check (key != 'bad'), version bigint, "
                f"body {body}, text text)"
            )
            shown = "json_build_object('key', key, 'version', version, 'text', text)" if columns else "body"

            async def content() -> dict[str, bytes]:
                rows = await other.read(f"select key, {shown} from {table}")
                return {key: held if isinstance(held, bytes) else _compact(held) for key, held in rows}

            async def opened(database: PostgresBenchDatabase) -> SinkBench:
                ledger = await stack.enter_async_context(PostgresLedger(database, table, LedgerPolicy()))
                sink = await stack.enter_async_context(PostgresSink(database, UserTable(table, columns=columns)))
                return SinkBench(sink=sink, content=content, transaction=ledger.transaction, bad=BAD)

            bench = await opened(database)
            bench.another = await opened(other)
            yield bench

    return make


def postgres_origin(declared: str = "", body: str = ""):
    """A table whose key column is declared like that, or as usual; `body` is the type of a column with bodies."""

    @asynccontextmanager
    async def make(keys: KeyKind) -> AsyncIterator[OriginBench]:
        if declared and keys is not KeyKind.TEXT:
            raise UncheckedError("the column is declared for texts")
        table, url = fresh("truth"), shared.postgres().url
        async with connected() as connection:
            rows = await created_rows(connection, table, declared or KEY_COLUMNS[keys])
            if body:
                await connection.execute(_WITH_BODY.format(table=table, body=body, made=_MADE[body]))
            one, other = (
                PostgresOrigin(PostgresReadDatabase(url), OriginTable(table, body="body" if body else ""))
                for _ in range(2)
            )
            yield OriginBench(origin=one, another=other, rows=rows)

    return make


def _compact(text: str) -> bytes:
    """As the bench writes JSON, whatever spaces the server puts into it."""
    return msgspec.json.encode(msgspec.json.decode(text))


_MADE = {
    "json": "json_build_object('key', new.key::text, 'text', new.text)",
    "bytea": "convert_to(json_build_object('key', new.key::text, 'text', new.text)::text, 'UTF8')",
}
_WITH_BODY = """
    alter table {table} add body {body};
    create function {table}() returns trigger language plpgsql as $$ begin new.body := {made}; return new; end $$;
    create trigger made before insert or update on {table} for each row execute function {table}();
"""
_WAITERS = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%' || $1 || '%'"

SOURCES = {"postgres.source": {"postgres": postgres_source}}
ORIGINS = {
    "postgres.origin": {
        "postgres": postgres_origin(),
        "postgres in the order of a language": postgres_origin('text collate "en-x-icu" primary key'),
        "postgres with varchar": postgres_origin("varchar(9000) unique"),
        "postgres with json": postgres_origin(body="json"),
        "postgres with bytes": postgres_origin(body="bytea"),
    }
}
LEDGERS = {"postgres.ledger.ledger": {"postgres": postgres_ledger}}
SINKS = {
    "postgres.sink": {
        "postgres": postgres_sink("text"),
        "postgres with json": postgres_sink("json"),
        "postgres with bytes": postgres_sink("bytea"),
        "postgres with columns": postgres_sink("text", ("text",)),
    }
}
