"""The history of one pipeline in a Postgres database."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.working_set import Scope
from keywise.core.history import Line
from keywise.core.key_encoding import decoded, encoded


class PostgresHistorian:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, database: PostgresDatabase, scope: Scope) -> None:
        self._database = database
        self._scope = scope

    async def record(self, lines: Sequence[Line]) -> None:
        await self._database.write(ADD, self._scope.number, *columns_of(lines))

    async def history(self, key: str | None, limit: int) -> list[Line]:
        if key is None:
            rows = await self._database.read(_ALL, self._scope.number, limit)
        else:
            rows = await self._database.read(_OF_KEY, self._scope.number, limit, encoded(key))
        return [Line(at, what, decoded(code), version, detail, by) for at, what, code, version, detail, by in rows]

    async def trim(self, age_s: float, lines_max: int) -> int:
        since = await self._database.now() - age_s
        [[trimmed]] = await self._database.write(_TRIM, self._scope.number, since, lines_max)
        return int(trimmed)


def columns_of(lines: Sequence[Line]) -> tuple[list[Any], ...]:
    """What `ADD` is given."""
    return (
        [line.at for line in lines],
        [line.what for line in lines],
        [encoded(line.key) for line in lines],
        [line.version for line in lines],
        [line.detail.replace("\0", "\ufffd") for line in lines],
        [line.by for line in lines],
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
