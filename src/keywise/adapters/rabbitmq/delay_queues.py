"""The way of a message through a delay queue of RabbitMQ: which are there, which can be used, what is in them."""

import asyncio
import time
from collections.abc import Callable, Sequence

from keywise.adapters.rabbitmq.broker import NOT_FOUND, PRECONDITION, Broker, BrokerLink, refusal_code
from keywise.adapters.rabbitmq.delay_classes import DelayStep, wait_of, waits_of
from keywise.adapters.rabbitmq.publisher import Message, NoSuchQueue, Publisher
from keywise.core.errors import DatabaseError, UnavailableError


class DelayQueues:
    """All delay queues of one queue."""

    _fresh_s = 2.0
    """So long nothing is put into a new quorum queue: if the broker crashed then, it would forget what it confirmed."""
    _absent_s = _fresh_s / 2
    """So long a queue that was not there is taken to be empty: whoever makes one puts nothing into it before that."""

    def __init__(self, broker: Broker, link: BrokerLink, publisher: Publisher, queue: str) -> None:
        self._broker = broker
        self._link = link
        self._publisher = publisher
        self._queue = queue
        self._usable_at: dict[str, float] = {}
        """Delay queues that are there, and from when on they can be trusted."""
        self._absent: dict[str, float] = {}
        """Delay queues that were not there, and until when that is believed."""
        self.found: set[str] = set()
        """Delay queues that were there when messages were counted last."""

    async def usable_in_s(self, delay_s: float) -> float:
        """How long a message that is put off for so long has to be kept before; makes its queue if it is not there."""
        return await self._declare(wait_of(self._queue, delay_s, time.time()))

    async def publish(
        self, messages: Sequence[Message], delay_s: float, on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Let messages come to the queue after a delay."""
        wait = wait_of(self._queue, delay_s, time.time())
        for _, properties in messages:
            properties.expiration = str(max(1, round(wait.delay_s * 1000)))
        if (usable_in_s := await self._declare(wait)) > 0:
            await asyncio.sleep(usable_in_s)
        try:
            await self._publisher.publish(wait.queue, messages, on_confirmed)
        except NoSuchQueue as error:
            # Somebody has deleted it; whoever puts something off next makes it anew.
            self._usable_at.pop(wait.queue, None)
            raise UnavailableError(f"{self._link.name}: the queue {wait.queue!r} was deleted") from error

    async def count(self) -> int:
        """How many messages wait."""
        clock, counted = asyncio.get_running_loop().time, 0
        self.found = set()
        for wait in waits_of(self._queue, time.time()):
            if self._absent.get(wait.queue, 0.0) > clock():
                continue
            ready = await self._ready(wait.queue)
            if ready is None:
                self._absent[wait.queue] = clock() + self._absent_s
            else:
                self.found.add(wait.queue)
            counted += ready or 0
        return counted

    async def _declare(self, wait: DelayStep) -> float:
        """Make a delay queue if it is not there; return in how many seconds it can be trusted."""
        clock = asyncio.get_running_loop().time
        if wait.queue not in self._usable_at:
            # Also one that is there: the broker then compares its arguments with ours. Not by the publisher, whose
            # connection the broker may not read for a while.
            is_new = await self._ready(wait.queue) is None
            await self._compare_or_make(wait)
            if is_new:
                self._broker.made.add(wait.queue)
            # One that was found may have been made by somebody else a moment ago.
            self._usable_at[wait.queue] = clock() + self._fresh_s
            self._absent.pop(wait.queue, None)
        return self._usable_at[wait.queue] - clock()

    async def _compare_or_make(self, wait: DelayStep) -> None:
        arguments = wait.arguments(self._queue)
        try:
            await self._link.ask("queue_declare", queue=wait.queue, durable=True, arguments=arguments)
        except DatabaseError as error:
            if refusal_code(error) != PRECONDITION:
                raise
            raise DatabaseError(
                f"{self._link.name}: the delay queue {wait.queue!r} exists with other arguments than keywise needs, so "
                f"messages would wait there for another time, or never come back: {error}; move its messages to "
                f"{self._queue!r} and delete it"
            ) from error

    async def _ready(self, queue: str) -> int | None:
        """How many messages of a queue are ready; None if it is not there."""
        try:
            return await self._link.ready(queue)
        except DatabaseError as error:
            if refusal_code(error) != NOT_FOUND:
                raise
            return None
