"""A durable queue in a Postgres database.

Messages that nobody touched lie in `ready`, in the order of sending; those that are handed over, delayed
or released lie in `held` until they are visible. So a drain reads and deletes one stretch of one table.
Those that were released because their key is blocked carry that key in the column `key`.
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from keywise.adapters.postgres.database import (
    CHANNEL,
    COMMAND_S,
    OPTIONS,
    SLOW_S,
    PostgresDatabase,
    database_at,
    limit_each,
    numbers,
    postgres_errors,
)
from keywise.core.change import Delivery
from keywise.core.key_encoding import encoded
from keywise.core.resource import opening
from keywise.core.source import Source, visibility_of
from keywise.core.statements import read_statements
from keywise.core.table_queue import TableQueue
from keywise.core.url import Address

COPY_FROM = 200
"""As many messages are copied in a stream, which takes more round trips and less time for each."""
PEEK_PAUSE_MAX = 15
"""So many batches at the most are received without a look ahead."""
POLL_S = 0.5
"""How often to look even if nobody rang: what another process released rings no bell."""

_SQL = read_statements(__name__)


class PostgresSource(TableQueue):
    """One queue of a Postgres database."""

    def __init__(self, database: PostgresDatabase, name: str, visibility_s: float | None = None) -> None:
        super().__init__(visibility_s)
        self.database = database
        self._name = name
        self._queue = 0
        self._expects_more = False
        """Something was just seen ahead, or as much was received as was asked for."""
        self.peek_heuristic = PeekHeuristic()

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self.database.write(_SQL["register"], self._name)
            [[self._queue]] = await self.database.write(_SQL["number"], self._name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if not await self.arrived(wait_s):
            return []
        visibility_s, receipt = self.visibility_s, secrets.randbits(62)
        half = self._share_of_due(limit)
        rows = [*await self.database.write(_SQL["take_due"], self._queue, half, visibility_s, receipt)] if half else []
        due = len(rows)
        if due < limit:
            rows += await self.database.write(_SQL["take_fresh"], self._queue, limit - due, visibility_s, receipt)
        if due == half and len(rows) < limit:
            rows += await self.database.write(_SQL["take_due"], self._queue, limit - len(rows), visibility_s, receipt)
        self._expects_more = len(rows) == limit
        return [Delivery(id, receipt, body, sent_at, count) for id, count, sent_at, body in rows]

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        if not deliveries:
            return []
        rows = await self.database.write(_SQL["extend"], *_receipts(deliveries), visibility_s)
        refused = {(id, receipt) for id, receipt in rows}
        return [one for one in deliveries if (one.id, one.receipt) in refused]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            ids, receipts = (numbers(map(int, column)) for column in _receipts(deliveries))
            await self.database.write(_SQL["ack"], ids, receipts)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        if deliveries:
            await self.database.write(_SQL["release"], *_receipts(deliveries), delay_s)

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        if deliveries:
            codes = [encoded(key) for key in keys]
            await self.database.write(_SQL["park"], *_receipts(deliveries), list(delays_s), codes)

    async def recall(self, keys: Sequence[str] | None) -> None:
        statement, arguments = self._recalling(keys)
        await self.database.write(statement, *arguments)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        if len(bodies) < COPY_FROM or delay_s > 0:
            statement, arguments = self._sending(bodies, delay_s)
            await self.database.write(statement, *arguments)
        else:
            async with self.database.transaction() as connection:
                with postgres_errors(self.database.name):
                    await self._copy(connection, bodies)

    async def send_within(self, connection: Any, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Append messages in a transaction of the caller's own asyncpg connection: they are there if it commits."""
        with postgres_errors(self.database.name):
            if len(bodies) < COPY_FROM or delay_s > 0:
                statement, arguments = self._sending(bodies, delay_s)
                await connection.execute(statement, *arguments)
            else:
                await self._copy(connection, bodies)

    async def depth(self) -> int:
        [[depth]] = await self.database.read(_SQL["depth"], self._queue, limit_s=SLOW_S)
        return int(depth)

    async def arrived(self, wait_s: float) -> bool:
        """Whether something is visible; the server rings when something is sent, and it looks now and then."""
        if self._expects_more:
            self._expects_more = False
            return True
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        bell = await self.database.bell(str(self._queue)) if wait_s > 0 else None
        while True:
            if bell is not None:
                bell.clear()
            due_s = await self._due_s()
            left = until - loop.time()
            if due_s <= 0 or bell is None or left <= 0:
                return due_s <= 0
            try:
                async with asyncio.timeout(min(due_s, left, POLL_S)):
                    await bell.wait()
            except TimeoutError:
                bell = await self.database.bell(str(self._queue))

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        if not self.peek_heuristic.should_peek():
            return []
        rows = await self.database.read(_SQL["peek"], self._queue, after.id, limit)
        self._expects_more = bool(rows)
        return [Delivery(id, 0, body, sent_at, 1) for id, sent_at, body in rows]

    def queue_in(self, connection: Any) -> "PostgresTransactionalQueue":
        return PostgresTransactionalQueue(self, connection)

    def _recalling(self, keys: Sequence[str] | None) -> tuple[str, tuple[Any, ...]]:
        if keys is None:
            return _SQL["recall_all"], (self._queue,)
        return _SQL["recall"], (self._queue, [encoded(key) for key in keys])

    async def _due_s(self) -> float:
        """In how many seconds something is visible; 0 or less: now."""
        [[is_ready, visible_at, now]] = await self.database.read(_SQL["look"], self._queue)
        if is_ready:
            return 0.0
        return POLL_S if visible_at is None else float(visible_at - now)

    def _sending(self, bodies: Sequence[bytes], delay_s: float) -> tuple[str, tuple[Any, ...]]:
        if delay_s > 0:
            return _SQL["delay"], (self._queue, list(bodies), delay_s)
        return _SQL["send"], (self._queue, list(bodies))

    async def _copy(self, connection: Any, bodies: Sequence[bytes]) -> None:
        [[now]] = await connection.fetch(_SQL["now"])
        rows = [(self._queue, now, body) for body in bodies]
        await connection.copy_records_to_table("keywise_ready", columns=["queue", "sent_at", "body"], records=rows)
        await connection.execute("select pg_notify($1, $2)", CHANNEL, str(self._queue))


