"""The history of one pipeline in a SQLite file."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from keywise.adapters.sqlite.ledger.working_set import SqliteScope
from keywise.core.history import HistoryRecord
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)
ADD = _SQL["add"]


class SqliteHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, scope: SqliteScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        scope = self._scope.number
        rows = [(scope, one.at, one.what, one.key, one.version, one.detail, one.by) for one in records]
        await self._database.write(lambda connection: connection.executemany(ADD, rows))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        rows: Any
        if key is None:
            rows = self._database.read(_SQL["all"], (self._scope.number, limit))
        else:
            rows = self._database.read(_SQL["of_key"], (self._scope.number, key, limit))
        return [HistoryRecord(*row) for row in rows]

    async def trim(self, age_s: float, records_max: int) -> int:
        def act(connection: sqlite3.Connection) -> int:
            return connection.execute(_SQL["trim"], (scope, self._database.now() - age_s, scope, records_max)).rowcount

        scope = self._scope.number
        return await self._database.write(act)
