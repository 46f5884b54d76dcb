"""The bench of the adapters in a SQLite file."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from keywise.core.url import Address

QUEUE_BITS = 40


class SqliteBench:
    """Moves the clock of each opening of the file, and removes all rows of a name."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for database in {id(adapter.database): adapter.database for adapter in adapters}.values():
            database._clock_offset_s += seconds

    async def remove(self, adapter: Any, name: str) -> None:
        await adapter.database.write(lambda connection: _delete(connection, name))


def _delete(connection: sqlite3.Connection, name: str) -> None:
    for (queue,) in connection.execute("select id from keywise_queues where name = ?", (name,)).fetchall():
        stretch = (queue << QUEUE_BITS, ((queue + 1) << QUEUE_BITS) - 1)
        connection.execute("delete from keywise_ready where id between ? and ?", stretch)
        connection.execute("delete from keywise_held where queue = ?", (queue,))
        connection.execute("delete from keywise_queues where id = ?", (queue,))
    for (scope,) in connection.execute("select id from keywise_scopes where name = ?", (name,)).fetchall():
        for table in _tables_with_scope(connection):
            connection.execute(f"delete from {table} where scope = ?", (scope,))  # noqa: S608 - our own tables
        connection.execute("delete from keywise_scopes where id = ?", (scope,))
    connection.execute(f'drop table if exists "{name}"')


def _tables_with_scope(connection: sqlite3.Connection) -> Sequence[str]:
    named = "select name from sqlite_master where type = 'table' and name like 'keywise%'"
    tables = [name for (name,) in connection.execute(named).fetchall()]
    return [one for one in tables if any(row[1] == "scope" for row in connection.execute(f"pragma table_info({one})"))]
