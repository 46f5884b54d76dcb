"""Taking messages from RabbitMQ: one channel, what came on it, and what of that is not settled yet."""

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pika.spec import Basic

from keywise.adapters.rabbitmq.broker import PRECONDITION, Channel, refusal_code
from keywise.adapters.rabbitmq.connection import decoded
from keywise.adapters.rabbitmq.copies import ORIGINAL, CopyLog
from keywise.adapters.rabbitmq.frames import ACK, NACK, stamp_of
from keywise.adapters.rabbitmq.messages import (
    OFFSET,
    MessageIdentity,
    content_of,
    identity_of,
    parse_identity,
    routing_key_of,
    sent_at,
    shown_headers,
    times_before,
)
from keywise.core.change import Delivery
from keywise.core.errors import UnavailableError

TAG_BITS = 48
"""Of the numbers that a channel gives to its messages; above them a receipt says which channel it was."""
COPY_AFTER_DELIVERIES = 3
"""A quorum queue throws away what it has handed over too often; a message is made anew long before that."""
PREFETCH_FACTOR = 2
"""Times as many messages as were asked for are on their way, so that the next ones are here when these are done."""
REQUEUE_MAX_S = 60.0
ACK_LATER_S = 0.5
"""An ack before which others are missing waits for them so long at the most: one word for many costs what one for one
does, here and at the broker."""
OLD_AFTER_LOOKS = 2
"""A message that was held already when somebody asked for old ones this many times ago is old."""


@dataclass(slots=True, eq=False)
class BrokerConsumer:
    """What was agreed with the broker: so many messages may come, and so many more of them are left."""

    tag: str
    prefetch: int
    left: int


