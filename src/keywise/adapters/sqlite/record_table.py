"""A table for the records of objects in the SQLite file that holds the ledger too, by object and ordinal."""

import sqlite3
from collections.abc import Sequence
from typing import Any, Self, cast

from msgspec.structs import replace

from keywise.adapters.sqlite.columns import create_if_missing, declared_types, folds_texts, refusals, values_of
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.core.change import Change
from keywise.core.record import Record
from keywise.core.resource import opening
from keywise.core.sink import AtomicSink, Grade
from keywise.core.statements import UserRecordTable, quoted
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class SqliteRecordTable:
    """A table with an object, an ordinal and a version column, and the body as text or as columns of its own."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 10_000

    def __init__(self, database: SqliteDatabase, table: UserRecordTable) -> None:
        table = replace(table, whole_number="integer")
        table.check([table.name], "sqlite_")
        self.database = database
        self._table = table
        self.columns = table.columns
        name, stored = quoted(table.name), [quoted(one) for one in table.stored]
        uri, ordinal, version, *rest = stored
        self._create = (
            f"create table if not exists {name} ({uri} text not null, {ordinal} integer not null, "
            f"{version} integer, {', '.join(rest)}, primary key ({uri}, {ordinal})) without rowid"
        )
        updates = ", ".join(f"{one} = excluded.{one}" for one in stored[2:])
        self._upsert = (
            f"insert into {name} ({', '.join(stored)}) "  # noqa: S608 - names are checked
            f"values ({', '.join('?' * len(stored))}) on conflict ({uri}, {ordinal}) do update set {updates}"
        )
        self._delete = f"delete from {name} where {uri} = ? and {ordinal} = ?"  # noqa: S608
        tail = f"select {ordinal} from {name} where {uri} = ?1 and {ordinal} >= ?2 order by {ordinal} limit ?3"  # noqa: S608
        self._delete_tail = (
            f"delete from {name} where {uri} = ?1 and {ordinal} between ?2 and (select max({ordinal}) from ({tail}))"  # noqa: S608
        )

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await create_if_missing(self.database, self._table.name, self._create)
            self._check(self.database.reader)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        records = cast("Sequence[Record[Any]]", changes)
        gone = [(one.object, one.ordinal) for one in records if one.deleted]
        with refusals(self.database, self._table.name):
            transaction.connection.executemany(self._upsert, self._rows(records))
            if gone:
                transaction.connection.executemany(self._delete, gone)

    async def delete_tails(self, transaction: Transaction, tails: Sequence[tuple[str, int]], limit: int) -> int:
        deleted, connection = 0, transaction.connection
        with refusals(self.database, self._table.name):
            for uri, first in tails:
                deleted += int(connection.execute(self._delete_tail, (uri, first, limit - deleted)).rowcount)
        return deleted

    def _rows(self, records: Sequence[Record[Any]]) -> list[tuple[object, ...]]:
        if not self.columns:
            return [(one.object, one.ordinal, one.version, one.body.decode()) for one in records if not one.deleted]
        kept = [one for one in records if not one.deleted]
        return [(one.object, one.ordinal, one.version, *values_of(one.body, self.columns)) for one in kept]

    def _check(self, connection: sqlite3.Connection) -> None:
        name, uri, ordinal = self._table.name, self._table.object, self._table.ordinal
        if folds_texts(connection, name, uri):
            raise self._table.misfit(f"objects that differ can be equal in its column {uri}; make it text")
        # As text, 10 is below 9.
        if any("INT" not in kind for kind in declared_types(connection, name, ordinal)):
            raise self._table.misfit(f"its column {ordinal} does not hold whole numbers only; make it integer")
        try:
            # Compiling them shows whether a table that was there before has these columns and this primary key.
            connection.execute(f"explain {self._upsert}", (None,) * len(self._table.stored))
            connection.execute(f"explain {self._delete_tail}", (None,) * 3)
        except sqlite3.OperationalError as error:
            raise self._table.misfit(str(error)) from error


def connect(address: Address) -> AtomicSink:
    """`sqlite:///file.db?table=NAME`; `object`, `ordinal`, `version`, `body` or `columns=a,b` name columns."""
    options = address.take("table", "object", "ordinal", "version", "body", "columns")
    table = UserRecordTable.of_options(options, address.name)
    return SqliteRecordTable(address.shared(SqliteDatabase, address.file()), table)
