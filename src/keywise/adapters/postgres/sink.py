"""A table in the Postgres database that holds the ledger too: upsert and delete, in the ledger's own transaction."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Self

import asyncpg
import msgspec

from keywise.adapters.postgres.columns import COLUMNS, Column, columns_of, created_columns, refusals
from keywise.adapters.postgres.database import (
    OPTIONS,
    SLOW_S,
    PostgresDatabase,
    database_at,
    joined,
    numbers,
    postgres_errors,
)
from keywise.adapters.postgres.targets import PostgresTargets
from keywise.core.change import Change
from keywise.core.errors import PermanentError
from keywise.core.resource import opening
from keywise.core.sink import AtomicSink, Content, Grade
from keywise.core.statements import UserTable, quoted
from keywise.core.target import TargetNote
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class PostgresSink:
    """A table with a key column, a version column, and the body as one column or as columns of its own."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 10_000

    def __init__(self, database: PostgresDatabase, table: UserTable, target: str = "") -> None:
        parts = table.name.split(".", 1)
        table.check(parts, "pg_")
        self.database = database
        self._user_table = table
        self._table = self._live = ".".join(map(quoted, parts))
        self._target = target
        """The table beside the live one that the sink writes to; empty for a sink that follows its name."""
        self._targets = PostgresTargets(database, table.name, self._live)
        self._columns, self._stored = table.columns, table.stored
        self._is_binary = False
        self._upsert = self._delete = self._select = ""
        """Composed when the table is known."""
        self._respelled = ""
        """Finds keys that the key column would spell differently; empty if the column keeps any text as it is."""

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self._prepare()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        # In the order of keys, so that two pipelines on one table cannot wait for each other.
        kept = sorted((change for change in changes if not change.deleted), key=_key_of)
        gone = sorted(change.key for change in changes if change.deleted)
        with refusals(self.database, self._target or self._user_table.name):
            await self._check_spelling(transaction.connection, changes)
            if kept:
                await transaction.connection.execute(self._upsert, *self._arguments(kept), timeout=SLOW_S)
            if gone:
                await transaction.connection.execute(self._delete, gone, timeout=SLOW_S)

    async def _check_spelling(self, connection: Any, changes: Sequence[Change[Any]]) -> None:
        """Refuse keys that would share a row with another key: the older change of two could overwrite the newer."""
        if not self._respelled:
            return
        keys = joined([change.key for change in changes])
        for key, spelled in await connection.fetch(self._respelled, *keys, timeout=SLOW_S):
            raise PermanentError(
                f"table {self._user_table.name} spells the key {key!r} as {spelled!r}; send it like that"
            )

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        rows = await self.database.read(self._select, list(keys))
        return {key: Content(self._body(stored), version) for key, version, *stored in rows}

    @property
    def columns(self) -> Sequence[str]:
        return self._columns

    async def is_empty(self) -> bool:
        return not await self.database.read(f"select 1 from {self._table} limit 1")  # noqa: S608 - names are checked

    # The ability to move.

    async def current_target(self) -> str:
        return await self._targets.current()

    def at_target(self, target: str) -> "PostgresSink":
        return PostgresSink(self.database, self._user_table, target)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        await self._targets.create(target, note, definition, self.at_target(target).fit)

    async def finish_target(self, target: str) -> list[str]:
        return await self._targets.finish(target)

    async def count(self, target: str) -> int:
        return await self._targets.count(target)

    async def targets(self, pipeline: str) -> list[str]:
        return await self._targets.built(pipeline)

    async def drop_target(self, target: str) -> None:
        await self._targets.drop(target)

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        await self._targets.exchange(connection, before, after)

    async def fit(self, connection: Any) -> None:
        """Compose the statements, and raise unless the table fits them. A live table that is missing is created."""
        try:
            with postgres_errors(self.database.name, of_handler=True):
                if self._target:
                    await self._find_target(connection)
                else:
                    self._compose(await created_columns(connection, self._table, self._creation()))
                # With nothing to write they show whether the table has these columns and this key.
                await connection.execute(self._upsert, *self._arguments(()))
                await connection.execute(self._delete, [])
                await connection.fetch(self._select, [])
        except asyncpg.PostgresError as error:
            raise self._user_table.misfit(str(error)) from error

    def _body(self, stored: list[Any]) -> bytes | dict[str, Any]:
        if self._columns:
            return {name: msgspec.json.decode(text) for name, text in zip(self._columns, stored, strict=True)}
        [body] = stored
        return body if isinstance(body, bytes) else str(body).encode()

    def _arguments(self, changes: Sequence[Change[Any]]) -> tuple[Any, ...]:
        if self._columns:
            return (msgspec.json.encode([self._record(change) for change in changes]).decode(),)
        versions, keys = numbers(change.version for change in changes), [change.key for change in changes]
        if self._is_binary:
            return versions, [change.body for change in changes], *joined(keys)
        return versions, *joined([change.body.decode() for change in changes], keys)

    def _record(self, change: Change[Any]) -> dict[str, Any]:
        fields = _DECODE(change.body)
        record = {name: fields.get(name, None) for name in self._columns}
        key, version = self._stored[:2]
        return {**record, key: change.key, version: change.version}

    async def _prepare(self) -> None:
        async with self.database.transaction() as connection:
            await (self._find_target(connection) if self._target else self.fit(connection))

    async def _find_target(self, connection: Any) -> None:
        """Compose the statements for a target. It has the columns of the live table, and may be missing by now."""
        self._table = await self._targets.place_of(connection, self._target)
        self._compose(columns_of(await connection.fetch(COLUMNS, self._live)))

    def _creation(self) -> str:
        key, version, *rest = map(quoted, self._stored)
        kept = ", ".join(f"{name} {'jsonb' if self._columns else 'text'}" for name in rest)
        return (
            f'create table if not exists {self._table} ({key} text collate "C" primary key, {version} bigint, {kept})'
        )

    def _compose(self, columns: Mapping[str, Column]) -> None:
        missing = [name for name in self._stored if name not in columns]
        if missing:
            raise self._user_table.misfit(f"it has no column {missing[0]}")
        types = {name: columns[name].type for name in self._stored}
        key, kind = self._stored[0], types[self._stored[0]]
        if columns[key].folds:
            raise self._user_table.misfit(f"keys that differ can be equal in its column {key}")
        if not columns[key].is_text:
            texts = "unnest(string_to_array($1, $2)) as key"
            self._respelled = f"select key, key::{kind}::text from {texts} where key::{kind}::text <> key"  # noqa: S608
        self._is_binary = types[self._stored[2]] == "bytea" and not self._columns
        names = [quoted(name) for name in self._stored]
        updates = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        if self._columns:
            rows = f"select {', '.join(names)} from json_populate_recordset(null::{self._table}, $1::json)"  # noqa: S608
            values = [f"to_json({name})::text" for name in names[2:]]
        else:
            casts = [f"{value}::{types[column]}" for value, column in zip(_VALUES, self._stored, strict=True)]
            bodies = "$2::bytea[]" if self._is_binary else "string_to_array($2, $4)"
            wanted = f"unnest($1::text::bigint[], {bodies}, string_to_array($3, $4)) as one (v, b, k)"
            rows = f"select {', '.join(casts)} from {wanted}"  # noqa: S608
            values = names[2:] if self._is_binary else [f"{names[2]}::text"]
        which = f"{names[0]} = any($1::text[]::{types[self._stored[0]]}[])"
        self._upsert = (
            f"insert into {self._table} ({', '.join(names)}) {rows} on conflict ({names[0]}) do update set {updates}"
        )
        self._delete = f"delete from {self._table} where {which}"  # noqa: S608
        self._select = f"select {names[0]}::text, {names[1]}, {', '.join(values)} from {self._table} where {which}"  # noqa: S608


def connect(address: Address) -> AtomicSink:
    """`postgresql://user@host/database?table=NAME`, and `key`, `version`, `body` or `columns=a,b` to name columns."""
    options = address.take("table", "key", "version", "body", "columns", *OPTIONS)
    database = database_at(address, options)
    return PostgresSink(database, UserTable.of_options(options, address.name))


_key_of = attrgetter("key")
_VALUES = ("k", "v", "coalesce(b, '')")
_DECODE = msgspec.json.Decoder(dict[str, Any]).decode
