"""The history of one pipeline in a Postgres database."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.postgres.ledger.working_set import PostgresScope, columns
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)
ADD = _SQL["add"]


class PostgresHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, scope: PostgresScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        if records:
            await self._database.write(ADD, self._scope.number, *columns_of(records))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is None:
            rows = await self._database.read(_SQL["all"], self._scope.number, limit)
        else:
            rows = await self._database.read(_SQL["of_key"], self._scope.number, limit, encoded(key))
        return [record_of(row) for row in rows]

    async def trim(self, age_s: float, records_max: int) -> int:
        since = await self._database.now() - age_s
        [[trimmed]] = await self._database.write(_SQL["trim"], self._scope.number, since, records_max)
        return int(trimmed)


def columns_of(records: Sequence[HistoryRecord]) -> tuple[Sequence[Any], ...]:
    """What `ADD` is given for some records."""
    return columns(
        (one.at, one.what, encoded(one.key), one.version, one.detail.replace("\0", "\ufffd"), one.by) for one in records
    )


def record_of(row: Sequence[Any]) -> HistoryRecord:
    at, what, code, version, detail, by = row
    return HistoryRecord(at, what, decoded(code), version, detail, by)
