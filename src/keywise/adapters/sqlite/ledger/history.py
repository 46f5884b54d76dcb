"""The history of one pipeline in a SQLite file."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.working_set import SqliteScope
from keywise.core.history import HistoryRecord


class SqliteHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, database: SqliteDatabase, scope: SqliteScope) -> None:
        self._database = database
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        scope = self._scope.number
        rows = [(scope, one.at, one.what, one.key, one.version, one.detail, one.by) for one in records]
        await self._database.write(lambda connection: connection.executemany(ADD, rows))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        rows: Any
        if key is None:
            rows = self._database.read(_ALL, (self._scope.number, limit))
        else:
            rows = self._database.read(_OF_KEY, (self._scope.number, key, limit))
        return [HistoryRecord(*row) for row in rows]

    async def trim(self, age_s: float, records_max: int) -> int:
        def act(connection: sqlite3.Connection) -> int:
            return connection.execute(_TRIM, (scope, self._database.now() - age_s, scope, records_max)).rowcount

        scope = self._scope.number
        return await self._database.write(act)


ADD = "insert into keywise_lines (scope, at, what, key, version, detail, by) values (?, ?, ?, ?, ?, ?, ?)"
_COLUMNS = "select at, what, key, version, detail, by from keywise_lines"
_ALL = f"{_COLUMNS} where scope = ? order by id desc limit ?"
_OF_KEY = f"{_COLUMNS} where scope = ? and key = ? order by id desc limit ?"
_TRIM = (
    "delete from keywise_lines where scope = ? and (at < ? or id <= "
    "(select id from keywise_lines where scope = ? order by id desc limit 1 offset ?))"
)
