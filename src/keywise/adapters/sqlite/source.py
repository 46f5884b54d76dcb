"""A durable queue in a SQLite file.

Messages that nobody touched lie in `ready`, in the order of sending; those that are handed over, delayed
or released lie in `held` until they are visible. So a drain reads and deletes one stretch of one table.
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
from keywise.core.settings import seconds
from keywise.core.source import Source
from keywise.core.statements import read_statements
from keywise.core.url import Address

QUEUE_BITS = 40
"""Each queue has a stretch of ids of its own."""
POLL_FIRST_S, POLL_MAX_S = 0.001, 0.05
PEEK_AFTER_S = 0.0002

_SQL = read_statements(__name__)


class SqliteSource:
    """One queue of a SQLite database."""

    def __init__(self, database: SqliteDatabase, name: str, visibility_s: float = 60.0) -> None:
        self.database = database
        self.visibility_s = visibility_s
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

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        await self.release(deliveries, visibility_s)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [(one.id, one.receipt) for one in deliveries]
        await self.database.write(lambda connection: connection.executemany(_SQL["ack"], receipts))

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        until = self.database.now() + delay_s
        moved = [(until, one.id, one.receipt) for one in deliveries]
        await self.database.write(lambda connection: connection.executemany(_SQL["release"], moved))

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
            rows = ((first + index, queue, now + delay_s, 0, 0, now, body) for index, body in enumerate(bodies))
            connection.executemany(_SQL["hold"], rows)
        else:
            fresh = ((first + index, now, body) for index, body in enumerate(bodies))
            connection.executemany(_SQL["send"], fresh)

    def _take(self, connection: sqlite3.Connection, limit: int) -> list[Delivery]:
        now = self.database.now()
        until, receipt = now + self.visibility_s, secrets.randbits(62)
        held = self._due(connection, now, limit)
        renewed = [(until, receipt, one.count, one.id) for one in held]
        connection.executemany(_SQL["hold_again"], renewed)
        fresh = self._fresh(connection, limit - len(held))
        rows = [(one.id, self._queue, until, receipt, 1, one.sent_at, one.body) for one in fresh]
        connection.executemany(_SQL["hold"], rows)
        if fresh:
            connection.execute(_SQL["delete_stretch"], (fresh[0].id, fresh[-1].id))
        return [Delivery(one.id, receipt, one.body, one.sent_at, one.count) for one in (*held, *fresh)]

    def _due(self, connection: sqlite3.Connection, now: float, limit: int) -> list[Delivery]:
        rows = connection.execute(_SQL["due"], (self._queue, now, limit))
        return [Delivery(id, receipt, body, sent_at, count + 1) for id, receipt, count, sent_at, body in rows]

    def _fresh(self, connection: sqlite3.Connection, limit: int, after: int = 0) -> list[Delivery]:
        rows = connection.execute(_SQL["fresh"], (max(after + 1, self._first), self._last, limit))
        return [Delivery(id, 0, body, sent_at, 1) for id, sent_at, body in rows]


class SqliteTransactionalQueue:
    """The queue inside a transaction, which hides what it receives until it ends."""

    def __init__(self, source: SqliteSource, connection: sqlite3.Connection) -> None:
        self._source = source
        self._connection = connection
        self._fresh: list[Delivery] = []

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        with self._errors():
            held = self._source._due(self._connection, self._source.database.now(), limit)
            if peeked and not held and self._are_there(peeked):
                self._fresh = list(peeked)
                return peeked
            self._fresh = self._source._fresh(self._connection, limit - len(held))
        return [*held, *self._fresh] if held else self._fresh

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        fresh = self._fresh
        with self._errors():
            if fresh and len(deliveries) == len(fresh) and {one.id for one in deliveries} == {one.id for one in fresh}:
                # Nothing else can lie between the first and the last of them.
                stretch = (fresh[0].id, fresh[-1].id)
                self._connection.execute(_SQL["delete_stretch"], stretch)
                return
            ids = [(one.id,) for one in deliveries]
            self._connection.executemany(_SQL["delete_fresh"], ids)
            self._connection.executemany(_SQL["delete_held"], ids)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        until = self._source.database.now() + delay_s
        queue = self._source._queue
        rows = [(one.id, queue, until, one.receipt, one.count, one.sent_at, one.body) for one in deliveries]
        with self._errors():
            self._connection.executemany(_SQL["delete_fresh"], [(one.id,) for one in deliveries])
            self._connection.executemany(_SQL["hold"], rows)

    def _are_there(self, peeked: Sequence[Delivery]) -> bool:
        """Ids are given once and in order, so as many as before, counted from the beginning, are the same ones."""
        there = self._connection.execute(_SQL["count_stretch"], (self._source._first, peeked[-1].id)).fetchone()
        return bool(there == (len(peeked), peeked[0].id))

    def _errors(self) -> AbstractContextManager[None]:
        return sqlite_errors(self._source.database.path)


def connect(address: Address) -> Source:
    """`sqlite:///file.db?queue=NAME&visibility=60s`; the queue is named like the pipeline unless told otherwise."""
    options = address.take("queue", "visibility")
    database = address.shared(SqliteDatabase, address.file())
    return SqliteSource(database, options.get("queue", address.name), seconds(options.get("visibility", "60s")))
