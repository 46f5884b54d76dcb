"""Turns in a SQLite file: the rules, applied under the file's write lock, for all processes of one machine."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, TypeVar

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.adapters.sqlite.ledger.transaction import SqliteTransaction
from keywise.adapters.sqlite.ledger.working_set import SqliteScope
from keywise.adapters.sqlite.serial.book import SqliteTurnBook, last_news, replies
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import UnavailableError
from keywise.core.resource import opening
from keywise.core.serial import rules
from keywise.core.serial import steps as turnkeeping
from keywise.core.serial.contract import (
    Answered,
    Ending,
    KeyState,
    Record,
    Reply,
    Request,
    Switch,
    Turn,
    TurnPolicy,
    Turns,
    TurnsTransaction,
)
from keywise.core.url import Address

T = TypeVar("T")

LOOK_S = 0.001
LOOK_MAX_S = 0.02
"""Other processes cannot ring a bell: whoever waits looks again, less often the longer nothing happens."""


class SqliteTurns:
    """The requests of one serial function in a SQLite database. It is also its own operator."""

    def __init__(self, database: SqliteDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.database = database
        self.owner = owner
        self.operator = self
        self.is_shared = False
        self._scope = SqliteScope(database, function, LedgerPolicy())
        self._policy = policy
        self._news = 0
        """The number of the last news that this owner has seen."""

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            self._scope.number = await self.database.numbered(_SCOPE, _NEW_SCOPE, self._scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        return await self._step(lambda book: turnkeeping.ask(book, self.owner, requests))

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        return await self._step(lambda book: turnkeeping.take(book, self.owner, limit, run_max))

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        return await self._step(lambda book: turnkeeping.answer(book, self.owner, replies, (limit, run_max), requests))

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._step(lambda book: turnkeeping.give_back(book, self.owner, turns))

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        return await self._step(lambda book: turnkeeping.renew(book, self.owner, tokens, before))

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        return await self._step(lambda book: turnkeeping.withdraw(book, self.owner, ids, outcome, cause))

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        with sqlite_errors(self.database.path):
            seen = last_news(self.database.reader, self._scope.number)
            found = replies(self.database.reader, self._scope.number, ids)
        self._news = max(self._news, seen)
        await self._step(lambda book: book.live(self.owner))
        return found

    async def wait(self, wait_s: float) -> None:
        loop, look_s = asyncio.get_running_loop(), LOOK_S
        until = loop.time() + wait_s
        while (left_s := until - loop.time()) > 0:
            with sqlite_errors(self.database.path):
                news = last_news(self.database.reader, self._scope.number)
            if news > self._news:
                self._news = news
                return
            await asyncio.sleep(min(look_s, left_s))
            look_s = min(look_s * 1.5, LOOK_MAX_S)

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[TurnsTransaction]:
        return self._transaction()

    # The operator's verbs.

    async def now(self) -> float:
        return self.database.now()

    async def states(self, limit: int) -> list[KeyState]:
        return self._read(lambda book: book.states(limit))

    async def history(self, key: str | None, limit: int) -> list[Record]:
        return self._read(lambda book: book.history(key, limit))

    async def record(self, id: str) -> Record | None:
        return self._read(lambda book: book.record(id))

    async def switches(self) -> list[Switch]:
        return self._read(lambda book: list(book.switches()))

    async def switch(self, switch: Switch | None, keys: str = "", is_pattern: bool = False) -> None:
        await self._step(lambda book: book.set_switch(switch, keys, is_pattern))

    async def prune(self, retention_s: float) -> int:
        return await self._step(lambda book: book.prune(retention_s))

    def _read(self, act: Callable[[SqliteTurnBook], T]) -> T:
        with sqlite_errors(self.database.path):
            return act(SqliteTurnBook(self.database.reader, self._scope, self._policy, self.database.now()))

    async def _step(self, act: Callable[[SqliteTurnBook], T]) -> T:
        return await self.database.write(lambda connection: self._act(connection, act))

    def _act(self, connection: sqlite3.Connection, act: Callable[[SqliteTurnBook], T]) -> T:
        book = SqliteTurnBook(connection, self._scope, self._policy, self.database.now())
        result = act(book)
        self._news = book.store(self.owner)
        return result

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[TurnsTransaction]:
        async with self.database.transaction() as connection:
            yield _Transaction(self, connection)


class _Transaction:
    """A transaction of the file, in which a function writes and its answer is stored."""

    def __init__(self, turns: SqliteTurns, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._turns = turns
        self._inner = SqliteTransaction(turns._scope, connection)

    async def answer(self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1) -> Answered:
        turns, first = self._turns, (rules.Word.ENDS,)
        if not self.connection.in_transaction:
            raise UnavailableError(f"{turns.database.path}: the transaction was rolled back")
        with sqlite_errors(turns.database.path):
            return turns._act(
                self.connection,
                lambda book: turnkeeping.answer(book, turns.owner, replies, (limit, run_max), allowed=first),
            )

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        return self._inner.savepoint()


def connect(address: Address, owner: str, policy: TurnPolicy) -> Turns:
    """`sqlite:///file.db`, for all processes that open this file."""
    address.take()
    return SqliteTurns(address.shared(SqliteDatabase, address.file()), address.name, owner, policy)


_SCOPE = "select id from keywise_scopes where name = ?"
_NEW_SCOPE = "insert or ignore into keywise_scopes (name) values (?)"
