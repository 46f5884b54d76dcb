"""The bench of the PostgreSQL adapters: it moves the clock of a database, and removes names."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from keywise.adapters.postgres.database import LOST, PostgresDatabase, closed_after_error, database_url, postgres_errors
from keywise.core.url import Address, redacted
from keywise.testing.conformance.origins import KeyKind, RowWriter
from keywise.testing.conformance.promise import UncheckedError

TABLES = {
    "queue": ("keywise_ready", "keywise_held"),
    "scope": (
        *("keywise_marks", "keywise_active", "keywise_rates", "keywise_periodic_locks"),
        *("keywise_letters", "keywise_lines"),
    ),
    "function": (
        *("keywise_turn_owners", "keywise_turn_keys", "keywise_turn_work"),
        *("keywise_turn_completed", "keywise_turn_switches"),
    ),
}
"""The tables with the rows of a queue, of a scope, and of a serial function."""


class PostgresBench:
    """The bench of `postgresql:` URLs."""

    async def prepare(self, address: Address, role: str) -> None:
        url = database_url(address, dict(address._options))
        address._shared.setdefault((PostgresDatabase, url), PostgresBenchDatabase(url))

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for database in {id(one.database): one.database for one in adapters}.values():
            if not isinstance(database, PostgresBenchDatabase):
                raise UncheckedError(f"{database.name} was opened without a clock that can be moved")
            database.move_clock(seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        await remove_name(adapter.database, name)

    @asynccontextmanager
    async def rows(self, address: Address, keys: KeyKind) -> AsyncIterator[RowWriter]:
        url = database_url(address, dict(address._options))
        with postgres_errors(redacted(url), at_start=True):
            connection = await asyncpg.connect(url)
        try:
            yield await created_rows(connection, address.name, KEY_COLUMNS[keys])
        finally:
            await connection.execute(f"drop table if exists {_quoted(address.name)}")
            await connection.close()


KEY_COLUMNS = {
    KeyKind.TEXT: "text primary key",
    KeyKind.INTEGER: "bigint primary key",
    KeyKind.NOT_UNIQUE: "text",
}


class PostgresRows:
    """Writes the rows of a table, each call in a transaction of its own."""

    def __init__(self, connection: Any, table: str, kind: str) -> None:
        self._connection = connection
        self._table = table
        self._kind = kind

    async def put(self, texts: Mapping[str, str]) -> None:
        statement = (
            f"insert into {self._table} select k::{self._kind}, t from unnest($1::text[], $2::text[]) as row (k, t) "  # noqa: S608
            "on conflict (key) do update set text = excluded.text"
        )
        await self._connection.execute(statement, list(texts), list(texts.values()))

    async def delete(self, keys: Sequence[str]) -> None:
        statement = f"delete from {self._table} where key = any($1::text[]::{self._kind}[])"  # noqa: S608
        await self._connection.execute(statement, list(keys))


async def created_rows(connection: Any, name: str, key: str) -> PostgresRows:
    """Create a table; `key` is the declaration of its key column, which begins with a type of one word."""
    await connection.execute(f"create table {_quoted(name)} (key {key}, text text)")
    return PostgresRows(connection, _quoted(name), key.partition(" ")[0])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class PostgresBenchDatabase(PostgresDatabase):
    """A database with a clock that can be moved while it is open.

    A schema holds a function `clock_timestamp()`, which the connections find before the server's.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._schema = f"check_clock_{secrets.token_hex(8)}"
        self._is_movable = False
        self._mover: Any = None
        """A connection in a thread of its own, because `move_clock` cannot await."""
        self._thread: ThreadPoolExecutor | None = None
        self._runner = asyncio.Runner()

    def move_clock(self, seconds: float) -> None:
        if not self._is_movable:
            raise UncheckedError(f"{self.name}: this user may not create a schema, so the clock cannot be moved")
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="keywise-check-clock")
        self._thread.submit(self._runner.run, self._move(seconds)).result()

    async def _move(self, seconds: float) -> None:
        self._mover = self._mover or await super()._connect(self._url)
        await self._mover.execute(f"update {self._schema}.clock set ahead_s = ahead_s + $1", seconds)  # noqa: S608

    async def _connect(self, url: str, **options: Any) -> Any:
        connection = await super()._connect(url, **options)
        async with closed_after_error(connection):
            await connection.execute(_SEE_CLOCK, self._schema)
        return connection

    async def _open(self) -> None:
        # This writes times of the server's clock, because the one that can be moved does not exist yet.
        await super()._open()
        with postgres_errors(self.name, at_start=True):
            connection = await super()._connect(self._url)
            try:
                await connection.execute(_CLOCK.format(schema=self._schema))
                self._is_movable = True
            except asyncpg.InsufficientPrivilegeError:
                self._is_movable = False
            finally:
                await connection.close()

    async def _close(self) -> None:
        await super()._close()
        if self._thread is not None:
            self._thread.submit(self._stop).result()
            self._thread.shutdown()
            self._thread, self._runner = None, asyncio.Runner()
        # If the server is gone by now, an unused schema stays there.
        with suppress(*LOST):
            connection = await super()._connect(self._url)
            await connection.execute(f"drop schema if exists {self._schema} cascade")
            await connection.close()

    def _stop(self) -> None:
        if self._mover is not None:
            self._mover.terminate()
            self._mover = None
        self._runner.close()


async def remove_name(database: PostgresDatabase, name: str) -> None:
    """Remove everything that is stored under one name: a queue, a scope, a serial function and a table."""
    async with database.transaction() as connection:
        with postgres_errors(database.name):
            for kind, tables in TABLES.items():
                for table in tables:
                    which = f"{kind} in (select id from keywise_{kind}s where name = $1)"  # noqa: S608 - our own tables
                    await connection.execute(f"delete from {table} where {which}", name)  # noqa: S608
                await connection.execute(f"delete from keywise_{kind}s where name = $1", name)  # noqa: S608
            await connection.execute("delete from keywise_targets where name = $1", name)
            await connection.execute(f"drop table if exists {_quoted(name)}")


_CLOCK = """
create schema {schema};
create unlogged table {schema}.clock (ahead_s double precision not null);
insert into {schema}.clock values (0);
create function {schema}.clock_timestamp() returns timestamptz language sql as $$
    select pg_catalog.clock_timestamp() + make_interval(secs => ahead_s) from {schema}.clock
$$;
"""
# After the user's schemas, so that tables are still created in the first of these.
_SEE_CLOCK = (
    "select set_config('search_path', "
    "concat_ws(', ', nullif(current_setting('search_path'), ''), $1::text, 'pg_catalog'), false)"
)
