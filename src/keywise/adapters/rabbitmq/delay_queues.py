"""The delay queues of one queue: declares them, publishes to them, and counts their messages."""

import asyncio
import time
from collections.abc import Callable, Sequence

from keywise.adapters.rabbitmq.broker import NOT_FOUND, PRECONDITION, Broker, BrokerLink, refusal_code
from keywise.adapters.rabbitmq.delay_classes import DelayStep, wait_of, waits_of
from keywise.adapters.rabbitmq.publisher import Message, NoSuchQueue, Publisher
from keywise.core.errors import DatabaseError, UnavailableError


class DelayQueues:
    """All delay queues of one queue. Only the broker itself moves messages out of them."""

    _fresh_s = 2.0
    """How old a quorum queue must be before it is used: a broker that crashes earlier would lose confirmed messages."""
    _absent_s = _fresh_s / 2
    """How long a missing queue counts as empty: a process that declares it publishes nothing to it for longer than
    that."""

    def __init__(self, broker: Broker, link: BrokerLink, publisher: Publisher, queue: str) -> None:
        self._broker = broker
        self._link = link
        self._publisher = publisher
        self._queue = queue
        self._usable_at: dict[str, float] = {}
        """From when on a delay queue that exists can be used."""
        self._absent: dict[str, float] = {}
        """Until when a delay queue that did not exist counts as empty."""
        self.found: set[str] = set()
        """Delay queues that existed at the last count."""

    async def usable_in_s(self, delay_s: float) -> float:
        """Declare the queue for a delay if necessary; return in how many seconds it can be used."""
        return await self._declare(wait_of(self._queue, delay_s, time.time()))

    async def publish(
        self, messages: Sequence[Message], delay_s: float, on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Publish messages that reach the queue after a delay; waits until the delay queue can be used."""
        wait = wait_of(self._queue, delay_s, time.time())
        for _, properties in messages:
            properties.expiration = str(max(1, round(wait.delay_s * 1000)))
        if (usable_in_s := await self._declare(wait)) > 0:
            await asyncio.sleep(usable_in_s)
        try:
            await self._publisher.publish(wait.queue, messages, on_confirmed)
        except NoSuchQueue as error:
            # An operator has deleted it. The next call declares it again.
            self._usable_at.pop(wait.queue, None)
            raise UnavailableError(f"{self._link.name}: the queue {wait.queue!r} was deleted") from error

    async def count(self) -> int:
        """Count the messages that wait in delay queues."""
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
        """Declare a delay queue if necessary; return in how many seconds it can be used."""
        clock = asyncio.get_running_loop().time
        if wait.queue not in self._usable_at:
            # Declare an existing queue too, so that the broker compares its arguments with ours. Not on the publisher's
            # connection: the broker may stop reading that one for a while.
            is_new = await self._ready(wait.queue) is None
            await self._compare_or_make(wait)
            if is_new:
                self._broker.made.add(wait.queue)
            # Another process may have declared a queue that was found here only a moment ago, so it counts as new too.
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
        """Count the ready messages of a queue; None if it does not exist."""
        try:
            return await self._link.ready(queue)
        except DatabaseError as error:
            if refusal_code(error) != NOT_FOUND:
                raise
            return None