class Subscription:
    """One channel. Receipts belong to it: when it is over they say nothing any more, and its messages come again."""

    def __init__(self, channel: Channel, queue: str, prefetch: int, copies: CopyLog) -> None:
        self.queue = queue
        self._copies = copies
        self._channel = channel
        self._prefetch = prefetch
        self._id = secrets.token_hex(8)
        self._first = secrets.randbits(64) << TAG_BITS
        self._held: dict[int, tuple[BrokerConsumer | None, Any, Delivery]] = {}
        """What is not settled, by its number; in the order of numbers, as it came. Usual properties are still bytes."""
        self._ids: dict[str | int, tuple[int, int]] = {}
        """By message id: delivery tag and copy number of the held message."""
        self._arrived: deque[Delivery] = deque()
        self._unfit: list[Delivery] = []
        """What has to be copied instead of being handed over: worn, or too early."""
        self._newest: deque[int] = deque(maxlen=OLD_AFTER_LOOKS + 1)
        """The last number that had come, each time that somebody asked for what is old."""
        self._bell = asyncio.Event()
        self._consumers: list[BrokerConsumer] = []
        self._consumed = 0
        self._last = 0
        """The number of what came last."""
        self._settlements = 0
        self._unsent_acks: list[int] = []
        """Numbers that are settled, and wait to be acked together with those before them."""
        self._ack_timer: asyncio.TimerHandle | None = None
        self._qos = 0
        self._pulling = asyncio.Lock()
        self._on_empty: Callable[[], None] = lambda: None
        self._is_cancelled = False
        self.is_stream_like = False
        """Whether a message brought an offset along, as those of streams do."""
        channel.on_end = self._bell.set
        channel.raw.add_on_cancel_callback(self._cancelled)
        channel.raw.add_callback(lambda _: self._on_empty(), [Basic.GetEmpty], one_shot=False)

    def __len__(self) -> int:
        """How many messages are not settled."""
        return len(self._held) if self._channel.is_open else 0

    @property
    def activity(self) -> tuple[str, int, int]:
        """It is another one if anything came or was settled."""
        return self._id, self._last, self._settlements

    @property
    def is_over(self) -> bool:
        return self._is_cancelled or not self._channel.is_open

    def check(self) -> None:
        """Raise if nothing more can come."""
        if self._is_cancelled:
            raise UnavailableError(
                f"{self._channel.name}: the queue {self.queue!r} was deleted, or moved to another node; declare it "
                "again if it is gone"
            )
        if not self._channel.is_open:
            reason = self._channel.ended
            text = getattr(reason, "reply_text", "") or str(reason) or type(reason).__name__
            if refusal_code(reason) == PRECONDITION and "timed out" in text:
                text += "; a message was held for longer than the broker allows: raise its consumer_timeout"
            raise UnavailableError(f"{self._channel.name}: {text}")

    # What comes.

    async def wait(self, limit: int, wait_s: float) -> None:
        """Let messages come, and return when one is here or the time is over."""
        if self.has_arrived():
            return
        if not any(consumer.left > 0 for consumer in self._consumers):
            await self._consume(min(self._prefetch, PREFETCH_FACTOR * limit))
        self._bell.clear()
        if self.has_arrived() or self.is_over:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._bell.wait()

    async def pull(self, limit: int) -> None:
        """Fetch what is there, one by one, without letting more come."""
        async with self._pulling:
            while len(self._arrived) < limit and await self._pull_one():
                pass

    async def probe(self) -> None:
        """Fetch one message more, if there is one; a stream refuses that."""
        async with self._pulling:
            await self._pull_one()

    def has_arrived(self) -> bool:
        """Whether there is something to take."""
        return bool(self._arrived or self._unfit)

    def take(self, limit: int) -> list[Delivery]:
        arrived = self._arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]

    def take_unfit(self) -> list[Delivery]:
        """What has to be copied instead of being handed over."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def held_long(self) -> list[Delivery]:
        """What is held for at least twice as long as the time between two calls of this."""
        self._newest.append(self._last)
        if len(self._newest) <= OLD_AFTER_LOOKS:
            return []
        return [one for tag, (_, _, one) in self._held.items() if tag <= self._newest[0]]

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        self._arrived.extendleft(reversed(deliveries))

    def stop_consuming(self) -> None:
        """Let nothing more come, and give back what nobody has taken: others may be waiting for it."""
        self.flush_acks()
        if self.is_over or not (self._consumers or self._arrived):
            return
        self._channel.hand_to_nobody()
        for consumer in self._consumers:
            self._channel.raw.basic_cancel(consumer.tag)
        self._consumers = []
        unwanted, self._arrived = self._arrived, deque()
        self._requeue(unwanted)

    def close(self) -> None:
        """Whatever is held comes again."""
        self.flush_acks()
        self._channel.close()

    async def _consume(self, prefetch: int) -> None:
        if prefetch != self._qos:
            await self._channel.ask("basic_qos", prefetch_count=prefetch)
            self._qos = prefetch
        self._consumed += 1
        consumer = BrokerConsumer(f"keywise-{self._id}-{self._consumed}", prefetch, left=prefetch)
        self._consumers.append(consumer)
        self._channel.hand_to(consumer.tag, partial(self._take_usual, consumer))

        def take(_: Any, method: Any, properties: Any, body: bytes) -> None:
            self._take(consumer, method, properties, body)

        await self._channel.ask("basic_consume", queue=self.queue, on_message_callback=take, consumer_tag=consumer.tag)

    async def _pull_one(self) -> bool:
        """Whether there was one."""

        def call(done: Callable[[Any], None]) -> None:
            def got(channel: Any, method: Any, properties: Any, body: bytes) -> None:
                self._take(None, method, properties, body)
                done(True)

            self._on_empty = lambda: done(False)
            self._channel.raw.basic_get(self.queue, got)

        return bool(await self._channel.answered(call))

    def _take_usual(
        self, consumer: BrokerConsumer, tag: int, redelivered: bool, key: bytes, properties: bytes, body: bytes
    ) -> None:
        """One without headers of others: most of what comes, so this is short."""
        stamp = stamp_of(properties)
        identity = parse_identity(stamp[0], body) if stamp is not None and stamp[0] is not None else None
        if identity is not None:
            is_unusual = bool(identity.due) or identity.id in self._ids or identity.id in self._copies
        else:
            is_unusual = redelivered and self._copies.knows_originals
        if stamp is None or is_unusual:
            method = Basic.Deliver(delivery_tag=tag, redelivered=redelivered, routing_key=_key_text(key))
            self._take(consumer, method, decoded(properties), body)
            return
        receipt, routing_key = self._first + tag, _key_text(key)
        if identity is None:
            id, moment, count = f"{self._id}.{tag}", sent_at(stamp[1]), 1 + redelivered
        else:
            self._ids[identity.id] = tag, identity.count
            id, moment, count = identity.id, identity.sent_at, identity.count + 1 + redelivered
        delivery = Delivery(id, receipt, body, moment, count, None, routing_key)
        self._arrived.append(delivery)
        self._keep(consumer, tag, properties, delivery)

    def _take(self, consumer: BrokerConsumer | None, method: Any, properties: Any, body: bytes) -> None:
        headers, tag, redelivered = properties.headers or {}, method.delivery_tag, method.redelivered
        self.is_stream_like = self.is_stream_like or OFFSET in headers
        before, identity = times_before(headers, redelivered), identity_of(headers, body)
        is_unfit = consumer is not None and _is_near_delivery_limit(properties)
        id, moment = f"{self._id}.{tag}", sent_at(properties.timestamp)
        routing_key = routing_key_of(headers, method.routing_key)
        content = partial(content_of, properties, body, routing_key)
        known = self._known_id(identity, redelivered, content)
        number = identity.count if identity is not None else ORIGINAL
        if known is not None and self._is_needless(known, number, content):
            self._held[tag] = (consumer, properties, Delivery(id, self._first + tag, body, moment, before + 1))
            self._last = tag
            if consumer is not None:
                consumer.left -= 1
            self.ack([self._held[tag][2]])
            return
        if identity is not None:
            before, moment = before + identity.count, identity.sent_at
            is_unfit = is_unfit or identity.due > time.time()
        # The copy may have come before its original was acked: both are here, and each has to be settled.
        if known is not None and known not in self._ids:
            id = known
            self._ids[id] = tag, number
        delivery = Delivery(id, self._first + tag, body, moment, before + 1, shown_headers(headers), routing_key)
        (self._unfit if is_unfit else self._arrived).append(delivery)
        self._keep(consumer, tag, properties, delivery)

    def _known_id(
        self, identity: MessageIdentity | None, redelivered: bool, content: Callable[[], bytes]
    ) -> str | None:
        """The id that a message had before, here or in one of its copies."""
        if identity is not None:
            return identity.id
        if redelivered and self._copies.knows_originals:
            return self._copies.id_of_original(content())
        return None

    def _is_needless(self, id: str, number: int, content_of_this: Callable[[], bytes]) -> bool:
        """Whether the same message is here or in a queue under a number that is at least as high.

        If it is here under a lower number, that one is acked: of two copies, all workers have to keep the same one.
        """
        if id not in self._ids and id not in self._copies:
            return False
        content = content_of_this()
        if self._copies.is_outdated(id, content, number):
            return True
        tag, held_number = self._ids.get(id, (0, 0))
        # A message that is being copied will be acked soon, so another copy must not be dropped in its favour.
        if tag not in self._held or self._copies.is_under_way(id):
            return False
        held = self._held[tag][2]
        if content_of(self._properties(tag), held.body, held.routing_key) != content:
            return False
        if number > held_number:
            self.withdraw([held])
            return False
        return True

    def _keep(self, consumer: BrokerConsumer | None, tag: int, properties: Any, delivery: Delivery) -> None:
        self._held[tag] = (consumer, properties, delivery)
        self._last = tag
        if consumer is not None:
            consumer.left -= 1
        if not self._bell.is_set():
            self._bell.set()

    # What is settled.

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries of this channel that are not settled."""
        acked = self._settled([tag for tag, _ in self._unsettled(deliveries)])
        self._unsent_acks = sorted([*self._unsent_acks, *acked])
        # What is held and what is not told share the prefetch: if there is little room, the broker is told at once.
        room = sum(consumer.prefetch for consumer in self._consumers) - len(self._held)
        self._send_acks(max(0, room) // 2)

    def withdraw(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries that may not have been handed over yet."""
        self.ack(deliveries)
        self._arrived = deque(one for _, one in self._unsettled(self._arrived))
        self._unfit = [one for _, one in self._unsettled(self._unfit)]

    def unsettled(self, deliveries: Sequence[Delivery]) -> list[tuple[Delivery, Any]]:
        """Those that are not settled, with their properties."""
        return [(one, self._properties(tag)) for tag, one in self._unsettled(deliveries)]

    def requeue_later(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Let the broker have them again after a while, if they are still here then."""
        asyncio.get_running_loop().call_later(min(delay_s, REQUEUE_MAX_S), self._requeue, [*deliveries])

    def _unsettled(self, deliveries: Sequence[Delivery]) -> list[tuple[int, Delivery]]:
        if not self._channel.is_open:
            return []
        found = ((int(one.receipt) - self._first, one) for one in deliveries)
        return [(tag, one) for tag, one in found if tag in self._held]

    def _properties(self, tag: int) -> Any:
        properties = self._held[tag][1]
        return decoded(properties) if isinstance(properties, bytes) else properties

    def _requeue(self, deliveries: Sequence[Delivery]) -> None:
        """Those that came too often are kept: each time counts, and a copy counts from the beginning."""
        mine = self._unsettled(deliveries)
        worn = {tag for tag, _ in mine if _is_near_delivery_limit(self._properties(tag))}
        if worn:
            self._unfit += (one for tag, one in mine if tag in worn)
            self._bell.set()
        # First, while they are still held: an ack for many would cover those that go back.
        self.flush_acks()
        back = self._settled([tag for tag, _ in mine if tag not in worn])
        self._send_settlement(NACK, sorted(back))

    def flush_acks(self) -> None:
        """Ack what waits to be acked: a word about others must not mean them too, and nobody may be left to say it."""
        if self._channel.is_open:
            self._send_acks(0)

    def _send_acks(self, unsent_max: int) -> None:
        """Ack as much as can be said in one word, and the rest too if it is more than that, or soon."""
        unsent = self._unsent_acks
        together = self._together(unsent)
        if len(unsent) - together > unsent_max:
            together = len(unsent)
        self._send_settlement(ACK, unsent[:together])
        self._unsent_acks = unsent[together:]
        if self._unsent_acks and self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_LATER_S, self._flush_late)

    def _flush_late(self) -> None:
        self._ack_timer = None
        self.flush_acks()

    def _settled(self, tags: list[int]) -> list[int]:
        self._settlements += len(tags)
        for tag in tags:
            consumer, _, delivery = self._held.pop(tag)
            if self._ids.get(delivery.id, (0, 0))[0] == tag:
                del self._ids[delivery.id]
            if consumer is not None:
                consumer.left += 1
        return tags

    def _together(self, tags: list[int]) -> int:
        """How many of these, in their order, come before everything that is not settled yet."""
        oldest = next(iter(self._held), None)
        return len(tags) if oldest is None else bisect_left(tags, oldest)

    def _send_settlement(self, method: int, tags: list[int]) -> None:
        """Tell the broker about these and no others: one word for all up to the first that is not settled yet.

        The last of those has to be one that the broker still waits for: others are no tags any more.
        """
        self._channel.settle(method, tags, self._together(tags))

    def _cancelled(self, frame: Any) -> None:
        self._is_cancelled = True
        self._bell.set()


def _key_text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


def _is_near_delivery_limit(properties: Any) -> bool:
    """Whether its queue may soon throw a message away."""
    return times_before(properties.headers or {}, False) >= COPY_AFTER_DELIVERIES
