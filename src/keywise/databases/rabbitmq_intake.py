"""Taking messages from RabbitMQ: one channel, what came on it, and what of that is not settled yet."""

import asyncio
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pika.spec import Basic

from keywise.change import Delivery
from keywise.databases.rabbitmq import PRECONDITION, Channel, code_of, rabbit_errors
from keywise.databases.rabbitmq_messages import passport_of, sent_at_of, shown_headers, times_before
from keywise.errors import UnavailableError

TAG_BITS = 48
"""Of the numbers that a channel gives to its messages; above them a receipt says which channel it was."""
WORN_AT = 3
"""A quorum queue throws away what it has handed over too often; a message is made anew long before that."""
AHEAD = 2
"""Times as many messages as were asked for are on their way, so that the next ones are here when these are done."""
PUT_BACK_MAX_S = 60.0


class Consumer:
    """What was agreed with the broker: so many messages more may come."""

    __slots__ = ("_take", "left", "tag")

    def __init__(self, tag: str, left: int, take: Callable[..., None]) -> None:
        self.tag = tag
        self.left = left
        self._take = take

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.left -= 1
        self._take(self, method, properties, body)


class Intake:
    """One channel. Receipts belong to it: when it is over they say nothing any more, and its messages come again."""

    def __init__(self, name: str, channel: Channel, queue: str, prefetch: int) -> None:
        self.queue = queue
        self._name = name
        self._channel = channel
        self._prefetch = prefetch
        self._id = secrets.token_hex(8)
        self._first = secrets.randbits(64) << TAG_BITS
        self._held: dict[int, tuple[Consumer | None, Any, Delivery]] = {}
        """What is not settled, by its number; in the order of numbers, as it came."""
        self._ids: set[str | int] = set()
        """Ids of those that brought them along."""
        self._arrived: deque[Delivery] = deque()
        self._worn: list[Delivery] = []
        self._bell = asyncio.Event()
        self._consumers: list[Consumer] = []
        self._consumed = 0
        self._quality = 0
        self._pulling = asyncio.Lock()
        self._on_empty: Callable[[Any], None] = lambda _: None
        self._is_cancelled = False
        channel.on_end = self._bell.set
        channel.raw.add_on_cancel_callback(self._cancelled)
        channel.raw.add_callback(self._empty, [Basic.GetEmpty], one_shot=False)

    def __len__(self) -> int:
        """How many messages are not settled."""
        return len(self._held) if self._channel.is_open else 0

    @property
    def is_over(self) -> bool:
        return self._is_cancelled or not self._channel.is_open

    def check(self) -> None:
        """Raise if nothing more can come."""
        if self._is_cancelled:
            raise UnavailableError(
                f"{self._name}: the queue {self.queue!r} was deleted, or moved to another node; declare it again if "
                "it is gone"
            )
        if not self._channel.is_open:
            reason = self._channel.ended
            text = getattr(reason, "reply_text", "") or str(reason) or type(reason).__name__
            if code_of(reason) == PRECONDITION and "timed out" in text:
                text += "; a message was held for longer than the broker allows: raise its consumer_timeout"
            raise UnavailableError(f"{self._name}: {text}")

    # What comes.

    async def wait(self, limit: int, wait_s: float) -> None:
        """Let messages come, and return when one is here or the time is over."""
        if self._arrived or self._worn:
            return
        if not any(consumer.left > 0 for consumer in self._consumers):
            await self._consume(min(self._prefetch, AHEAD * limit))
        self._bell.clear()
        if self._arrived or self._worn or self.is_over:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._bell.wait()
        except TimeoutError:
            pass

    async def pull(self, limit: int) -> None:
        """Fetch what is there, one by one, without letting more come."""
        async with self._pulling:
            while len(self._arrived) < limit and await self._pull_one():
                pass

    def hand_over(self, limit: int) -> list[Delivery]:
        arrived = self._arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]

    def worn(self) -> list[Delivery]:
        """What has to be made anew instead of being handed over."""
        worn, self._worn = self._worn, []
        return worn

    def hand_over_next(self, deliveries: Sequence[Delivery]) -> None:
        self._arrived.extendleft(reversed(deliveries))

    def rest(self) -> None:
        """Let nothing more come, and give back what nobody has taken: others may be waiting for it."""
        if self.is_over or not self._consumers:
            return
        consumers, self._consumers = self._consumers, []
        unwanted = [int(one.receipt) - self._first for one in (*self._arrived, *self._worn)]
        self._arrived.clear()
        self._worn.clear()
        for consumer in consumers:
            self._channel.raw.basic_cancel(consumer.tag)
        self._settle(unwanted, self._put_back_one)

    async def _consume(self, prefetch: int) -> None:
        if prefetch != self._quality:
            await self._channel.ask("basic_qos", prefetch_count=prefetch)
            self._quality = prefetch
        self._consumed += 1
        consumer = Consumer(f"keywise-{self._id}-{self._consumed}", prefetch, self._take)
        self._consumers.append(consumer)
        await self._channel.ask(
            "basic_consume", queue=self.queue, on_message_callback=consumer.on_message, consumer_tag=consumer.tag
        )

    async def _pull_one(self) -> bool:
        """Whether there was one."""

        def call(done: Callable[[Any], None]) -> None:
            def got(channel: Any, method: Any, properties: Any, body: bytes) -> None:
                self._take(None, method, properties, body)
                done(True)

            self._on_empty = lambda _: done(False)
            self._channel.raw.basic_get(self.queue, got)

        return bool(await self._channel.answered(call))

    def _take(self, consumer: Consumer | None, method: Any, properties: Any, body: bytes) -> None:
        tag = method.delivery_tag
        headers = properties.headers
        if headers:
            delivery = self._read(method, properties, headers, body)
        else:
            count = 2 if method.redelivered else 1
            delivery = Delivery(f"{self._id}.{tag}", self._first + tag, body, sent_at_of(properties), count)
        self._held[tag] = (consumer, properties, delivery)
        if headers and consumer is not None and times_before(headers, False) >= WORN_AT:
            self._worn.append(delivery)
        else:
            self._arrived.append(delivery)
        if not self._bell.is_set():
            self._bell.set()

    def _read(self, method: Any, properties: Any, headers: dict[Any, Any], body: bytes) -> Delivery:
        tag = method.delivery_tag
        before, passport = times_before(headers, method.redelivered), passport_of(headers, body)
        id, sent_at = f"{self._id}.{tag}", 0.0
        if passport is None:
            sent_at = sent_at_of(properties)
        else:
            before, sent_at = before + passport.count, passport.sent_at
            # A copy may have come before its original was acked: both are here, and each has to be settled.
            if passport.id not in self._ids:
                id = passport.id
                self._ids.add(id)
        return Delivery(id, self._first + tag, body, sent_at, before + 1, shown_headers(headers))

    # What is settled.

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries of this channel that are not settled."""
        self._settle([tag for tag, _ in self._mine(deliveries)], self._ack_one)

    def mine(self, deliveries: Sequence[Delivery]) -> list[tuple[Delivery, Any]]:
        """Those that are not settled, with their properties."""
        return [(one, self._held[tag][1]) for tag, one in self._mine(deliveries)]

    def put_back_later(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Let the broker have them again after a while, if they are still here then."""
        loop = asyncio.get_running_loop()
        loop.call_later(min(delay_s, PUT_BACK_MAX_S), self._put_back, [*deliveries])

    def _mine(self, deliveries: Sequence[Delivery]) -> list[tuple[int, Delivery]]:
        if not self._channel.is_open:
            return []
        found = ((int(one.receipt) - self._first, one) for one in deliveries)
        return [(tag, one) for tag, one in found if tag in self._held]

    def _put_back(self, deliveries: Sequence[Delivery]) -> None:
        self._settle([tag for tag, _ in self._mine(deliveries)], self._put_back_one)

    def _settle(self, tags: list[int], tell: Callable[[int, bool], None]) -> None:
        """Tell the broker about these and no others: one word for all up to the first that is not settled yet."""
        for tag in tags:
            consumer, _, delivery = self._held.pop(tag)
            self._ids.discard(delivery.id)
            if consumer is not None:
                consumer.left += 1
        tags.sort()
        oldest = next(iter(self._held), None)
        together = len(tags) if oldest is None else bisect_left(tags, oldest)
        with rabbit_errors(self._name):
            if together:
                # It has to be one that the broker still waits for: others are no tags any more.
                tell(tags[together - 1], True)
            for tag in tags[together:]:
                tell(tag, False)

    def _ack_one(self, tag: int, multiple: bool) -> None:
        self._channel.raw.basic_ack(tag, multiple)

    def _put_back_one(self, tag: int, multiple: bool) -> None:
        self._channel.raw.basic_nack(tag, multiple)

    def _empty(self, frame: Any) -> None:
        self._on_empty(frame)

    def _cancelled(self, frame: Any) -> None:
        self._is_cancelled = True
        self._bell.set()
