"""What tables of the user's in Postgres have in common: how they are created, their columns, and what they refuse."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg
import msgspec

from keywise.adapters.postgres.database import PostgresDatabase, postgres_errors
from keywise.adapters.postgres.schema.install import LOCKS
from keywise.core.errors import PermanentError, UnavailableError


class Column(msgspec.Struct, frozen=True):
    """A column of a table."""

    type: str
    folds: bool
    """Whether texts that differ can be equal in it."""

    @property
    def is_text(self) -> bool:
        """Whether it keeps any text as it is."""
        return self.type.startswith(("text", "character varying"))


async def created_columns(connection: Any, table: str, creation: str) -> Mapping[str, Column]:
    """Create a table if there is none, and return its columns by name."""
    # Of two processes that begin at once, one makes it.
    await connection.execute(f"select pg_advisory_xact_lock({LOCKS}, 0)")
    if await connection.fetchval("select to_regclass($1) is null", table):
        await connection.execute(creation)
    return columns_of(await connection.fetch(COLUMNS, table))


def columns_of(rows: Sequence[Any]) -> Mapping[str, Column]:
    """The columns of a table by name, from the rows that `COLUMNS` returns."""
    return {name: Column(kind, folds) for name, kind, folds in rows}


@contextmanager
def refusals(database: PostgresDatabase, table: str) -> Iterator[None]:
    """Turn errors of a write into ours: of a change that will never fit into the table, `PermanentError`."""
    try:
        with postgres_errors(database.name, of_handler=True):
            yield
    except TimeoutError as error:
        raise UnavailableError(f"{database.name}: no answer in time") from error
    except asyncpg.UndefinedTableError as error:
        if table not in str(error):
            raise PermanentError(f"table {table} refuses it: {error}") from error
        # No fault of a change: it was dropped, or it has gone live and has the name of the sink by now.
        raise UnavailableError(f"{database.name}: there is no table {table}") from error
    except _REFUSALS as error:
        raise PermanentError(f"table {table} refuses it: {error}") from error


_REFUSALS = (
    asyncpg.PostgresError,
    asyncpg.DataError,
    UnicodeError,
    msgspec.MsgspecError,
    RecursionError,
)
"""What may pass has become an error of ours before."""
COLUMNS = (
    "select attname, format_type(atttypid, atttypmod), "
    "not coalesce(collisdeterministic, true) or format_type(atttypid, null) like '%citext' "
    "from pg_attribute left join pg_collation on pg_collation.oid = attcollation "
    "where attrelid = to_regclass($1) and attnum > 0 and not attisdropped"
)
