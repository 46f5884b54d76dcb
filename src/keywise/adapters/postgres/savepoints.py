"""Savepoints of a transaction of a Postgres database: what a handler writes inside of one is undone if it raises."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from keywise.adapters.postgres.database import FOR_HANDLERS, PostgresDatabase, postgres_errors
from keywise.core.errors import DatabaseError


class Savepoints:
    """Those of one transaction."""

    def __init__(self, database: PostgresDatabase, connection: Any) -> None:
        self._database = database
        self._connection = connection
        self._begin = f"{FOR_HANDLERS}; savepoint keywise"
        """The first one of a transaction may be a handler's."""

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        with postgres_errors(self._database.name):
            await self._connection.execute(self._begin)
        self._begin = "savepoint keywise"
        try:
            with postgres_errors(self._database.name, of_handler=True):
                yield
        except BaseException:
            await self._end("rollback to keywise; release keywise")
            raise
        await self._end("release keywise")

    async def _end(self, statement: str) -> None:
        try:
            with postgres_errors(self._database.name):
                await self._connection.execute(statement)
        except DatabaseError as error:
            if isinstance(
                error.__cause__, asyncpg.NoActiveSQLTransactionError | asyncpg.InvalidSavepointSpecificationError
            ):
                raise DatabaseError("a handler has to leave commit and rollback to keywise") from error
            raise
