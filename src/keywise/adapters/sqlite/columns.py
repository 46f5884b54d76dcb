"""What tables of the user's in SQLite have in common: how they are found, which columns fit, and what they refuse."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.core.errors import PermanentError, UnavailableError
from keywise.core.statements import quoted


async def create_if_missing(database: SqliteDatabase, table: str, creation: str) -> None:
    """Create a table, unless there is one: only then this waits for other writers."""
    if not database.read(_FIND_TABLE, (table,)):
        await database.execute(creation)


@contextmanager
def refusals(database: SqliteDatabase, table: str) -> Iterator[None]:
    """Turn errors of a write into ours: of a change that will never fit into the table, `PermanentError`."""
    try:
        yield
    except _REFUSALS as error:
        raise PermanentError(f"table {table} refuses it: {error}") from error
    except sqlite3.Error as error:
        if str(error) in (f"no such table: {table}", f"no such table: main.{table}"):
            # No fault of a change: it was dropped, or it has gone live and has the name of the sink by now.
            raise UnavailableError(f"{database.path}: {error}") from error
        # Not around the write: batches are often small, and this would be a fifth of the time of a write.
        with sqlite_errors(database.path):
            raise


def folds_texts(connection: sqlite3.Connection, table: str, column: str) -> bool:
    """Say whether texts that differ can be equal in a column; a column that is missing folds nothing."""
    with suppress(sqlite3.OperationalError):
        sample = f"select {quoted(column)} as k from {quoted(table)} where false union all select 'a'"  # noqa: S608
        [[folds]] = connection.execute(f"select k in ('A', 'a ') from ({sample})").fetchall()  # noqa: S608
        return bool(folds) or not all(map(_keeps_text, declared_types(connection, table, column)))
    return False


def declared_types(connection: sqlite3.Connection, table: str, column: str) -> list[str]:
    """Return the type that a column was declared with, in capitals; nothing if the column is missing."""
    return [kind.upper() for (kind,) in connection.execute(_DECLARED_TYPE, (table, column))]


def values_of(body: bytes, columns: Sequence[str]) -> list[object]:
    """Return the fields of a JSON object for columns: text and numbers as they are, others as JSON text."""
    try:
        fields = _DECODE(body)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"columns= names fields of JSON objects, and this is none: {error}") from error
    return [_value(fields.get(name)) for name in columns]


def _value(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.encode(value).decode()


def _keeps_text(kind: str) -> bool:
    """Say whether a column of this type stores digits as the text that they are: `007` is not 7."""
    return "INT" not in kind and (not kind or any(one in kind for one in ("CHAR", "CLOB", "TEXT", "BLOB")))


_DECLARED_TYPE = "select type from pragma_table_info(?) where name = ? collate nocase"
_FIND_TABLE = "select 1 from sqlite_master where name = ? collate nocase"
_DECODE = msgspec.json.Decoder(dict[str, Any]).decode
_REFUSALS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
    OverflowError,
    UnicodeError,
    msgspec.MsgspecError,
    RecursionError,
)
