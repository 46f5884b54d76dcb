"""Tables that functions of the merge queue write in the store's own transaction, while processes are killed."""

import asyncio
import sqlite3
from collections import Counter
from typing import Any, Protocol

import asyncpg

CREATE = "create table if not exists books (number {number}, key text, id text, before integer)"
COUNT = "select count(*) from books where key = {0}"
ENTER = "insert into books (key, id, before) values ({0}, {1}, {2})"
ALL = "select key, id, before from books order by number"
NOTHING = {"ExpiredError", "FailedError", "LostError", "RefusedError"}
"""After these, nothing of what a function wrote in the transaction may be there."""


class Book(Protocol):
    """All rows are of transactions that were committed."""

    def create(self) -> None: ...

    async def taken(self, connection: Any, key: str) -> int: ...

    async def enter(self, connection: Any, key: str, id: str, before: int) -> None: ...

    def rows(self) -> list[tuple[str, str, int]]: ...


class SqliteBook:
    def __init__(self, url: str) -> None:
        self._path = url.removeprefix("sqlite:///")

    def create(self) -> None:
        self._ask(CREATE.format(number="integer primary key"))

    async def taken(self, connection: Any, key: str) -> int:
        return connection.execute(COUNT.format("?"), (key,)).fetchone()[0]

    async def enter(self, connection: Any, key: str, id: str, before: int) -> None:
        connection.execute(ENTER.format("?", "?", "?"), (key, id, before))

    def rows(self) -> list[tuple[str, str, int]]:
        return self._ask(ALL)

    def _ask(self, statement: str) -> list:
        with sqlite3.connect(self._path, timeout=30) as file:
            return file.execute(statement).fetchall()


class PostgresBook:
    def __init__(self, url: str) -> None:
        self._url = url

    def create(self) -> None:
        asyncio.run(self._ask(CREATE.format(number="bigserial")))

    async def taken(self, connection: Any, key: str) -> int:
        return await connection.fetchval(COUNT.format("$1"), key)

    async def enter(self, connection: Any, key: str, id: str, before: int) -> None:
        await connection.execute(ENTER.format("$1", "$2", "$3"), key, id, before)

    def rows(self) -> list[tuple[str, str, int]]:
        return [tuple(row) for row in asyncio.run(self._ask(ALL))]

    async def _ask(self, statement: str) -> list:
        connection = await asyncpg.connect(self._url)
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()


def book_of(url: str) -> Book:
    return SqliteBook(url) if url.startswith("sqlite") else PostgresBook(url)


def judged(book: Book, told: list[tuple[str, str]]) -> list[str]:
    """What is wrong with the rows: in the order of a key each saw all that were before it, and callers know of them."""
    faults, rows = [], book.rows()
    seen: dict[str, int] = {}
    for key, id, before in rows:
        if before != seen.get(key, 0):
            faults.append(f"{id} saw {before} rows of {key} where {seen.get(key, 0)} were")
        seen[key] = seen.get(key, 0) + 1
    there = Counter(id for _, id, _ in rows)
    faults += [f"{id} is there {n} times" for id, n in there.items() if n > 1]
    faults += [f"{id} was told done, and is not there" for id, outcome in told if outcome == "done" and id not in there]
    faults += [f"{id} was told {outcome}, and is there" for id, outcome in told if outcome in NOTHING and id in there]
    return faults
