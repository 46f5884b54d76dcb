"""One session of a Postgres database that holds advisory locks: a connection of its own, whose loss is noticed at once.

Whatever happens to the session, its locks are gone with it; whoever works under them has to be told within a second.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import asyncpg

from keywise.adapters.postgres.database import LOST, PostgresDatabase, postgres_errors
from keywise.core.errors import KeywiseError, UnavailableError

APPLICATION = "keywise lock"
"""How the session is named in `pg_stat_activity`; the steps on the server know it by this name."""
BEAT_S = 0.4
"""How often the session is asked whether it is there: what nobody told, a broken network, is noticed so."""
ANSWER_S = 0.5
BEFORE_LOCKS = ("22", "23", "40")
"""Data that cannot be, an id that somebody else has stored meanwhile, and steps that waited for each other."""


class LockSession:
    """Made when it is needed first, and again after a loss. What is done on it is done one after another."""

    def __init__(self, database: PostgresDatabase, on_loss: Callable[[], None]) -> None:
        self._database = database
        self._on_loss = on_loss
        self._connection: Any = None
        self._using = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*LOST):
                await connection.close(timeout=ANSWER_S)

    async def step(self, statement: str, *arguments: object) -> Sequence[Any]:
        try:
            return await self._step(statement, *arguments)
        except UnavailableError as error:
            # The server had ended the session before: nothing was sent, so that a new one may do it.
            if not isinstance(error.__cause__, asyncpg.InterfaceError | asyncpg.InternalClientError):
                raise
        return await self._step(statement, *arguments)

    async def _step(self, statement: str, *arguments: object) -> Sequence[Any]:
        async with self._used() as connection:
            rows: Sequence[Any] = await connection.fetch(statement, *arguments)
            return rows

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[Any]:
        async with self._using:
            connection = await self._opened()
            try:
                with postgres_errors(self._database.name):
                    yield connection
            except BaseException as error:
                # A step that failed may have taken locks, which no rollback gives back.
                if not _is_before_locks(error):
                    self._lose(connection)
                raise

    async def _opened(self) -> Any:
        if self._connection is None:
            self._connection = await self._database.connected(APPLICATION)
            self._connection.add_termination_listener(self._lose)
        return self._connection

    def _lose(self, connection: Any) -> None:
        if connection is self._connection and connection is not None:
            self._connection = None
            connection.terminate()
            self._on_loss()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            connection = self._connection
            if connection is not None and not await self._is_there(connection):
                self._lose(connection)

    async def _is_there(self, connection: Any) -> bool:
        """Asked on the session itself, or about it on another one if it has something to do."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if not self._using.locked():
                    async with self._using:
                        await connection.execute("select 1")
                    return True
                session = connection.get_server_pid()
                return bool(await self._database.step("select from pg_stat_activity where pid = $1", session))
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, KeywiseError):
            return False


def _is_before_locks(error: BaseException) -> bool:
    """Whether a step failed over the requests in it, or by meeting another one: all that is done before any lock."""
    cause = error.__cause__
    return isinstance(cause, asyncpg.PostgresError) and (cause.sqlstate or "")[:2] in BEFORE_LOCKS
