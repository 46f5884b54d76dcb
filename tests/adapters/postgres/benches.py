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
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.postgres.source import PostgresSource
from keywise.core.entry import LedgerPolicy
from keywise.core.statements import UserTable
from keywise.testing.conformance import LedgerBench, SinkBench, SourceBench
from keywise.testing.conformance.benches.postgres import PostgresBenchDatabase
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
        async with two_openings() as (database, other), PostgresLedger(database, table, LedgerPolicy()) as ledger:
            await database.write(
                f"create table {table} (key text primary key check (key != 'bad'), version bigint, "
                f"body {body}, text text)"
            )
            shown = "json_build_object('key', key, 'version', version, 'text', text)" if columns else "body"

            async def content() -> dict[str, bytes]:
                rows = await other.read(f"select key, {shown} from {table}")
                return {key: held if isinstance(held, bytes) else _compact(held) for key, held in rows}

            async with PostgresSink(database, UserTable(table, columns=columns)) as sink:
                yield SinkBench(sink=sink, content=content, transaction=ledger.transaction, bad=BAD)

    return make


def _compact(text: str) -> bytes:
    """As the bench writes JSON, whatever spaces the server puts into it."""
    return msgspec.json.encode(msgspec.json.decode(text))


_WAITERS = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%' || $1 || '%'"

SOURCES = {"postgres.source": {"postgres": postgres_source}}
LEDGERS = {"postgres.ledger.ledger": {"postgres": postgres_ledger}}
SINKS = {
    "postgres.sink": {
        "postgres": postgres_sink("text"),
        "postgres with json": postgres_sink("json"),
        "postgres with bytes": postgres_sink("bytea"),
        "postgres with columns": postgres_sink("text", ("text",)),
    }
}
