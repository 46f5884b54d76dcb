"""A table for the records of objects in the Postgres database that holds the ledger too, by object and ordinal."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Self, cast

import asyncpg
import msgspec

from keywise.adapters.postgres.columns import Column, created_columns, refusals
from keywise.adapters.postgres.database import (
    OPTIONS,
    SLOW_S,
    PostgresDatabase,
    database_at,
    joined,
    numbers,
    postgres_errors,
)
from keywise.core.change import Change
from keywise.core.errors import UnavailableError
from keywise.core.record import Record
from keywise.core.resource import opening
from keywise.core.sink import AtomicSink, Grade
from keywise.core.statements import UserRecordTable, quoted
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class PostgresRecordTable:
    """A table with an object, an ordinal and a version column, and the body as one column or as columns of its own."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 10_000

    def __init__(self, database: PostgresDatabase, table: UserRecordTable) -> None:
        parts = table.name.split(".", 1)
        table.check(parts, "pg_")
        self.database = database
        self._user_table = table
        self.columns = table.columns
        self._table = ".".join(map(quoted, parts))
        self._is_binary = False
        self._upsert = self._upsert_object = self._delete = self._delete_tail = self._find_tails = ""
        """Composed when the table is known."""

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self._prepare()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        # In the order of the primary key, so that two pipelines on one table cannot wait for each other.
        records = sorted(cast("Sequence[Record[Any]]", changes), key=_place_of)
        kept = [one for one in records if not one.deleted]
        gone = [(one.object, one.ordinal) for one in records if one.deleted]
        with refusals(self.database, self._user_table.name):
            if kept:
                await self._put(transaction.connection, kept)
            if gone:
                await transaction.connection.executemany(self._delete, gone, timeout=SLOW_S)

    async def delete_tails(self, transaction: Transaction, tails: Sequence[tuple[str, int]], limit: int) -> int:
        deleted, connection = 0, transaction.connection
        with refusals(self.database, self._user_table.name):
            if len(tails) > 1:
                # Most objects have no tail, and one statement finds the others.
                uris, firsts = joined([uri for uri, _ in tails]), numbers(first for _, first in tails)
                tails = await connection.fetch(self._find_tails, firsts, *uris, timeout=SLOW_S)
            for uri, first in sorted(tails):
                status = await connection.execute(self._delete_tail, uri, first, limit - deleted, timeout=SLOW_S)
                deleted += int(status.removeprefix("DELETE "))
        return deleted

    async def _put(self, connection: Any, records: Sequence[Record[Any]]) -> None:
        is_object = not self._user_table.columns and len({(one.object, one.order) for one in records}) == 1
        try:
            if is_object:
                await connection.execute(self._upsert_object, *self._arguments_of_object(records), timeout=SLOW_S)
            else:
                await connection.execute(self._upsert, *self._arguments(records), timeout=SLOW_S)
        except asyncpg.UniqueViolationError as error:
            if not self._is_of_place(error):
                raise
            raise UnavailableError(
                f"table {self._user_table.name}: another transaction has just written records of the same object"
            ) from error

    def _is_of_place(self, error: asyncpg.UniqueViolationError) -> bool:
        """Say whether a row has the object and ordinal of another; a table may have other unique columns as well."""
        detail = (error.detail or "").replace('"', "")
        uri, ordinal = self._user_table.object, self._user_table.ordinal
        return f"({uri}, {ordinal})=" in detail or f"({ordinal}, {uri})=" in detail

    def _arguments(self, records: Sequence[Record[Any]]) -> tuple[Any, ...]:
        """The first and the last ordinal of each object, its URI, the separator of texts, and the rows."""
        lasts = {one.object: one.ordinal for one in records}
        firsts = {one.object: one.ordinal for one in reversed(records)}
        ranges = numbers(firsts[uri] for uri in lasts), numbers(lasts.values())
        if self._user_table.columns:
            return *ranges, *joined(list(lasts)), msgspec.json.encode([self._row(one) for one in records]).decode()
        places = numbers(one.ordinal for one in records), numbers(one.version for one in records)
        objects = [one.object for one in records]
        if self._is_binary:
            uris, split, separator = joined(list(lasts), objects)
            return *ranges, uris, separator, *places, split, [one.body for one in records]
        uris, split, bodies, separator = joined(list(lasts), objects, [one.body.decode() for one in records])
        return *ranges, uris, separator, *places, split, bodies

    def _arguments_of_object(self, records: Sequence[Record[Any]]) -> tuple[Any, ...]:
        """The same for records of one object at one version: both are given once, and not for each row."""
        first, last = records[0], records[-1]
        firsts, lasts = numbers([first.ordinal]), numbers([last.ordinal])
        ordinals = numbers([one.ordinal for one in records])
        if self._is_binary:
            uri, separator = joined([first.object])
            return firsts, lasts, uri, separator, ordinals, first.version, [one.body for one in records]
        uri, bodies, separator = joined([first.object], [one.body.decode() for one in records])
        return firsts, lasts, uri, separator, ordinals, first.version, bodies

    def _row(self, record: Record[Any]) -> dict[str, Any]:
        fields, table = _DECODE(record.body), self._user_table
        row = {name: fields.get(name) for name in table.columns}
        return {**row, table.object: record.object, table.ordinal: record.ordinal, table.version: record.version}

    async def _prepare(self) -> None:
        """Make the table if there is none, and the statements that fit its types."""
        try:
            async with self.database.transaction() as connection:
                with postgres_errors(self.database.name, of_handler=True):
                    self._compose(await created_columns(connection, self._table, self._creation()))
                    # With nothing to write they show whether the table has these columns and this primary key.
                    await connection.execute(self._upsert, *self._arguments(()))
                    await connection.execute(self._delete_tail, "", 0, 0)
                    await connection.fetch(self._find_tails, numbers(()), *joined([]))
        except asyncpg.PostgresError as error:
            raise self._user_table.misfit(str(error)) from error

    def _creation(self) -> str:
        uri, ordinal, version, *rest = map(quoted, self._user_table.stored)
        kept = ", ".join(f"{name} {'jsonb' if self._user_table.columns else 'text'}" for name in rest)
        return (
            f'create table if not exists {self._table} ({uri} text collate "C", {ordinal} bigint, '
            f"{version} bigint, {kept}, primary key ({uri}, {ordinal}))"
        )

    def _check(self, columns: Mapping[str, Column]) -> None:
        table = self._user_table
        missing = [name for name in table.stored if name not in columns]
        if missing:
            raise table.misfit(f"it has no column {missing[0]}")
        if columns[table.object].folds or not columns[table.object].is_text:
            raise table.misfit(f"objects that differ can be equal in its column {table.object}; make it text")
        # As text, 10 is below 9.
        if columns[table.ordinal].type not in ("bigint", "integer"):
            raise table.misfit(f"its column {table.ordinal} does not hold whole numbers only; make it bigint")

    def _compose(self, columns: Mapping[str, Column]) -> None:
        self._check(columns)
        table, stored = self._user_table, self._user_table.stored
        names = [quoted(name) for name in stored]
        uri, ordinal, *_ = names
        self._is_binary = columns[stored[3]].type == "bytea" and not table.columns
        if table.columns:
            rows = f"select {', '.join(names)} from json_populate_recordset(null::{self._table}, $5::json)"  # noqa: S608
            self._upsert = self._upsert_of(rows)
        else:
            casts = [f"{value}::{columns[name].type}" for value, name in zip(_VALUES, stored, strict=True)]
            select = f"select {', '.join(casts)} from"
            bodies = "$8::bytea[]" if self._is_binary else "string_to_array($8, $4)"
            given = f"$5::text::bigint[], $6::text::bigint[], string_to_array($7, $4), {bodies}"
            self._upsert = self._upsert_of(f"{select} unnest({given}) as one (n, v, o, b)")
            bodies = "$7::bytea[]" if self._is_binary else "string_to_array($7, $4)"
            common = "(select $3::text as o, $6::bigint as v) as object"
            rows = f"{select} {common} cross join unnest($5::text::bigint[], {bodies}) as one (n, b)"
            self._upsert_object = self._upsert_of(rows)
        # One row at a time: a join could become a scan of the whole table, and a `ctid` is not unique over partitions.
        self._delete = f"delete from {self._table} where {uri} = $1 and {ordinal} = $2"  # noqa: S608
        self._find_tails = (
            "select one.uri, one.first from unnest($1::text::bigint[], string_to_array($2, $3)) as one (first, uri) "  # noqa: S608
            f"cross join lateral (select 1 from {self._table} where {uri} = one.uri and {ordinal} >= one.first "
            "limit 1) as held"
        )
        tail = f"{uri} = $1 and {ordinal} >= $2"
        last = f"select {ordinal} from {self._table} where {tail} order by {ordinal} limit $3"  # noqa: S608
        self._delete_tail = (
            f"delete from {self._table} where {tail} and {ordinal} <= (select max({ordinal}) from ({last}) as last)"  # noqa: S608
        )

    def _upsert_of(self, rows: str) -> str:
        """Return the statement that writes what a query selects."""
        names = [quoted(name) for name in self._user_table.stored]
        uri, ordinal, *rest = names
        insert = f"insert into {self._table} ({', '.join(names)}) {rows} where"
        updates = ", ".join(f"{name} = excluded.{name}" for name in rest)
        # Most objects are new, and a plain insert takes two thirds of the time of one that looks for conflicts.
        return (
            "with held as materialized (select exists (select 1 from "  # noqa: S608
            "unnest($1::text::bigint[], $2::text::bigint[], string_to_array($3, $4)) as one (first, last, uri) "
            f"cross join lateral (select 1 from {self._table} where {uri} = one.uri and {ordinal} >= one.first "
            f"and {ordinal} <= one.last limit 1) as held) as is_any), "
            f"added as ({insert} not (select is_any from held)) "
            f"{insert} (select is_any from held) on conflict ({uri}, {ordinal}) do update set {updates}"
        )


def connect(address: Address) -> AtomicSink:
    """`postgresql://user@host/database?table=NAME`, and the options of a record table in SQLite."""
    options = address.take("table", "object", "ordinal", "version", "body", "columns", *OPTIONS)
    database = database_at(address, options)
    return PostgresRecordTable(database, UserRecordTable.of_options(options, address.name))


_place_of = attrgetter("object", "ordinal")
_VALUES = ("o", "n", "v", "coalesce(b, '')")
_DECODE = msgspec.json.Decoder(dict[str, Any]).decode
