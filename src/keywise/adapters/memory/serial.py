"""Turns in memory: the rules applied to dictionaries, for the callers of one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, TypeVar

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial_book import Lines, MemoryTurnBook, lines_of
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


class MemoryTurns:
    """The requests of one serial function in a memory database. It is also its own operator."""

    def __init__(self, database: MemoryDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.database = database
        self.owner = owner
        self.operator = self
        self.is_shared = False
        self._function = function
        self._policy = policy
        self._bell = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.database.turn_bells.setdefault(self._function, []).append(self._bell)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.database.turn_bells[self._function].remove(self._bell)

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
        def act(book: MemoryTurnBook) -> dict[str, Reply]:
            book.live(self.owner)
            known = {id: record.reply for id in ids if (record := book.record(id)) is not None}
            return {id: reply for id, reply in known.items() if reply is not None}

        return await self._step(act)

    async def wait(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[TurnsTransaction]:
        return self._transaction()

    # The operator's verbs.

    async def now(self) -> float:
        return self.database.clock()

    async def states(self, limit: int) -> list[KeyState]:
        lines = self._lines
        states = [self._state(lines, key) for key in {*lines.waiting, *lines.runs, *lines.observed}]
        return sorted(states, key=lambda state: (-state.waiting, state.key))[:limit]

    async def history(self, key: str | None, limit: int) -> list[Record]:
        found = [record for record in self._lines.records.values() if key is None or record.request.key == key]
        return sorted(found, key=_newest, reverse=True)[:limit]

    async def record(self, id: str) -> Record | None:
        return self._book().record(id)

    async def switches(self) -> list[Switch]:
        return list(self._lines.switches.values())

    async def switch(self, switch: Switch | None, keys: str = "", is_pattern: bool = False) -> None:
        def act(book: MemoryTurnBook) -> None:
            name = (keys, is_pattern) if switch is None else (switch.keys, switch.is_pattern)
            self.database.set(book.lines.switches, name, switch)
            book.has_news = True

        await self._step(act)

    async def prune(self, retention_s: float) -> int:
        def act(book: MemoryTurnBook) -> int:
            records = book.lines.records
            gone = [name for name, record in records.items() if rules.is_prunable(record, book.now, retention_s)]
            for name in gone:
                id = records[name].request.id
                self.database.set(records, name, None)
                if book.lines.ids.get(id) == name:
                    self.database.set(book.lines.ids, id, None)
            return len(gone)

        return await self._step(act)

    @property
    def _lines(self) -> Lines:
        return lines_of(self.database, self._function)

    def _state(self, lines: Lines, key: str) -> KeyState:
        waiting, running = lines.waiting.get(key, {}), {**lines.runs.get(key, {}), **lines.observed.get(key, {})}
        began = min((lines.records[key, place].started_at for place in running), default=0.0)
        asked = min((lines.records[key, place].asked_at for place in waiting), default=0.0)
        hold = lines.holds.get(key)
        kept = [record for (name, _), record in lines.records.items() if name == key]
        return KeyState(
            key=key,
            waiting=len(waiting),
            running=len(running),
            owner="" if hold is None else hold.owner,
            since=began if running else asked,
            overlaps=sum(record.overlaps > 0 for record in kept),
        )

    def _book(self) -> MemoryTurnBook:
        return MemoryTurnBook(self.database, self._function, self._policy)

    async def _step(self, act: Callable[[MemoryTurnBook], T]) -> T:
        async with self.database.exclusive():
            return self._act(act)

    def _act(self, act: Callable[[MemoryTurnBook], T]) -> T:
        book = self._book()
        result = act(book)
        if book.has_news:
            for bell in self.database.turn_bells.get(self._function, ()):
                if bell is not self._bell:
                    bell.set()
        return result

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[TurnsTransaction]:
        async with self.database.transaction():
            yield _Transaction(self)


class _Transaction:
    """A transaction of the memory database; what is set in it is undone with it."""

    def __init__(self, turns: MemoryTurns) -> None:
        self.connection = turns.database
        self._turns = turns

    async def answer(self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1) -> Answered:
        turns = self._turns
        first = (rules.Word.ENDS,)
        return turns._act(lambda book: turnkeeping.answer(book, turns.owner, replies, (limit, run_max), allowed=first))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        begin = self.connection.savepoint()
        try:
            yield
        except BaseException:
            self.connection.rollback_to(begin)
            raise


def _newest(record: Record) -> tuple[float, int, str]:
    return record.asked_at, record.place, record.request.key


def connect(address: Address, owner: str, policy: TurnPolicy) -> Turns:
    """`memory://`; it serves the callers of one process only."""
    address.take()
    return MemoryTurns(address.shared(MemoryDatabase), address.name, owner, policy)
