"""A database in the memory of one process: what the memory source, ledger and sink share."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec

from keywise.core.clock import Clock, boot_time
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry
from keywise.core.history import HistoryRecord
from keywise.core.target import TargetNote

TOKEN_NONCE_BITS = 24


class Message(msgspec.Struct, frozen=True):
    """One message of a queue."""

    body: bytes
    sent_at: float
    visible_at: float
    count: int = 0
    receipt: int = 0
    key: str | None = None
    """The key that it was parked under."""

    @property
    def is_fresh(self) -> bool:
        """Whether it was neither delayed nor handed over yet."""
        return self.count == 0 and self.visible_at <= self.sent_at


class MemoryScope(msgspec.Struct):
    """What a ledger keeps for one pipeline."""

    entries: dict[str, Entry] = {}
    letters: dict[int, tuple[float, DeadLetter]] = {}
    controls: dict[str, Controls] = {}
    """At most one, under an empty name."""
    periodic_locks: dict[str, float] = {}
    """When each was done last."""
    lines: dict[int, HistoryRecord] = {}


class MemoryDatabase:
    """Dictionaries of immutable values, one writer at a time, with an undo log while a transaction is open."""

    has_one_writer = True

    def __init__(self, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        offset_s = time.time() - boot_time()
        self.clock = clock or (lambda: offset_s + boot_time())
        self.scopes: dict[str, MemoryScope] = {}
        self.queues: dict[str, dict[int, Message]] = {}
        self.bells: dict[str, asyncio.Event] = {}
        """By the name of a queue: rung when something is sent to it, by whomever."""
        self.tables: dict[str, dict[Any, Any]] = {}
        self.targets: dict[tuple[str, str], tuple[TargetNote | None, bool]] = {}
        """By the names of a sink and of a target: the run that has built it, and whether it is live."""
        self.lines: dict[str, Any] = {}
        """Requests of serial functions, by the name of the function."""
        self.turn_bells: dict[str, list[asyncio.Event]] = {}
        self._rng = rng or random.SystemRandom()
        self._numbers = 0
        self.tokens = 0
        self._writer = asyncio.Lock()
        self._undo: list[tuple[dict[Any, Any], Any, Any]] | None = None

    def scope(self, name: str) -> MemoryScope:
        return self.scopes.setdefault(name, MemoryScope())

    def queue(self, name: str) -> dict[int, Message]:
        return self.queues.setdefault(name, {})

    def table(self, name: str) -> dict[Any, Any]:
        return self.tables.setdefault(name, {})

    def number(self) -> int:
        """A number that was never given before."""
        self._numbers += 1
        return self._numbers

    def token(self) -> int:
        """A sequence number with a nonce: not reused even if the sequence is set back by a restore."""
        self.tokens += 1
        return self.tokens << TOKEN_NONCE_BITS | self._rng.getrandbits(TOKEN_NONCE_BITS)

    def tokens_above(self, floor: int) -> int:
        """Grant only tokens above this one; return one that none before is above."""
        self.tokens = max(self.tokens, floor >> TOKEN_NONCE_BITS)
        return ((self.tokens + 1) << TOKEN_NONCE_BITS) - 1

    def set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Write one value, or delete it with None; undone if the open transaction is rolled back."""
        if self._undo is not None:
            self._undo.append((table, key, table.get(key)))
        _put(table, key, value)

    def committed(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """Return a table without what the open transaction has set: it may still be rolled back."""
        if not self._undo:
            return table
        before = dict(table)
        for changed, key, value in reversed(self._undo):
            if changed is table:
                _put(before, key, value)
        return before

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Wait for the open transaction, if there is one, and keep others out."""
        return self._writer

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Everything that is set meanwhile stays, or nothing of it."""
        await self.begin()
        try:
            yield
        except BaseException:
            self.rollback()
            raise
        self.commit()

    async def begin(self) -> None:
        """Open a transaction, as soon as the one before has ended."""
        await self._writer.acquire()
        self._undo = []

    def commit(self) -> None:
        assert self._undo is not None, "a commit needs a transaction"
        self._undo = None
        self._writer.release()

    def rollback(self) -> None:
        self.rollback_to(0)
        self.commit()

    def savepoint(self) -> int:
        assert self._undo is not None, "a savepoint needs a transaction"
        return len(self._undo)

    def rollback_to(self, savepoint: int) -> None:
        assert self._undo is not None, "a rollback needs a transaction"
        while len(self._undo) > savepoint:
            table, key, value = self._undo.pop()
            _put(table, key, value)


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
