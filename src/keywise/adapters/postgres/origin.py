"""A table in Postgres as an origin, read in the order of its key column."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import asyncpg

from keywise.adapters.postgres.columns import COLUMNS, Column, columns_of
from keywise.adapters.postgres.database import OPTIONS, SLOW_S, PostgresDatabase, closed_after_error, database_url
from keywise.core.errors import DatabaseError, OriginError
from keywise.core.key_range import (
    BOUND_MAX_BYTES,
    KeyRange,
    cause_of_condition,
    read_page,
    shards_by_keys,
    with_condition,
)
from keywise.core.origin import Origin, Page, Shard
from keywise.core.resource import opening
from keywise.core.statements import OriginTable, quoted
from keywise.core.url import Address

COMPARED_AS = {"text": "text", "character varying": "text", "uuid": "uuid"} | dict.fromkeys(
    ("smallint", "integer", "bigint"), "bigint"
)
"""The types of a key column, and the type that a key is compared as. One with a length would cut the key off."""
BIGINT_MIN, BIGINT_MAX = -(2**63), 2**63 - 1


class PostgresReadDatabase(PostgresDatabase):
    """A database that keywise only reads: it needs no tables there, and has connections of its own."""

    async def _prepare(self, connection: Any) -> None:
        pass

    async def _connect(self, url: str, **options: Any) -> Any:
        connection = await super()._connect(url, **options)
        async with closed_after_error(connection):
            # Each time, because a primary can come back as a standby after a failover.
            if await connection.fetchval("select pg_is_in_recovery()"):
                raise DatabaseError(
                    f"{self.name} is a standby, which may lag behind: a row that it does not have yet would count as "
                    "deleted; name the primary"
                )
            await connection.execute(_READING)
        return connection


class PostgresOrigin:
    """The rows of a table by key; the row is a JSON object, or the content of its body column."""

    is_consistent = True

    def __init__(self, database: PostgresReadDatabase, table: OriginTable) -> None:
        parts = table.name.split(".", 1)
        table.check(parts, "pg_")
        self.database = database
        self._user_table = table
        self._table = ".".join(map(quoted, parts))
        # Qualified, because `order by` would prefer a column of the result, which is text.
        self._key = f"origin.{quoted(table.key)}"
        self._kind = self._row = ""
        """The type that keys are compared as, and the expression of a body; composed when the table is known."""

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self._prepare()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def shards(self, size: int) -> Sequence[Shard]:
        return await shards_by_keys(self._key_after, size)

    async def shards_where(self, condition: str, size: int) -> Sequence[Shard]:
        shards = with_condition(await self.shards(size), condition)
        try:
            for check in KeyRange(condition=condition).checks:
                await self.database.read(f"{self._select} where {check}")
        except DatabaseError as error:
            raise OriginError(f"the condition {condition!r} cannot be used: {cause_of_condition(error)}") from error
        return shards

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return await read_page(self._rows, shard, after, limit)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        which = f"{self._key} = any($1::text[]::{self._kind}[])"
        wanted = [key for key in keys if self._can_hold(key)]
        return dict(_bodies(await self._read(f"{self._select} where {which}", wanted)))

    @property
    def _select(self) -> str:
        return f"select {self._key}::text, {self._row} from {self._table} as origin"  # noqa: S608 - names are checked

    async def _rows(self, within: KeyRange, limit: int) -> Sequence[tuple[str, bytes]]:
        where, bounds = self._within(within)
        statement = f"{self._select} {where} order by {self._key} limit ${len(bounds) + 1}"
        return _bodies(await self._read(statement, *bounds, limit))

    async def _key_after(self, low: str | None, size: int) -> str | None:
        where, bounds = self._within(KeyRange(low))
        if self._kind == "text":
            where = f"{where or 'where true'} and octet_length({self._key}) <= {BOUND_MAX_BYTES}"
        found = await self._read(
            f"select {self._key}::text from {self._table} as origin {where} "  # noqa: S608 - names are checked
            f"order by {self._key} offset ${len(bounds) + 1} limit 1",
            *bounds,
            size - 1,
        )
        return found[0][0] if found else None

    def _within(self, within: KeyRange) -> tuple[str, list[str]]:
        """Return the condition of a range, empty if it has no bounds, and its arguments."""
        given = [(sign, key) for sign, key in ((">", within.low), ("<=", within.high)) if key is not None]
        tests = [f"{self._key} {sign} ${n}::text::{self._kind}" for n, (sign, _) in enumerate(given, start=1)]
        tests += [within.test] if within.condition else []
        return f"where {' and '.join(tests)}" if tests else "", [key for _, key in given]

    async def _read(self, statement: str, *arguments: object) -> Sequence[Any]:
        try:
            return await self.database.read(statement, *arguments, limit_s=SLOW_S)
        except DatabaseError as error:
            if isinstance(error.__cause__, asyncpg.UndefinedTableError | asyncpg.UndefinedColumnError):
                raise self._user_table.misfit(str(error.__cause__)) from error
            raise

    def _can_hold(self, key: str) -> bool:
        """Whether the column can hold a key that is spelled like that; the server would fail the query for another."""
        if self._kind == "bigint":
            return bool(_INTEGER.fullmatch(key)) and BIGINT_MIN <= int(key) <= BIGINT_MAX
        if self._kind == "uuid":
            return bool(_UUID.fullmatch(key))
        return "\0" not in key and not _SURROGATE.search(key)

    async def _prepare(self) -> None:
        """Check that the table has these columns and a unique key."""
        key, body = self._user_table.key, self._user_table.body
        columns = columns_of(await self.database.read(COLUMNS, self._table))
        for name in (key, *([body] if body else [])):
            if name not in columns:
                raise self._user_table.misfit(f"it has no column {name}" if columns else "there is no such table")
        self._kind = self._compared_as(columns[key])
        self._row = _body_column(columns[body], body) if body else self._whole_row()
        if not await self.database.read(_UNIQUE, self._table, key):
            raise self._user_table.misfit(f"no unique index has the column {key}, and it alone, in the column's order")
        await self._read(f"{self._select} limit 0")

    def _compared_as(self, column: Column) -> str:
        if column.folds:
            raise self._user_table.misfit(f"keys that differ can be equal in its column {self._user_table.key}")
        kind = COMPARED_AS.get(column.type.partition("(")[0])
        if kind is None:
            raise self._user_table.misfit(
                f"its column {self._user_table.key} is of the type {column.type}, and a key is text, a uuid or a "
                "whole number"
            )
        return kind

    def _whole_row(self) -> str:
        if self._kind != "bigint":
            return "row_to_json(origin.*)::text"
        # Keys are text, as in a message.
        return f"(to_jsonb(origin.*) || jsonb_build_object('{self._user_table.key}', {self._key}::text))::text"


def connect(address: Address) -> Origin:
    """`postgresql://user@host/database?table=NAME&key=COLUMN`, and `body` for a column with the whole message."""
    options = address.take("table", "key", "body", *OPTIONS)
    database = address.shared(PostgresReadDatabase, database_url(address, options))
    return PostgresOrigin(database, OriginTable.of_options(options, address.name))


def _body_column(column: Column, name: str) -> str:
    return f"origin.{quoted(name)}{'' if column.type == 'bytea' else '::text'}"


def _bodies(rows: Sequence[Any]) -> list[tuple[str, bytes]]:
    """Return rows as bodies of messages. A body that is null becomes empty, which no reader accepts."""
    return [(key, body if isinstance(body, bytes) else (body or "").encode()) for key, body in rows]


# A page in the order of the index: the planner would sort a large part of the table for an early page of it.
_READING = "set default_transaction_read_only = on; set enable_sort = off; set enable_bitmapscan = off"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# An index in another order would be sorted for every page.
_UNIQUE = (
    "select from pg_index join pg_attribute on attrelid = indrelid and attnum = indkey[0] "
    "join pg_opclass on pg_opclass.oid = indclass[0] join pg_am on pg_am.oid = opcmethod "
    "where indrelid = to_regclass($1) and attname = $2 and indisunique and indisvalid and indnkeyatts = 1 "
    "and indpred is null and indcollation[0] = attcollation and amname = 'btree' and opcname not like '%pattern_ops' "
    "limit 1"
)
