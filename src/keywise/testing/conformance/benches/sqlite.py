"""The bench of the SQLite adapters: it moves the clock of a file, and removes names."""

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.source import QUEUE_BITS
from keywise.core.url import Address
from keywise.testing.conformance.origins import KeyKind, RowWriter
from keywise.testing.conformance.promise import UncheckedError


class SqliteBench:
    """The bench of `sqlite:` URLs."""

    async def prepare(self, address: Address, role: str) -> None:
        path = address.file()
        address._shared.setdefault((SqliteDatabase, path), SqliteBenchDatabase(path))

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for database in {id(one.database): one.database for one in adapters}.values():
            if not isinstance(database, SqliteBenchDatabase):
                raise UncheckedError(f"{database.path} was opened without a clock that can be moved")
            database.move_clock(seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        await adapter.database.write(lambda connection: _remove(connection, name))

    @asynccontextmanager
    async def rows(self, address: Address, keys: KeyKind) -> AsyncIterator[RowWriter]:
        table = SqliteRows(address.file(), address.name)
        table.execute(f'create table "{table.name}" (key {KEY_COLUMNS[keys]}, text text)')
        try:
            yield table
        finally:
            table.execute(f'drop table "{table.name}"')


KEY_COLUMNS = {
    KeyKind.TEXT: "text primary key",
    KeyKind.INTEGER: "integer primary key",
    KeyKind.NOT_UNIQUE: "text",
}


class SqliteRows:
    """Writes the rows of a table in a file, each call in a transaction of its own."""

    def __init__(self, path: str, name: str) -> None:
        self.name = name.replace('"', '""')
        self._path = path

    async def put(self, texts: Mapping[str, str]) -> None:
        self.execute(f'replace into "{self.name}" values (?, ?)', list(texts.items()))  # noqa: S608

    async def delete(self, keys: Sequence[str]) -> None:
        self.execute(f'delete from "{self.name}" where key = ?', [(key,) for key in keys])  # noqa: S608

    def execute(self, statement: str, rows: Sequence[tuple[str, ...]] = ((),)) -> None:
        """Run a statement for each row of arguments."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            for row in rows:
                connection.execute(statement, row)


class SqliteBenchDatabase(SqliteDatabase):
    """A file with a clock that can be moved while it is open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self._ahead_s

    def move_clock(self, seconds: float) -> None:
        self._ahead_s += seconds


def _remove(connection: sqlite3.Connection, name: str) -> None:
    for (queue,) in connection.execute("select id from keywise_queues where name = ?", (name,)).fetchall():
        stretch = (queue << QUEUE_BITS, ((queue + 1) << QUEUE_BITS) - 1)
        connection.execute("delete from keywise_ready where id between ? and ?", stretch)
        connection.execute("delete from keywise_held where queue = ?", (queue,))
        connection.execute("delete from keywise_queues where id = ?", (queue,))
    for (scope,) in connection.execute("select id from keywise_scopes where name = ?", (name,)).fetchall():
        for table in _tables_with_scope(connection):
            connection.execute(f"delete from {table} where scope = ?", (scope,))  # noqa: S608 - our own tables
        connection.execute("delete from keywise_scopes where id = ?", (scope,))
    connection.execute("delete from keywise_targets where name = ?", (name,))
    quoted = name.replace('"', '""')
    connection.execute(f'drop table if exists "{quoted}"')


def _tables_with_scope(connection: sqlite3.Connection) -> list[str]:
    named = "select name from sqlite_master where type = 'table' and name like 'keywise%'"
    tables = [name for (name,) in connection.execute(named).fetchall()]
    return [one for one in tables if any(row[1] == "scope" for row in connection.execute(f"pragma table_info({one})"))]
