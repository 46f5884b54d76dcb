"""A table in the SQLite file that holds the ledger too: upsert and delete, in the ledger's own transaction."""

import sqlite3
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from keywise.adapters.sqlite.columns import create_if_missing, folds_texts, refusals, values_of
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.targets import SqliteTargets
from keywise.core.change import Change
from keywise.core.resource import opening
from keywise.core.sink import AtomicSink, Content, Grade
from keywise.core.statements import UserTable, quoted
from keywise.core.table_targets import check_label
from keywise.core.target import TargetNote
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class SqliteSink:
    """A table with a key column, a version column, and the body as JSON text or as columns of its own."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 10_000

    def __init__(self, database: SqliteDatabase, table: UserTable, target: str = "") -> None:
        table.check([table.name], "sqlite_")
        self.database = database
        self._table = table
        self._columns = table.columns
        self._target = target
        """The table beside the live one that the sink writes to; empty for a sink that follows its name."""
        self._targets = SqliteTargets(database, table.name)
        if target:
            check_label(target, "sqlite_")
        name, key, stored = quoted(target or table.name), quoted(table.key), [quoted(one) for one in table.stored]
        self._create = (
            f"create table if not exists {name} ({key} text primary key, "
            f"{stored[1]} integer, {', '.join(stored[2:])}) without rowid"
        )
        updates = ", ".join(f"{one} = excluded.{one}" for one in stored[1:])
        self._upsert = (
            f"insert into {name} ({', '.join(stored)}) "  # noqa: S608 - names are checked
            f"values ({', '.join('?' * len(stored))}) on conflict ({key}) do update set {updates}"
        )
        self._select = f"select {', '.join(stored)} from {name} where {key} in (select value from json_each(?))"  # noqa: S608
        self._delete = f"delete from {name} where {key} = ?"  # noqa: S608
        self._any = f"select 1 from {name} limit 1"  # noqa: S608

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            # A target may be missing by now: it is opened to be forgotten, too.
            if not self._target:
                await create_if_missing(self.database, self._table.name, self._create)
                self.fit(self.database.reader)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        gone = [(change.key,) for change in changes if change.deleted]
        with refusals(self.database, self._target or self._table.name):
            rows = self._rows([change for change in changes if not change.deleted])
            transaction.connection.executemany(self._upsert, rows)
            if gone:
                transaction.connection.executemany(self._delete, gone)

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        rows: Any = self.database.read(self._select, (msgspec.json.encode(keys).decode(),))
        return {key: Content(self._body(stored), version) for key, version, *stored in rows}

    @property
    def columns(self) -> Sequence[str]:
        return self._columns

    async def is_empty(self) -> bool:
        return not list(self.database.read(self._any))

    # The ability to move.

    async def current_target(self) -> str:
        return await self._targets.current()

    def at_target(self, target: str) -> "SqliteSink":
        return SqliteSink(self.database, self._table, target)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        await self._targets.create(target, note, definition, lambda connection: self.at_target(target).fit(connection))

    async def finish_target(self, target: str) -> list[str]:
        return await self._targets.finish(target)

    async def count(self, target: str) -> int:
        return await self._targets.count(target)

    async def targets(self, pipeline: str) -> list[str]:
        return await self._targets.built(pipeline)

    async def drop_target(self, target: str) -> None:
        await self._targets.drop(target)

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        self._targets.exchange(connection, before, after)

    def fit(self, connection: sqlite3.Connection) -> None:
        """Raise unless the table fits the statements."""
        # The older of two changes could overwrite the newer one, if their keys differ in the ledger only.
        if folds_texts(connection, self._target or self._table.name, self._table.key):
            raise self._table.misfit(f"keys that differ can be equal in its column {self._table.key}; make it text")
        try:
            # Compiling them shows whether a table that was there before has these columns and this key.
            connection.execute(f"explain {self._upsert}", (None,) * (2 + max(1, len(self._columns))))
            connection.execute(f"explain {self._delete}", (None,))
        except sqlite3.OperationalError as error:
            raise self._table.misfit(str(error)) from error

    def _body(self, stored: list[Any]) -> bytes | dict[str, Any]:
        if self._columns:
            return dict(zip(self._columns, stored, strict=True))
        [body] = stored
        return body if isinstance(body, bytes) else str(body).encode()

    def _rows(self, changes: Sequence[Change[Any]]) -> list[tuple[object, ...]]:
        if not self._columns:
            return [(change.key, change.version, change.body.decode()) for change in changes]
        return [(change.key, change.version, *values_of(change.body, self._columns)) for change in changes]


def connect(address: Address) -> AtomicSink:
    """`sqlite:///file.db?table=NAME`, and `key`, `version`, `body` or `columns=a,b` to name columns."""
    options = address.take("table", "key", "version", "body", "columns")
    return SqliteSink(address.shared(SqliteDatabase, address.file()), UserTable.of_options(options, address.name))
