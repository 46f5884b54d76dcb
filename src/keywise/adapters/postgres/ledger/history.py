"""The history of one pipeline in a Postgres database."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.working_set import PostgresScope
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import decoded, encoded


class PostgresHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, database: PostgresDatabase, scope: PostgresScope) -> None:
        self._database = database
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        await self._database.write(ADD, self._scope.number, *columns_of(records))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is None:
            rows = await self._database.read(_ALL, self._scope.number, limit)
        else:
            rows = await self._database.read(_OF_KEY, self._scope.number, limit, encoded(key))
        return [
            HistoryRecord(at, what, decoded(code), version, detail, by) for at, what, code, version, detail, by in rows
        ]

    async def trim(self, age_s: float, records_max: int) -> int:
        since = await self._database.now() - age_s
        [[trimmed]] = await self._database.write(_TRIM, self._scope.number, since, records_max)
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


ADD = (
    "insert into keywise_lines (scope, at, what, key, version, detail, by) select $1, * from unnest("
    "$2::float8[], $3::text[], $4::bytea[], $5::bigint[], $6::text[], $7::text[])"
)
_COLUMNS = "select at, what, key, version, detail, by from keywise_lines"
_ALL = f"{_COLUMNS} where scope = $1 order by id desc limit $2"
_OF_KEY = f"{_COLUMNS} where scope = $1 and key = $3 order by id desc limit $2"
_TRIM = (
    "with gone as (delete from keywise_lines where scope = $1 and (at < $2 or id <= ("
    "select id from keywise_lines where scope = $1 order by id desc limit 1 offset $3)) returning 1) "
    "select count(*) from gone"
)
