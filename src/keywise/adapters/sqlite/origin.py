"""A table in a SQLite file as an origin, read in the order of its key column."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from keywise.adapters.sqlite.columns import declared_types, folds_texts
from keywise.adapters.sqlite.database import BUSY_S, sqlite_errors
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
from keywise.core.statements import OriginTable, quoted
from keywise.core.url import Address

T = TypeVar("T")


class SqliteOrigin:
    """The rows of a table by key; the row is a JSON object, or the content of its body column."""

    is_consistent = True

    def __init__(self, path: str, table: OriginTable) -> None:
        table.check([table.name], "sqlite_")
        self.path = path
        self._user_table = table
        self._table = f"{quoted(table.name)} as origin"
        # Qualified: SQLite takes a quoted name that is no column for a text.
        self._key = f"origin.{quoted(table.key)}"
        self._body = f"origin.{quoted(table.body)}" if table.body else "origin.*"
        # Anything else in the column is not the key of a message.
        self._has_key = f"typeof({self._key}) in ('integer', 'text')"
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        """A writer of the user's may lock the file for a while, so nothing is read on the event loop."""

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keywise-sqlite-origin")
        try:
            await self._run(self._open)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._thread is not None, "the origin is not open"
        # Waits for a read whose caller was cancelled, because it uses the connection.
        await asyncio.to_thread(self._thread.shutdown)
        if self._connection is not None:
            self._connection.close()
        self._thread = self._connection = None

    async def shards(self, size: int) -> Sequence[Shard]:
        return await shards_by_keys(self._key_after, size)

    async def shards_where(self, condition: str, size: int) -> Sequence[Shard]:
        shards = with_condition(await self.shards(size), condition)

        def check() -> None:
            try:
                for one in KeyRange(condition=condition).checks:
                    self._reader.execute(f"{self._select} where {one}")
            except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning) as error:
                raise OriginError(f"the condition {condition!r} cannot be used: {cause_of_condition(error)}") from error

        await self._run(check)
        return shards

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return await read_page(self._rows, shard, after, limit)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        asked = {key for key in keys if _is_text(key)}
        where = f"{self._key} in (select value from json_each(?)) and {self._has_key}"  # noqa: S608
        found = await self._bodies(where, (msgspec.json.encode(sorted(asked)).decode(),))
        # In a column of numbers, 007 finds 7, which is another key.
        return {key: body for key, body in found if key in asked}

    async def _rows(self, within: KeyRange, limit: int) -> Sequence[tuple[str, bytes]]:
        where, bounds = self._within(within)
        return await self._bodies(f"{where} order by {self._key} limit ?", (*bounds, limit))

    async def _key_after(self, low: str | None, size: int) -> str | None:
        where, bounds = self._within(KeyRange(low))
        statement = (
            f"select cast({self._key} as text) from {self._table} "  # noqa: S608 - names are checked
            f"where {where} and length(cast({self._key} as blob)) <= {BOUND_MAX_BYTES} "
            f"order by {self._key} limit 1 offset ?"
        )
        found = await self._run(lambda: self._reader.execute(statement, (*bounds, size - 1)).fetchall())
        return str(found[0][0]) if found else None

    def _within(self, within: KeyRange) -> tuple[str, list[str]]:
        """Return the condition of a range, and its arguments: texts, which a column of numbers compares as numbers."""
        given = [(sign, key) for sign, key in ((">", within.low), ("<=", within.high)) if key is not None]
        tests = [*(f"{self._key} {sign} ?" for sign, _ in given), self._has_key]
        tests += [within.test] if within.condition else []
        return " and ".join(tests), [key for _, key in given]

    async def _bodies(self, where: str, arguments: Iterable[object]) -> list[tuple[str, bytes]]:
        def read() -> list[tuple[str, bytes]]:
            cursor = self._reader.execute(f"{self._select} where {where}", tuple(arguments))
            names = [description[0] for description in cursor.description[1:]]
            return [(key, self._as_body(names, key, row)) for key, *row in cursor]

        return await self._run(read)

    @property
    def _select(self) -> str:
        return f"select cast({self._key} as text), {self._body} from {self._table}"  # noqa: S608 - names are checked

    def _as_body(self, names: Sequence[str], key: str, row: Sequence[Any]) -> bytes:
        """Return a row as the body of a message. A body that is null becomes empty, which no reader accepts."""
        if not self._user_table.body:
            fields = dict(zip(names, row, strict=True))
            # Keys are text, as in a message.
            own = next(name for name in names if name.lower() == self._user_table.key.lower())
            return msgspec.json.encode(fields | {own: key})
        [body] = row
        return body if isinstance(body, bytes) else str("" if body is None else body).encode()

    @property
    def _reader(self) -> sqlite3.Connection:
        assert self._connection is not None, "the origin is not open"
        return self._connection

    async def _run(self, act: Callable[[], T]) -> T:
        try:
            with sqlite_errors(self.path):
                return await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except sqlite3.OperationalError as error:
            # The table was fine when it was opened.
            raise DatabaseError(f"table {self._user_table.name} in {self.path} has changed: {error}") from error

    def _open(self) -> None:
        """Open the file, and check that the table has these columns and a unique key."""
        if not Path(self.path).is_file():
            raise DatabaseError(f"there is no file {self.path}; name the SQLite database that has the rows")
        place = f"{Path(self.path).absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(place, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        self._connection = connection
        connection.execute("pragma query_only = on")
        name, key = self._user_table.name, self._user_table.key
        try:
            connection.execute(f"{self._select} limit 0")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            raise self._user_table.misfit(str(error)) from error
        [kind] = declared_types(connection, name, key)
        if "INT" not in kind:
            if not any(word in kind for word in ("CHAR", "CLOB", "TEXT")):
                raise self._user_table.misfit(
                    f"its column {key} is declared as {kind or 'no type'}, and a key is text or a whole number"
                )
            if folds_texts(connection, name, key):
                raise self._user_table.misfit(f"keys that differ can be equal in its column {key}")
        if not connection.execute(_UNIQUE, {"table": name, "key": key}).fetchall():
            raise self._user_table.misfit(f"no unique index has the column {key}, and it alone")


def connect(address: Address) -> Origin:
    """`sqlite:///file.db?table=NAME&key=COLUMN`, and `body` for a column with the whole message."""
    options = address.take("table", "key", "body")
    return SqliteOrigin(address.file(), OriginTable.of_options(options, address.name))


def _is_text(key: str) -> bool:
    """Whether a key can be encoded; one with half of a pair of surrogates is in no table."""
    return key.isascii() or not any("\ud800" <= character <= "\udfff" for character in key)


# The key of a rowid table has no index of its own. An index in another order would be sorted for every page.
_UNIQUE = """
select 1 from pragma_table_info(:table) where upper(type) = 'INTEGER' and pk = 1 and name = :key collate nocase
    and (select count(*) from pragma_table_info(:table) where pk > 0) = 1
union all
select 1 from pragma_index_list(:table) as listed where "unique" and not partial
    and (select group_concat(name || ' ' || coll) from pragma_index_xinfo(listed.name) where key)
        = :key || ' BINARY' collate nocase
"""
