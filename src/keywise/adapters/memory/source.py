"""A queue in the memory of one process: visibility, delays and redelivery like a real one."""

import asyncio
from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase, Message
from keywise.core.change import Delivery
from keywise.core.source import Source, visibility_of
from keywise.core.table_queue import TableQueue
from keywise.core.url import Address


class MemorySource(TableQueue):
    """One queue of a memory database."""

    def __init__(self, database: MemoryDatabase, name: str, visibility_s: float | None = None) -> None:
        super().__init__(visibility_s)
        self.database = database
        self._queue = database.queue(name)
        self._sent = database.bells.setdefault(name, asyncio.Event())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        async with self.database.exclusive():
            taken = self._take(limit)
        if taken or not await self.arrived(wait_s):
            return taken
        async with self.database.exclusive():
            return self._take(limit)

    async def arrived(self, wait_s: float) -> bool:
        """Whether something is visible, or becomes so within `wait_s`."""
        if not self._any_visible() and wait_s > 0:
            await self._something_visible(wait_s)
        return self._any_visible()

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        async with self.database.exclusive():
            self._hide(deliveries, visibility_s)
            return [one for one in deliveries if not self._is_current(one)]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        async with self.database.exclusive():
            self._forget(deliveries)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        async with self.database.exclusive():
            self._hide(deliveries, delay_s)

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        async with self.database.exclusive():
            self._park(deliveries, keys, delays_s)

    async def recall(self, keys: Sequence[str] | None) -> None:
        async with self.database.exclusive():
            self._recall(keys)
        self._sent.set()

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        async with self.database.exclusive():
            now = self.database.clock()
            for body in bodies:
                self.database.set(self._queue, self.database.number(), Message(body, now, now + delay_s))
        self._sent.set()

    async def depth(self) -> int:
        return len(self._queue)

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        visible = [item for item in (*self._due(), *self._fresh()) if item[0] > int(after.id)]
        return [_upcoming(number, message) for number, message in visible[:limit]]

    def queue_in(self, connection: MemoryDatabase) -> "MemoryTransactionalQueue":
        assert connection is self.database, "a transaction reaches its own database only"
        return MemoryTransactionalQueue(self)

    async def _something_visible(self, wait_s: float) -> None:
        soonest = min((message.visible_at for message in self._queue.values()), default=float("inf"))
        self._sent.clear()
        try:
            async with asyncio.timeout(max(0.0, min(wait_s, soonest - self.database.clock()))):
                await self._sent.wait()
        except TimeoutError:
            pass

    def _take(self, limit: int) -> list[Delivery]:
        until = self.database.clock() + self.visibility_s
        taken = []
        for number, message in self._shared(limit):
            receipt = self.database.number()
            handed = replace(message, visible_at=until, count=message.count + 1, receipt=receipt, key=None)
            self.database.set(self._queue, number, handed)
            taken.append(_delivery(number, handed))
        return taken

    def _any_visible(self) -> bool:
        now = self.database.clock()
        return any(message.visible_at <= now for message in self._queue.values())

    def _shared(self, limit: int) -> list[tuple[int, Message]]:
        """What is due again, then what is fresh; while both wait, each has half of the limit."""
        due, fresh = self._due(), self._fresh()
        for_due = max(self._share_of_due(limit), limit - len(fresh))
        for_fresh = limit - len(due[:for_due])
        return [*due[:for_due], *fresh[:for_fresh]]

    def _due(self) -> list[tuple[int, Message]]:
        now = self.database.clock()
        due = [item for item in self._queue.items() if item[1].visible_at <= now and not item[1].is_fresh]
        return sorted(due, key=lambda item: item[1].visible_at)

    def _fresh(self) -> list[tuple[int, Message]]:
        return [item for item in self._queue.items() if item[1].is_fresh]

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self._is_current(delivery):
                self.database.set(self._queue, delivery.id, None)

    def _hide(self, deliveries: Sequence[Delivery], for_s: float) -> None:
        until = self.database.clock() + for_s
        for delivery in deliveries:
            if self._is_current(delivery):
                message = self._queue[int(delivery.id)]
                self.database.set(self._queue, delivery.id, replace(message, visible_at=until, key=None))

    def _park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        for delivery, key, delay_s in zip(deliveries, keys, delays_s, strict=True):
            self._hide([delivery], delay_s)
            if self._is_current(delivery):
                message = self._queue[int(delivery.id)]
                self.database.set(self._queue, delivery.id, replace(message, key=key))

    def _recall(self, keys: Sequence[str] | None) -> None:
        now, wanted = self.database.clock(), None if keys is None else set(keys)
        for number, message in list(self._queue.items()):
            is_wanted = message.key is not None and (wanted is None or message.key in wanted)
            if is_wanted and message.visible_at > now:
                self.database.set(self._queue, number, replace(message, visible_at=now))

    def _is_current(self, delivery: Delivery) -> bool:
        message = self._queue.get(int(delivery.id))
        return message is not None and message.receipt == delivery.receipt


class MemoryTransactionalQueue:
    """The queue inside a transaction: nobody else can receive meanwhile, so nothing is hidden."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        visible = [_upcoming(number, message) for number, message in self._source._shared(limit)]
        return peeked if peeked and list(peeked) == visible[: len(peeked)] else visible

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._source._forget(deliveries)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        self._source._hide(deliveries, delay_s)
        self._count(deliveries)

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self._source._park(deliveries, keys, delays_s)
        self._count(deliveries)

    async def recall(self, keys: Sequence[str] | None) -> None:
        self._source._recall(keys)

    def _count(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = self._source._queue[int(delivery.id)]
            self._source.database.set(self._source._queue, delivery.id, replace(message, count=delivery.count))


def connect(address: Address) -> Source:
    """`memory://?queue=NAME&visibility=30s`: lives and dies with the process."""
    options = address.take("queue", "visibility")
    database = address.shared(MemoryDatabase)
    return MemorySource(database, options.get("queue", address.name), visibility_of(options))


def _delivery(number: int, message: Message) -> Delivery:
    return Delivery(number, message.receipt, message.body, message.sent_at, message.count)


def _upcoming(number: int, message: Message) -> Delivery:
    """A transaction writes nothing down to receive, so it counts this time itself."""
    return _delivery(number, replace(message, count=message.count + 1))
