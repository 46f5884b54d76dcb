"""A durable queue in a SQLite file.

Messages that nobody touched lie in `ready`, in the order of sending; those that are handed over, delayed
or released lie in `held` until they are visible. So a drain reads and deletes one stretch of one table.
Those that were released because their key is blocked carry that key in the column `key`.
"""

import asyncio
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.core.change import Delivery
from keywise.core.resource import opening
from keywise.core.source import Source, visibility_of
from keywise.core.statements import read_statements
from keywise.core.table_queue import TableQueue
from keywise.core.url import Address

QUEUE_BITS = 40
"""Each queue has a stretch of ids of its own."""
POLL_FIRST_S, POLL_MAX_S = 0.001, 0.05
PEEK_AFTER_S = 0.0002

_SQL = read_statements(__name__)


class SqliteSource(TableQueue):
    """One queue of a SQLite database."""

    def __init__(self, database: SqliteDatabase, name: str, visibility_s: float | None = None) -> None:
        super().__init__(visibility_s)
        self.database = database
        self._name = name
        self._queue = self._first = self._last = 0
        self._sent = asyncio.Event()

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            self._queue = await self.database.numbered(_SQL["number"], _SQL["register"], self._name)
        self._first = self._queue << QUEUE_BITS
        self._last = self._first + (1 << QUEUE_BITS) - 1
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if not await self.arrived(wait_s):
            return []
        return await self.database.write(lambda connection: self._take(connection, limit))

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        until = self.database.now() + visibility_s
        return await self.database.write(lambda connection: self._extend(connection, deliveries, until))

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [(one.id, one.receipt) for one in deliveries]
        await self.database.write(lambda connection: connection.executemany(_SQL["ack"], receipts))

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        until = self.database.now() + delay_s
        moved = [(until, one.id, one.receipt) for one in deliveries]
        await self.database.write(lambda connection: connection.executemany(_SQL["release"], moved))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        now = self.database.now()
        moved = [(now + s, key, one.id, one.receipt) for one, key, s in zip(deliveries, keys, delays_s, strict=True)]
        await self.database.write(lambda connection: connection.executemany(_SQL["park"], moved))

    async def recall(self, keys: Sequence[str] | None) -> None:
        await self.database.write(lambda connection: self._recall(connection, keys))
        self._sent.set()

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        await self.database.write(lambda connection: self._insert(connection, bodies, delay_s))
        self._sent.set()

    async def depth(self) -> int:
        [[depth]] = self.database.read(_SQL["depth"], (self._first, self._last, self._queue))
        assert isinstance(depth, int)
        return depth

    async def arrived(self, wait_s: float) -> bool:
        """Whether something is visible; looks again in short steps, because another process may send."""
        loop = asyncio.get_running_loop()
        until, step = loop.time() + wait_s, POLL_FIRST_S
        while not self._any_visible():
            left = until - loop.time()
            if left <= 0:
                return False
            self._sent.clear()
            try:
                async with asyncio.timeout(min(step, left)):
                    await self._sent.wait()
            except TimeoutError:
                step = min(step * 1.5, POLL_MAX_S)
        return True

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        # A commit has to be on its way first: its thread cannot begin while this one is busy.
        await asyncio.sleep(PEEK_AFTER_S)
        with sqlite_errors(self.database.path):
            return self._fresh(self.database.reader, limit, int(after.id))

    def queue_in(self, connection: Any) -> "SqliteTransactionalQueue":
        return SqliteTransactionalQueue(self, connection)

    def _any_visible(self) -> bool:
        return bool(self.database.read(_SQL["visible"], (self._first, self._last, self._queue, self.database.now())))

    def _insert(self, connection: sqlite3.Connection, bodies: Sequence[bytes], delay_s: float) -> None:
        queue, now = self._queue, self.database.now()
        [following] = connection.execute(_SQL["take_ids"], (len(bodies), queue)).fetchone()
        first = self._first + following - len(bodies)
        if delay_s > 0:
            rows = ((first + index, queue, now + delay_s, 0, 0, now, body, None) for index, body in enumerate(bodies))
            connection.executemany(_SQL["hold"], rows)
        else:
            fresh = ((first + index, now, body) for index, body in enumerate(bodies))
            connection.executemany(_SQL["send"], fresh)

    def _extend(self, connection: sqlite3.Connection, deliveries: Sequence[Delivery], until: float) -> list[Delivery]:
        """Return the deliveries whose receipts are no longer those of their messages."""
        moved = [(until, one.id, one.receipt) for one in deliveries]
        if connection.executemany(_SQL["release"], moved).rowcount == len(moved):
            return []
        return [one for one in deliveries if connection.execute(_SQL["held"], (one.id, one.receipt)).fetchone() is None]

    def _take(self, connection: sqlite3.Connection, limit: int) -> list[Delivery]:
        until, receipt = self.database.now() + self.visibility_s, secrets.randbits(62)
        held, fresh = self._shared(connection, limit)
        renewed = [(until, receipt, one.count, one.id) for one in held]
        connection.executemany(_SQL["hold_again"], renewed)
        rows = [(one.id, self._queue, until, receipt, 1, one.sent_at, one.body, None) for one in fresh]
        connection.executemany(_SQL["hold"], rows)
        if fresh:
            connection.execute(_SQL["delete_stretch"], (fresh[0].id, fresh[-1].id))
        return [Delivery(one.id, receipt, one.body, one.sent_at, one.count) for one in (*held, *fresh)]

    def _shared(self, connection: sqlite3.Connection, limit: int) -> tuple[list[Delivery], list[Delivery]]:
        """What is due again, and what is fresh; while both wait, each has half of the limit."""
        half = self._share_of_due(limit)
        due = self._due(connection, half)
        fresh = self._fresh(connection, limit - len(due))
        if len(due) == half and len(fresh) < limit - half:
            due = self._due(connection, limit - len(fresh))
        return due, fresh

    def _recall(self, connection: sqlite3.Connection, keys: Sequence[str] | None) -> None:
        now, queue = self.database.now(), self._queue
        if keys is None:
            connection.execute(_SQL["recall_all"], (now, queue))
        else:
            connection.executemany(_SQL["recall"], [(now, queue, key) for key in keys])

    def _due(self, connection: sqlite3.Connection, limit: int) -> list[Delivery]:
        rows = connection.execute(_SQL["due"], (self._queue, self.database.now(), limit))
        return [Delivery(id, receipt, body, sent_at, count + 1) for id, receipt, count, sent_at, body in rows]

    def _fresh(self, connection: sqlite3.Connection, limit: int, after: int = 0) -> list[Delivery]:
        rows = connection.execute(_SQL["fresh"], (max(after + 1, self._first), self._last, limit))
        return [Delivery(id, 0, body, sent_at, 1) for id, sent_at, body in rows]


