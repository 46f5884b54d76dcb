"""The history of one pipeline in a Postgres database."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.working_set import PostgresScope
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)
ADD = _SQL["add"]


class PostgresHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, database: PostgresDatabase, scope: PostgresScope) -> None:
        self._database = database
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        await self._database.write(ADD, self._scope.number, *columns_of(records))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is None:
            rows = await self._database.read(_SQL["all"], self._scope.number, limit)
        else:
            rows = await self._database.read(_SQL["of_key"], self._scope.number, limit, encoded(key))
        return [
            HistoryRecord(at, what, decoded(code), version, detail, by) for at, what, code, version, detail, by in rows
        ]

    async def trim(self, age_s: float, records_max: int) -> int:
        since = await self._database.now() - age_s
        [[trimmed]] = await self._database.write(_SQL["trim"], self._scope.number, since, records_max)
        return int(trimmed)


def columns_of(records: Sequence[HistoryRecord]) -> tuple[list[Any], ...]:
    """What `ADD` is given."""
    return (
        [line.at for line in records],
        [line.what for line in records],
        [encoded(line.key) for line in records],
        [line.version for line in records],
        [line.detail.replace("\0", "\ufffd") for line in records],
        [line.by for line in records],
    )
