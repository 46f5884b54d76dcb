"""A subscription to a RabbitMQ queue: one channel, the messages that arrived on it, and which are not settled yet."""

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
"""Bits of a receipt for the delivery tag; the bits above them identify the channel."""
COPY_AFTER_DELIVERIES = 3
"""A quorum queue discards a message at its delivery limit. The source copies a message after this many deliveries,
because a copy starts at 0."""
PREFETCH_FACTOR = 2
"""The prefetch is this many times the limit of a `receive`, so that the next batch arrives while this one is
processed."""
REQUEUE_MAX_S = 60.0
ACK_LATER_S = 0.5
"""How long an ack waits for older deliveries to be settled. One `multiple` ack for many costs the broker and this
process as much as an ack for one."""
OLD_AFTER_CHECKS = 2
"""A message is old if it was held at the check that was this many checks ago."""


@dataclass(slots=True, eq=False)
class BrokerConsumer:
    """A consumer at the broker, with its prefetch count and how many more messages may arrive before the next ack."""

    tag: str
    prefetch: int
    left: int


class Subscription:
    """One channel. When it closes, its receipts are void, and the broker delivers its unsettled messages again."""

    def __init__(self, channel: Channel, queue: str, prefetch: int, copies: CopyLog) -> None:
        self.queue = queue
        self._copies = copies
        self._channel = channel
        self._prefetch = prefetch
        self._id = secrets.token_hex(8)
        self._receipt_base = secrets.randbits(64) << TAG_BITS
        self._held: dict[int, tuple[BrokerConsumer | None, Any, Delivery]] = {}
        """Unsettled messages by delivery tag, in the order of arrival. Properties from the fast path are
        still encoded."""
        self._ids: dict[str | int, tuple[int, int]] = {}
        """By message id: delivery tag and copy number of the held message."""
        self._arrived: deque[Delivery] = deque()
        self._unfit: list[Delivery] = []
        """Messages that have to be copied and not handed over: near the delivery limit, or before their time."""
        self._last_tags: deque[int] = deque(maxlen=OLD_AFTER_CHECKS + 1)
        """The last delivery tag at each of the last checks for old messages."""
        self._wakeup = asyncio.Event()
        self._consumers: list[BrokerConsumer] = []
        self._consumed = 0
        self._last_tag = 0
        """The delivery tag of the newest message."""
        self._settlements = 0
        self._unsent_acks: list[int] = []
        """Delivery tags that are settled here and not acked at the broker yet, in ascending order."""
        self._ack_timer: asyncio.TimerHandle | None = None
        self._qos = 0
        self._pulling = asyncio.Lock()
        self._on_empty: Callable[[], None] = lambda: None
        self._is_cancelled = False
        self.is_stream_like = False
        """Whether a message had an offset header, as messages of streams have."""
        channel.on_end = self._wakeup.set
        channel.raw.add_on_cancel_callback(self._cancelled)
        channel.raw.add_callback(lambda _: self._on_empty(), [Basic.GetEmpty], one_shot=False)

    def __len__(self) -> int:
        """How many messages are not settled; 0 if the channel is closed, because the broker has them back."""
        return len(self._held) if self._channel.is_open else 0

    @property
    def activity(self) -> tuple[str, int, int]:
        """A value that changes whenever a message arrives or is settled."""
        return self._id, self._last_tag, self._settlements

    @property
    def is_over(self) -> bool:
        return self._is_cancelled or not self._channel.is_open

    def check(self) -> None:
        """Raise if no more messages can arrive."""
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

    # Arriving.

    async def wait(self, limit: int, wait_s: float) -> None:
        """Wait for the first message; starts a consumer if the broker may send no more to the present ones."""
        if self.has_arrived():
            return
        if not any(consumer.left > 0 for consumer in self._consumers):
            await self._consume(min(self._prefetch, PREFETCH_FACTOR * limit))
        self._wakeup.clear()
        if self.has_arrived() or self.is_over:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wakeup.wait()

    async def pull(self, limit: int) -> None:
        """Fetch up to `limit` messages with `basic.get`, without a consumer that would prefetch more."""
        async with self._pulling:
            while len(self._arrived) < limit and await self._pull_one():
                pass

    async def probe(self) -> None:
        """Fetch one more message with `basic.get`, if there is one; a stream rejects this."""
        async with self._pulling:
            await self._pull_one()

    def has_arrived(self) -> bool:
        """Whether a message can be taken or has to be copied."""
        return bool(self._arrived or self._unfit)

    def take(self, limit: int) -> list[Delivery]:
        arrived = self._arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]

    def take_unfit(self) -> list[Delivery]:
        """Return the messages that have to be copied and not handed over, and remove them from here."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def held_long(self) -> list[Delivery]:
        """Return the messages that were held already two checks ago; each call is a check."""
        self._last_tags.append(self._last_tag)
        if len(self._last_tags) <= OLD_AFTER_CHECKS:
            return []
        return [one for tag, (_, _, one) in self._held.items() if tag <= self._last_tags[0]]

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        self._arrived.extendleft(reversed(deliveries))

    def stop_consuming(self) -> None:
        """Cancel the consumers, and requeue what was prefetched and not taken: other workers may have time for it."""
        self.flush_acks()
        if self.is_over or not (self._consumers or self._arrived):
            return
        self._channel.drop_handlers()
        for consumer in self._consumers:
            self._channel.raw.basic_cancel(consumer.tag)
        self._consumers = []
        unused, self._arrived = self._arrived, deque()
        self._requeue(unused)

    def close(self) -> None:
        """Close the channel; the broker delivers its unsettled messages again."""
        self.flush_acks()
        self._channel.close()

    async def _consume(self, prefetch: int) -> None:
        if prefetch != self._qos:
            await self._channel.ask("basic_qos", prefetch_count=prefetch)
            self._qos = prefetch
        self._consumed += 1
        consumer = BrokerConsumer(f"keywise-{self._id}-{self._consumed}", prefetch, left=prefetch)
        self._consumers.append(consumer)
        self._channel.handle_deliveries(consumer.tag, partial(self._take_plain, consumer))

        def take(_: Any, method: Any, properties: Any, body: bytes) -> None:
            self._take(consumer, method, properties, body)

        await self._channel.ask("basic_consume", queue=self.queue, on_message_callback=take, consumer_tag=consumer.tag)

    async def _pull_one(self) -> bool:
        """Fetch one message with `basic.get`; return False if the queue is empty."""

        def call(done: Callable[[Any], None]) -> None:
            def got(channel: Any, method: Any, properties: Any, body: bytes) -> None:
                self._take(None, method, properties, body)
                done(True)

            self._on_empty = lambda: done(False)
            self._channel.raw.basic_get(self.queue, got)

        return bool(await self._channel.answered(call))

    def _take_plain(
        self, consumer: BrokerConsumer, tag: int, redelivered: bool, key: bytes, properties: bytes, body: bytes
    ) -> None:
        """Take a message with no headers but ours, without decoding its properties: the fast path for most messages."""
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
        receipt, routing_key = self._receipt_base + tag, _key_text(key)
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
        if known is not None and self._is_redundant(known, number, content):
            # Held for a moment, so that `ack` settles it and counts it like any other.
            self._held[tag] = (consumer, properties, Delivery(id, self._receipt_base + tag, body, moment, before + 1))
            self._last_tag = tag
            if consumer is not None:
                consumer.left -= 1
            self.ack([self._held[tag][2]])
            return
        if identity is not None:
            before, moment = before + identity.count, identity.sent_at
            is_unfit = is_unfit or identity.due > time.time()
        # A copy may arrive before its original is acked. Then both are held, and the second one gets a new id, so that
        # each is settled by itself.
        if known is not None and known not in self._ids:
            id = known
            self._ids[id] = tag, number
        delivery = Delivery(id, self._receipt_base + tag, body, moment, before + 1, shown_headers(headers), routing_key)
        (self._unfit if is_unfit else self._arrived).append(delivery)
        self._keep(consumer, tag, properties, delivery)

    def _known_id(
        self, identity: MessageIdentity | None, redelivered: bool, content: Callable[[], bytes]
    ) -> str | None:
        """Return the id that a message got earlier, in a header of ours or when its original was copied."""
        if identity is not None:
            return identity.id
        if redelivered and self._copies.knows_originals:
            return self._copies.id_of_original(content())
        return None

    def _is_redundant(self, id: str, number: int, content_of_this: Callable[[], bytes]) -> bool:
        """Whether the same message, with a copy number at least as high, is held here or known to be in a queue.

        If it is held here with a lower number, the held one is acked. All workers must keep the same one of two copies:
        otherwise two workers could each drop the one that the other keeps.
        """
        if id not in self._ids and id not in self._copies:
            return False
        content = content_of_this()
        if self._copies.is_outdated(id, content, number):
            return True
        tag, held_number = self._ids.get(id, (0, 0))
        # A held message that is being copied will be acked soon, so this copy must not be dropped in its favour.
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
        self._last_tag = tag
        if consumer is not None:
            consumer.left -= 1
        if not self._wakeup.is_set():
            self._wakeup.set()

    # Settling.

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Settle deliveries; those of other channels, and those that are settled already, are ignored."""
        acked = self._settled([tag for tag, _ in self._unsettled(deliveries)])
        self._unsent_acks = sorted([*self._unsent_acks, *acked])
        # Held messages and unsent acks share the prefetch. If little of it is left, send the acks now, or the broker
        # would stop sending messages.
        room = sum(consumer.prefetch for consumer in self._consumers) - len(self._held)
        self._send_acks(max(0, room) // 2)

    def withdraw(self, deliveries: Sequence[Delivery]) -> None:
        """Ack deliveries that may not have been taken yet, and do not hand them over."""
        self.ack(deliveries)
        self._arrived = deque(one for _, one in self._unsettled(self._arrived))
        self._unfit = [one for _, one in self._unsettled(self._unfit)]

    def unsettled(self, deliveries: Sequence[Delivery]) -> list[tuple[Delivery, Any]]:
        """Return the deliveries that are not settled, with their properties."""
        return [(one, self._properties(tag)) for tag, one in self._unsettled(deliveries)]

    def requeue_later(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Requeue deliveries after a delay, if they are not settled by then."""
        asyncio.get_running_loop().call_later(min(delay_s, REQUEUE_MAX_S), self._requeue, [*deliveries])

    def _unsettled(self, deliveries: Sequence[Delivery]) -> list[tuple[int, Delivery]]:
        if not self._channel.is_open:
            return []
        found = ((int(one.receipt) - self._receipt_base, one) for one in deliveries)
        return [(tag, one) for tag, one in found if tag in self._held]

    def _properties(self, tag: int) -> Any:
        properties = self._held[tag][1]
        return decoded(properties) if isinstance(properties, bytes) else properties

    def _requeue(self, deliveries: Sequence[Delivery]) -> None:
        """Requeue deliveries, except those near the delivery limit: each requeue counts, so `receive` copies these."""
        mine = self._unsettled(deliveries)
        worn = {tag for tag, _ in mine if _is_near_delivery_limit(self._properties(tag))}
        if worn:
            self._unfit += (one for tag, one in mine if tag in worn)
            self._wakeup.set()
        # Flush the acks while these deliveries are still held: afterwards, a `multiple` ack would cover them too.
        self.flush_acks()
        back = self._settled([tag for tag, _ in mine if tag not in worn])
        self._send_settlement(NACK, sorted(back))

    def flush_acks(self) -> None:
        """Send all unsent acks, one by one if older deliveries are still held."""
        if self._channel.is_open:
            self._send_acks(0)

    def _send_acks(self, unsent_max: int) -> None:
        """Send the acks that one `multiple` frame covers; send the rest if it exceeds `unsent_max`, otherwise later."""
        unsent = self._unsent_acks
        count = self._count_cumulative(unsent)
        if len(unsent) - count > unsent_max:
            count = len(unsent)
        self._send_settlement(ACK, unsent[:count])
        self._unsent_acks = unsent[count:]
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

    def _count_cumulative(self, tags: list[int]) -> int:
        """How many of these ascending tags are below every held one, so that one `multiple` frame covers them."""
        oldest = next(iter(self._held), None)
        return len(tags) if oldest is None else bisect_left(tags, oldest)

    def _send_settlement(self, method: int, tags: list[int]) -> None:
        """Ack or nack exactly these tags, with one `multiple` frame for those below the oldest held one.

        The tag of a `multiple` frame has to be unsettled at the broker, which otherwise closes the channel (unknown
        delivery tag).
        """
        self._channel.settle(method, tags, self._count_cumulative(tags))

    def _cancelled(self, frame: Any) -> None:
        self._is_cancelled = True
        self._wakeup.set()


def _key_text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


def _is_near_delivery_limit(properties: Any) -> bool:
    """Whether the queue may discard this message after a few more deliveries."""
    return times_before(properties.headers or {}, False) >= COPY_AFTER_DELIVERIES