class SqliteTransactionalQueue:
    """The queue inside a transaction, which hides what it receives until it ends."""

    def __init__(self, source: SqliteSource, connection: sqlite3.Connection) -> None:
        self._source = source
        self._connection = connection
        self._fresh: Sequence[Delivery] = ()

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        with self._errors():
            if peeked and not self._source._due(self._connection, 1) and self._are_there(peeked):
                self._fresh = peeked
                return peeked
            held, self._fresh = self._source._shared(self._connection, limit)
        return [*held, *self._fresh] if held else self._fresh

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        fresh = self._fresh
        with self._errors():
            if fresh and _are_same(deliveries, fresh):
                # Nothing else can lie between the first and the last of them.
                stretch = (fresh[0].id, fresh[-1].id)
                self._connection.execute(_SQL["delete_stretch"], stretch)
                return
            ids = [(one.id,) for one in deliveries]
            self._connection.executemany(_SQL["delete_fresh"], ids)
            self._connection.executemany(_SQL["delete_held"], ids)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await self._hold(deliveries, [None] * len(deliveries), [delay_s] * len(deliveries))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        await self._hold(deliveries, keys, delays_s)

    async def recall(self, keys: Sequence[str] | None) -> None:
        with self._errors():
            self._source._recall(self._connection, keys)

    async def _hold(
        self, deliveries: Sequence[Delivery], keys: Sequence[str | None], delays_s: Sequence[float]
    ) -> None:
        now, queue = self._source.database.now(), self._source._queue
        rows = [
            (one.id, queue, now + delay_s, one.receipt, one.count, one.sent_at, one.body, key)
            for one, key, delay_s in zip(deliveries, keys, delays_s, strict=True)
        ]
        with self._errors():
            self._connection.executemany(_SQL["delete_fresh"], [(one.id,) for one in deliveries])
            self._connection.executemany(_SQL["hold"], rows)

    def _are_there(self, peeked: Sequence[Delivery]) -> bool:
        """Ids are given once and in order, so as many as before, counted from the beginning, are the same ones."""
        there = self._connection.execute(_SQL["count_stretch"], (self._source._first, peeked[-1].id)).fetchone()
        return bool(there == (len(peeked), peeked[0].id))

    def _errors(self) -> AbstractContextManager[None]:
        return sqlite_errors(self._source.database.path)


def _are_same(deliveries: Sequence[Delivery], others: Sequence[Delivery]) -> bool:
    """Whether both are the same messages, in any order. Usually a batch is acked as it was received."""
    if deliveries is others:
        return True
    return len(deliveries) == len(others) and {one.id for one in deliveries} == {one.id for one in others}


def connect(address: Address) -> Source:
    """`sqlite:///file.db?queue=NAME&visibility=30s`; the queue is named like the pipeline unless told otherwise."""
    options = address.take("queue", "visibility")
    database = address.shared(SqliteDatabase, address.file())
    return SqliteSource(database, options.get("queue", address.name), visibility_of(options))