class PeekHeuristic:
    """Whether to look ahead: where others take what was seen, it is tried more and more rarely."""

    def __init__(self) -> None:
        self._pause = self._left = 0

    def should_peek(self) -> bool:
        self._left -= 1
        return self._left < 0

    def record(self, is_there: bool) -> None:
        """What was seen ahead could be received, or was gone."""
        self._pause = 0 if is_there else min(2 * self._pause + 1, PEEK_PAUSE_MAX)
        self._left = self._pause


class PostgresTransactionalQueue:
    """The queue inside a transaction, which hides what it receives until it ends.

    Messages that nobody touched are deleted when they are received, which is less work than to lock them first.
    Those that were neither acked nor released are put back before the commit.
    """

    def __init__(self, source: PostgresSource, connection: Any) -> None:
        self._source = source
        self._connection = connection
        self._fresh: dict[int | str, Delivery] = {}
        """What was received and deleted, and has not been settled."""
        source.database.before_commit(connection, self._put_back)

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        queue = self._source._queue
        async with self._answered():
            if peeked:
                ids = [int(one.id) for one in peeked]
                done = await self._connection.execute(_SQL["take_peeked"], queue, len(ids), numbers(ids))
                is_there = done == f"DELETE {len(ids)}"
                self._source.peek_heuristic.record(is_there)
                if is_there:
                    self._fresh.update(zip(ids, peeked, strict=True))
                    return peeked
            half = self._source._share_of_due(limit)
            rows = await self._connection.fetch(_SQL["receive"], queue, limit, half)
            fresh = [row for row in rows if row[5]]
            if len(rows) - len(fresh) == half and len(rows) < limit:
                due = await self._connection.fetch(_SQL["receive_due"], queue, limit - len(fresh))
                rows = [*due, *fresh]
        received = [Delivery(id, receipt, body, sent_at, count) for id, receipt, count, sent_at, body, _ in rows]
        self._fresh.update((one.id, one) for one, row in zip(received, rows, strict=True) if row[5])
        return received

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        held = [one.id for one in deliveries if self._fresh.pop(one.id, None) is None]
        if held:
            async with self._answered():
                await self._connection.execute(_SQL["ack_held"], held)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await self._hold(deliveries, [None] * len(deliveries), [delay_s] * len(deliveries))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        await self._hold(deliveries, [encoded(key) for key in keys], delays_s)

    async def recall(self, keys: Sequence[str] | None) -> None:
        statement, arguments = self._source._recalling(keys)
        async with self._answered():
            await self._connection.execute(statement, *arguments)

    async def _hold(
        self, deliveries: Sequence[Delivery], codes: Sequence[bytes | None], delays_s: Sequence[float]
    ) -> None:
        for one in deliveries:
            self._fresh.pop(one.id, None)
        async with self._answered():
            await self._connection.execute(
                _SQL["hold"],
                self._source._queue,
                list(delays_s),
                *_columns(deliveries),
                [one.receipt for one in deliveries],
                [one.count for one in deliveries],
                codes,
            )

    async def _put_back(self) -> None:
        if self._fresh:
            await self._connection.execute(_SQL["put_back"], self._source._queue, *_columns([*self._fresh.values()]))

    def _answered(self) -> AbstractAsyncContextManager[None]:
        return self._source.database.answered(limit_each(COMMAND_S))


def connect(address: Address) -> Source:
    """`postgresql://user@host/database?queue=NAME&visibility=30s`; the queue is named like the pipeline by default."""
    options = address.take("queue", "visibility", *OPTIONS)
    database = database_at(address, options)
    return PostgresSource(database, options.get("queue", address.name), visibility_of(options))


def _columns(deliveries: Sequence[Delivery]) -> tuple[list[Any], ...]:
    return [one.id for one in deliveries], [one.sent_at for one in deliveries], [one.body for one in deliveries]


def _receipts(deliveries: Sequence[Delivery]) -> tuple[list[int | str], list[int | str]]:
    return [one.id for one in deliveries], [one.receipt for one in deliveries]
