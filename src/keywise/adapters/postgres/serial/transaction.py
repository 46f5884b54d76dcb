"""A transaction of a Postgres database in which a function writes, and in which its answer is stored.

It costs as many round trips as one by hand: what begins and ends it travels together with savepoints.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import asyncpg

from keywise.adapters.postgres.database import FOR_HANDLERS, postgres_errors
from keywise.adapters.postgres.serial.tables import Taking, TurnTables
from keywise.core.errors import DatabaseError, OutcomeUnknownError
from keywise.core.serial.contract import Answered, Reply

LOCK_S = 1
"""How long a transaction waits for a lock that another program has; it is tried again inside of the deadline."""
NOT_YOURS = "a function has to leave commit and rollback to keywise"


class PostgresTurnsTransaction:
    """There is always one savepoint, behind the last function that was done: what follows can be undone alone."""

    def __init__(self, tables: TurnTables, connection: Any) -> None:
        self.connection = connection
        self._tables = tables
        self._is_written = False
        """Something may have been done since the savepoint."""

    async def answer(self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1) -> Answered:
        self._check()
        return await self._tables.answer_within(self.connection, replies, Taking(limit, run_max))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        if self._is_written:
            await self._execute("release keywise; savepoint keywise")
        self._is_written = True
        try:
            with postgres_errors(self._tables.database.name, of_handler=True):
                yield
        except BaseException:
            # It is still there after that.
            await self._execute("rollback to keywise")
            self._is_written = False
            raise
        self._check()

    def _check(self) -> None:
        if not self.connection.is_in_transaction():
            raise OutcomeUnknownError(NOT_YOURS)

    async def _execute(self, statement: str) -> None:
        with _not_theirs(), postgres_errors(self._tables.database.name):
            await self.connection.execute(statement)


@asynccontextmanager
async def transaction(
    tables: TurnTables, *, has_turns: bool, guard: str = ""
) -> AsyncIterator[PostgresTurnsTransaction]:
    """Open one; the guard is a statement that waits until the work may begin."""
    name = f"set local application_name = '{session_name(tables.number, tables.owner)}'; " if has_turns else ""
    if guard:
        guard = f"set local lock_timeout = '{LOCK_S}s'; {guard}; set local lock_timeout to default; "
    begin = f"begin; {name}{guard}{FOR_HANDLERS}; savepoint keywise"
    end = f"release keywise; {tables.database.reset_search_path}; commit"
    with _not_theirs():
        async with tables.database.transaction(begin=begin, end=end) as connection:
            yield PostgresTurnsTransaction(tables, connection)


def session_name(function: int, owner: str) -> str:
    """How the server finds the transactions of an owner that was lost; it makes the same name."""
    return f"keywise turn {function:d} {sha256(owner.encode()).hexdigest()[:16]}"


class _not_theirs:
    """Says what it means if there is no savepoint any more."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DatabaseError) and isinstance(
            error.__cause__, asyncpg.NoActiveSQLTransactionError | asyncpg.InvalidSavepointSpecificationError
        ):
            raise OutcomeUnknownError(NOT_YOURS) from error
