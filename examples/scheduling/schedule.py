"""The schedule: a table of visits, in Postgres or in a SQLite file, read and written by the same statements."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any
from urllib.parse import unquote

import asyncpg
from examples.scheduling.care import Visit

CONNECTIONS_MAX = 8
BUSY_S = 10.0

# Nothing in it forbids a second visit at the same time: as in most schedules, that is for the code to see to.
CREATE = (
    "create table if not exists scheduling_visits (id text not null, market text not null, day text not null, "
    "car integer not null, starts integer not null, ends integer not null)",
    "create index if not exists scheduling_visits_of on scheduling_visits (market, day)",
)
EMPTY = "delete from scheduling_visits"
SELECT = "select id, market, day, car, starts, ends from scheduling_visits"
SELECT_DAY = f"{SELECT} where market = $1 and day = $2"
INSERT = "insert into scheduling_visits (id, market, day, car, starts, ends) values ($1, $2, $3, $4, $5, $6)"


class ScheduleError(Exception):
    """A schedule that cannot be opened; the message says what to do."""


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    """A connection of one's own, which commits each statement by itself: the file's, or some to Postgres.

    The table is there, whoever comes first.
    """
    async with AsyncExitStack() as stack:
        try:
            connection = await _opened(url, stack)
            for statement in CREATE:
                await _run(connection, statement)
        except (OSError, sqlite3.Error, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # Its URL may hold a password.
            raise ScheduleError(
                f"the schedule cannot be opened: {type(error).__name__}: {error}; look whether its server runs, its "
                "database or folder exists, and you may create tables there"
            ) from error
        yield connection


async def empty(connection: Any) -> None:
    await _run(connection, EMPTY)


async def visits_of(connection: Any, market: str, day: str) -> list[Visit]:
    return [Visit(*row) for row in await _run(connection, SELECT_DAY, market, day)]


async def all_visits(connection: Any) -> list[Visit]:
    return [Visit(*row) for row in await _run(connection, SELECT)]


async def add(connection: Any, visit: Visit) -> None:
    await _run(connection, INSERT, visit.id, visit.market, visit.day, visit.car, visit.starts, visit.ends)


async def _opened(url: str, stack: AsyncExitStack) -> Any:
    if url.startswith("sqlite:///"):
        path = unquote(url.removeprefix("sqlite:///"))
        connection = stack.enter_context(closing(sqlite3.connect(path, BUSY_S, isolation_level=None)))
        connection.execute("pragma journal_mode = wal")
        return connection
    if url.startswith(("postgresql://", "postgres://")):
        return await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=CONNECTIONS_MAX))
    raise ScheduleError("a schedule is in SQLite or in Postgres; its URL begins with sqlite:/// or postgresql://")


async def _run(connection: Any, statement: str, *values: Any) -> Sequence[Any]:
    if isinstance(connection, sqlite3.Connection):
        # To SQLite, $1 is a parameter whose name is 1.
        return connection.execute(statement, {str(number): value for number, value in enumerate(values, 1)}).fetchall()
    rows: Sequence[Any] = await connection.fetch(statement, *values)
    return rows
