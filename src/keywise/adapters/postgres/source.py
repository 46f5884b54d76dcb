"""A durable queue in a Postgres database.

Messages that nobody touched lie in `ready`, in the order of sending; those that are handed over, delayed
or released lie in `held` until they are visible. So a drain reads and deletes one stretch of one table.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Self

from keywise.adapters.postgres.database import (
    CHANNEL,
    OPTIONS,
    PostgresDatabase,
    database_at,
    numbers,
    opening,
    postgres_errors,
)
from keywise.core.change import Delivery
from keywise.core.settings import seconds
from keywise.core.source import Source
from keywise.core.url import Address

COPY_FROM = 200
"""As many messages are copied in a stream, which takes more round trips and less time for each."""
PEEK_PAUSE_MAX = 15
"""So many batches at the most are received without a look ahead."""
POLL_S = 0.5
"""How often to look even if nobody rang: what another process released rings no bell."""


class PostgresSource:
    """One queue of a Postgres database."""

    def __init__(self, database: PostgresDatabase, name: str, visibility_s: float = 60.0) -> None:
        self.database = database
        self.visibility_s = visibility_s
        self._name = name
        self._queue = 0
        self._expects_more = False
        """Something was just seen ahead."""
        self.peek_heuristic = PeekHeuristic()

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self.database.write(_REGISTER, self._name)
            [[self._queue]] = await self.database.write(_NUMBER, self._name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if not await self.arrived(wait_s):
            return []
        receipt, ahead_s = secrets.randbits(62), self.database.ahead_s
        taking = (self._queue, limit, ahead_s, self.visibility_s, receipt)
        rows = [*await self.database.write(_TAKE_DUE, *taking)]
        if len(rows) < limit:
            fresh = (self._queue, limit - len(rows), ahead_s, self.visibility_s, receipt)
            rows += await self.database.write(_TAKE_FRESH, *fresh)
        return [Delivery(id, receipt, body, sent_at, count) for id, count, sent_at, body in rows]

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        await self.release(deliveries, visibility_s)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            await self.database.write(_ACK, *_receipts(deliveries))

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        if deliveries:
            await self.database.write(_RELEASE, *_receipts(deliveries), delay_s + self.database.ahead_s)

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
        [[depth]] = await self.database.read(_DEPTH, self._queue)
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
        rows = await self.database.read(_PEEK, self._queue, after.id, limit)
        self._expects_more = bool(rows)
        return [Delivery(id, 0, body, sent_at, 1) for id, sent_at, body in rows]

    def queue_in(self, connection: Any) -> "PostgresTransactionalQueue":
        return PostgresTransactionalQueue(self, connection)

    async def _due_s(self) -> float:
        """In how many seconds something is visible; 0 or less: now."""
        [[is_ready, visible_at, now]] = await self.database.read(_LOOK, self._queue)
        if is_ready:
            return 0.0
        return POLL_S if visible_at is None else float(visible_at - now - self.database.ahead_s)

    def _sending(self, bodies: Sequence[bytes], delay_s: float) -> tuple[str, tuple[Any, ...]]:
        if delay_s > 0:
            return _DELAY, (self._queue, list(bodies), self.database.ahead_s, delay_s)
        return _SEND, (self._queue, list(bodies), self.database.ahead_s)

    async def _copy(self, connection: Any, bodies: Sequence[bytes]) -> None:
        [[now]] = await connection.fetch(_NOW_ALONE)
        rows = [(self._queue, now + self.database.ahead_s, body) for body in bodies]
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
        queue, ahead_s = self._source._queue, self._source.database.ahead_s
        with self._errors():
            if peeked:
                ids = [int(one.id) for one in peeked]
                done = await self._connection.execute(_TAKE_PEEKED, queue, len(ids), ahead_s, numbers(ids))
                is_there = done == f"DELETE {len(ids)}"
                self._source.peek_heuristic.record(is_there)
                if is_there:
                    self._fresh.update(zip(ids, peeked, strict=True))
                    return peeked
            rows = await self._connection.fetch(_RECEIVE, queue, limit, ahead_s)
        received = [Delivery(id, receipt, body, sent_at, count) for id, receipt, count, sent_at, body, _ in rows]
        self._fresh.update((one.id, one) for one, row in zip(received, rows, strict=True) if row[5])
        return received

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        held = [one.id for one in deliveries if self._fresh.pop(one.id, None) is None]
        if held:
            with self._errors():
                await self._connection.execute("delete from keywise_held where id = any($1::bigint[])", held)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        for one in deliveries:
            self._fresh.pop(one.id, None)
        with self._errors():
            await self._connection.execute(
                _HOLD,
                self._source._queue,
                delay_s + self._source.database.ahead_s,
                *_columns(deliveries),
                [one.receipt for one in deliveries],
                [one.count for one in deliveries],
            )

    async def _put_back(self) -> None:
        if self._fresh:
            await self._connection.execute(_PUT_BACK, self._source._queue, *_columns([*self._fresh.values()]))

    def _errors(self) -> postgres_errors:
        return postgres_errors(self._source.database.name)


def connect(address: Address) -> Source:
    """`postgresql://user@host/database?queue=NAME&visibility=60s`; the queue is named like the pipeline by default."""
    options = address.take("queue", "visibility", *OPTIONS)
    database = database_at(address, options)
    return PostgresSource(database, options.get("queue", address.name), seconds(options.get("visibility", "60s")))


def _columns(deliveries: Sequence[Delivery]) -> tuple[list[Any], ...]:
    return [one.id for one in deliveries], [one.sent_at for one in deliveries], [one.body for one in deliveries]


def _receipts(deliveries: Sequence[Delivery]) -> tuple[list[int | str], list[int | str]]:
    return [one.id for one in deliveries], [one.receipt for one in deliveries]


_REGISTER = "insert into keywise_queues (name) values ($1) on conflict (name) do nothing"
_NUMBER = "select id from keywise_queues where name = $1"
_NOW = "extract(epoch from clock_timestamp())::float8"
_NOW_ALONE = f"select {_NOW}"
# The moment comes from a subquery, so that it is read once and the index can be used.
_LOOK = (
    "select (select id from keywise_ready where queue = $1 order by id limit 1) is not null, "  # noqa: S608
    f"(select visible_at from keywise_held where queue = $1 order by visible_at limit 1), {_NOW}"
)
_DUE = (
    "from keywise_held where queue = $1 "
    f"and visible_at <= (select {_NOW} + $3::float8) order by visible_at limit $2 for update skip locked"
)
_FRESH = "from keywise_ready where queue = $1 order by id limit $2 for update skip locked"
_REST = _FRESH.replace("$2", "$2 - (select count(*) from due)")
_RECEIVE = (
    f"with due as (select id, receipt, count + 1, sent_at, body, false {_DUE}), fresh as ("  # noqa: S608
    f"delete from keywise_ready where queue = $1 and id = any(array(select id {_REST})) returning id, sent_at, body) "
    "select * from due union all (select id, 0, 1, sent_at, body, true from fresh order by id)"
)
_TAKE_PEEKED = (
    f"with due as (select id {_DUE}) delete from keywise_ready where queue = $1 and id = any(("  # noqa: S608
    f"select case when array(select id {_FRESH}) = $4::text::bigint[] and not exists (select 1 from due) "
    "then $4::text::bigint[] else '{}' end)::bigint[])"
)
_PUT_BACK = (
    "insert into keywise_ready (queue, id, sent_at, body) "
    "select $1, * from unnest($2::bigint[], $3::float8[], $4::bytea[])"
)
_TAKE_DUE = (
    f"update keywise_held set visible_at = {_NOW} + $3::float8 + $4::float8, receipt = $5, count = count + 1 "  # noqa: S608
    f"where id = any(array(select id {_DUE})) returning id, count, sent_at, body"
)
_TAKE_FRESH = (
    f"with taken as (delete from keywise_ready where queue = $1 and id = any(array(select id {_FRESH})) "  # noqa: S608
    "returning id, sent_at, body) insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body) "
    f"select id, $1, {_NOW} + $3::float8 + $4::float8, $5, 1, sent_at, body from taken "
    "returning id, count, sent_at, body"
)
_PEEK = "select id, sent_at, body from keywise_ready where queue = $1 and id > $2 order by id limit $3"
_MINE = (
    "from unnest($1::bigint[], $2::bigint[]) as mine (id, receipt) "
    "where held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt"
)
_ACK = f"delete from keywise_held as held {_MINE.replace('from', 'using', 1)}"  # noqa: S608
_RELEASE = f"update keywise_held as held set visible_at = {_NOW} + $3::float8 {_MINE}"  # noqa: S608
_HOLD = (
    "insert into keywise_held (queue, visible_at, id, sent_at, body, receipt, count) "  # noqa: S608
    f"select $1, {_NOW} + $2::float8, * from unnest($3::bigint[], $4::float8[], $5::bytea[], $6::bigint[], $7::int[]) "
    "on conflict (id) do update set visible_at = excluded.visible_at, count = excluded.count"
)
_RING = f"select pg_notify('{CHANNEL}', $1::int::text)"
_SEND = (
    "with sent as (insert into keywise_ready (queue, sent_at, body) "  # noqa: S608
    f"select $1, {_NOW} + $3::float8, body from unnest($2::bytea[]) with ordinality as one (body, n) order by n) "
    + _RING
)
_DELAY = (
    "insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body) "  # noqa: S608
    f"select nextval('keywise_messages'), $1, {_NOW} + $3::float8 + $4::float8, 0, 0, {_NOW} + $3::float8, body "
    "from unnest($2::bytea[]) as one (body)"
)
_DEPTH = (
    "select (select count(*) from keywise_ready where queue = $1) "
    "+ (select count(*) from keywise_held where queue = $1)"
)
