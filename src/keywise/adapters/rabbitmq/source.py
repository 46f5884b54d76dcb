"""A RabbitMQ queue as a source; the queue itself is consumed as it was declared.

The broker delivers messages to a channel, and they belong to that channel until they are acked.
To delay a message, the source publishes a copy to a delay queue, waits for the broker's confirm, and then acks the
original. If the connection or the process is lost in between, the broker has both: a message may be duplicated, but is
never lost.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from keywise.adapters.rabbitmq.broker import (
    LOCKED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    OPTIONS,
    Broker,
    BrokerLink,
    Liveness,
    broker_at,
    refusal_code,
)
from keywise.adapters.rabbitmq.copies import CopyLog
from keywise.adapters.rabbitmq.delay_classes import CLASSES_S, due_after, names_of, wait_of
from keywise.adapters.rabbitmq.delay_queues import DelayQueues
from keywise.adapters.rabbitmq.messages import (
    MessageIdentity,
    content_of,
    copied_properties,
    due_of,
    fresh_properties,
    identity_of,
    resent_properties,
)
from keywise.adapters.rabbitmq.publisher import MESSAGES_IN_FLIGHT_MAX, Message, NoSuchQueue, Publisher
from keywise.adapters.rabbitmq.subscription import COPY_AFTER_DELIVERIES, Subscription
from keywise.core.change import Delivery
from keywise.core.errors import AddressError, DatabaseError, UnavailableError
from keywise.core.settings import seconds
from keywise.core.source import Backlog, Source
from keywise.core.url import Address, redacted

ACK_TIMEOUT_S = 1_800.0
"""The broker's default `consumer_timeout`."""
DELIVERY_LIMIT_MIN = COPY_AFTER_DELIVERIES + 2
"""With a lower delivery limit, a quorum queue may discard a message before this source has copied it."""
PREFETCH = 2_000
PREFETCH_MAX = 65_535
QUEUE_MAX_BYTES = 255
IDLE_S = 1.0
"""After this time without a `receive`, the source cancels its consumers and requeues what it has prefetched."""
TRANSIT_S = 0.25
"""The longest time that a message is in transit, from a delay queue to its queue or from the broker to here."""
COUNTS_MAX = 10
"""How often `depth` counts again, because a message arrived or was settled while it counted an empty queue."""
CHECKS_PER_ACK_TIMEOUT = 4
"""The source checks for old messages this many times per ack timeout, and copies those that it held two checks before.
So it copies a message after half to three quarters of the timeout."""
PREPARED_DELAYS_S = (1.0, 5.0)
"""The delays that are needed first: an evicted message of a blocked key waits for half a second, then for longer."""
DEAD_LETTER_TIMEOUT_S = 180.0
"""The broker's default time until it tries again to move an expired message out of a delay queue."""
DEAD_LETTER_MARGIN, TRANSIT_MARGIN_S = 1.1, 5.0
"""Margin on the dead-letter timeout: a factor, and seconds."""
STATISTICS_S = 11.0
"""How old the statistics of a broker may be: it collects them every five seconds, and those of quorum queues from
figures that are up to five seconds old."""
UNCOUNTED = "name the management API with management= in the URL of the source, to count what other consumers hold"
BACKGROUND_MAX = 100
"""The most tasks in the background at a time; further calls of `release` wait for their own copies."""
RENEWED_S = 1.0
"""Delay of a renewed copy, so that the broker does not deliver it before its original is acked."""


class RabbitSource:
    """One queue of a broker."""

    visibility_s: float | None = None
    database: object | None = None

    def __init__(
        self,
        broker: Broker,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        management: str = "",
        dead_letter_timeout_s: float = DEAD_LETTER_TIMEOUT_S,
    ) -> None:
        self.ack_timeout_s = ack_timeout_s
        """How long the broker lets a consumer hold a delivery."""
        self._management = management
        self._dead_letter_timeout_s = dead_letter_timeout_s
        self._empty_since: float | None = None
        """Since when every count was zero; None if the last one was not."""
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._link = BrokerLink(broker, f"taking from {queue}")
        self._publisher = Publisher(broker)
        self._opening = asyncio.Lock()
        self._subscription: Subscription | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._delay_queues = DelayQueues(broker, self._link, self._publisher, queue)
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that renew and delay messages; they never raise."""
        self._copies = CopyLog()
        self._is_queue = False
        """Whether the source has made sure that the queue is not a stream."""
        self._being_delayed: set[str | int] = set()
        """Receipts of messages that are being copied to a delay queue. `_renew_old` skips them: that copy is
        young too."""

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        self._link.liveness = self._publisher.link.liveness = Liveness(lease_s, runtime_max_s)

    async def __aenter__(self) -> Self:
        try:
            await self._link.ready(self._queue)
            if self._management:
                await self._check_limits()
        except BaseException:
            await self._link.close()
            raise
        self._run_in_background(self._renew_old())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._set_idle_timer(None)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._subscription is not None:
            self._broker.subscriptions.discard(self._subscription)
            self._subscription.flush_acks()
        await self._link.close()
        await self._publisher.close()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        self._set_idle_timer(None)
        subscription = await self._opened()
        try:
            if wait_s > 0:
                await subscription.wait(limit, wait_s)
                subscription = await self._refuse_stream(subscription)
            else:
                await subscription.pull(limit)
        except DatabaseError as error:
            raise self._as_transient(error) from error
        finally:
            self._set_idle_timer(IDLE_S)
        subscription.check()
        if unfit := subscription.take_unfit():
            await self._renew(subscription, unfit)
        return subscription.take(limit)

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        """Do nothing: the broker hides deliveries from other consumers as long as the channel lives."""
        return ()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if self._subscription is not None:
            self._subscription.ack(deliveries)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        subscription = self._subscription
        if subscription is None or not subscription.unsettled(deliveries):
            return
        try:
            is_early = delay_s > 0 and await self._delay_queues.usable_in_s(delay_s) > 0
            if is_early and len(self._background) < BACKGROUND_MAX:
                # The delay queue is too new to be used. Copy in the background, so that the caller does not wait for
                # it.
                self._run_in_background(self._release_later(subscription, [*deliveries], delay_s))
            else:
                await self._delay(subscription, deliveries, delay_s)
        except (DatabaseError, UnavailableError) as error:
            # The caller forgets released deliveries. Without a requeue, the channel would hold them until it ends.
            subscription.requeue_later(deliveries, delay_s)
            raise self._as_transient(error) from error

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        now, prefix = time.time(), secrets.token_hex(8)
        due = due_after(delay_s, now)
        messages = [
            (body, fresh_properties(body, f"{prefix}.{number}", now, due))
            for number, body in enumerate(bodies, start=1)
        ]
        await self._put(messages, delay_s)

    async def send_again(self, body: bytes, headers: Mapping[str, str], routing_key: str) -> None:
        properties = resent_properties(body, f"{secrets.token_hex(8)}.1", time.time(), headers, routing_key)
        await self._put([(body, properties)], 0.0)

    async def depth(self) -> int:
        """Count the ready and the delayed messages, and those that this process holds.

        AMQP does not show what other processes hold.
        """
        for _ in range(COUNTS_MAX):
            before = self._activity()
            # A message in transit is in no queue for a moment, so an empty queue is counted twice.
            for pause_s in (0.0, TRANSIT_S):
                await asyncio.sleep(pause_s)
                if counted := await self._count():
                    return counted
            if self._activity() == before:
                return 0
        # Messages passed through during each count, so the queue is not empty; a higher number would be a guess.
        return 1

    async def backlog(self) -> Backlog:
        """Count all messages with the management API; without it, what other processes hold is unknown."""
        counted, now = await self.depth(), asyncio.get_running_loop().time()
        if not self._management:
            return Backlog(counted, is_all=False, unsure_s=self._returning_s(now), advice=UNCOUNTED)
        management = self._broker.management(self._management)
        totals = await asyncio.to_thread(management.totals_of, self._queue, names_of(self._queue))
        seen = max(counted, totals.messages)
        if seen or not totals.is_all:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        unsure_s = STATISTICS_S - (now - self._empty_since) if self._empty_since is not None else STATISTICS_S
        return Backlog(seen, totals.is_all, totals.held if totals.is_all else None, max(0.0, unsure_s))

    def _returning_s(self, now: float) -> float:
        """Return for how long messages may still be in transit from a delay queue, where they cannot be counted.

        A restarted broker may move messages that had expired only after its dead-letter timeout. It does not say when
        it started, so the time since this source connected counts. Delay queues that this process made itself, on its
        only connection, were not there before a restart.
        """
        found = self._delay_queues.found
        if self._link.connections <= 1 and found <= self._broker.made:
            return 0.0
        longest_s = DEAD_LETTER_MARGIN * self._dead_letter_timeout_s + TRANSIT_MARGIN_S
        return max(0.0, longest_s - (now - self._link.connected_at)) if found else 0.0

    # Receiving.

    async def _check_limits(self) -> None:
        management = self._broker.management(self._management)
        limits = await asyncio.to_thread(management.limits_of, self._queue)
        if limits.is_stream:
            raise self._stream_error()
        if limits.ack_timeout_s is not None:
            self.ack_timeout_s = limits.ack_timeout_s
        if limits.delivery_limit is not None and limits.delivery_limit < DELIVERY_LIMIT_MIN:
            raise DatabaseError(
                f"{self._broker.name}: the queue {self._queue!r} has the delivery limit {limits.delivery_limit}, and "
                f"would throw away messages whose workers were restarted; raise it to {DELIVERY_LIMIT_MIN} or more"
            )
        # A policy for all queues applies to the delay queues too, where a TTL or a length limit would lose messages.
        wait = wait_of(self._queue, CLASSES_S[-1], time.time())
        for policy in await asyncio.to_thread(management.policies_for, wait.queue):
            if (limit := wait.limited_by(policy.definition)) is not None:
                raise DatabaseError(
                    f"{self._broker.name}: the policy {policy.name!r} sets {limit} for {wait.queue!r}, where messages "
                    f"wait that are put off; exclude these queues, for example with the pattern ^(?!keywise\\.delay\\.)"
                )

    async def _opened(self) -> Subscription:
        async with self._opening:
            if self._subscription is None or self._subscription.is_over:
                if self._subscription is not None:
                    self._broker.subscriptions.discard(self._subscription)
                    self._subscription.close()
                else:
                    # Declare these early: a delay queue cannot be used at once, and a user who may not declare queues
                    # learns it at the start.
                    for delay_s in PREPARED_DELAYS_S:
                        await self._delay_queues.usable_in_s(delay_s)
                channel = await self._link.channel()
                self._subscription = Subscription(channel, self._queue, self._prefetch, self._copies)
                self._broker.subscriptions.add(self._subscription)
            return self._subscription

    async def _refuse_stream(self, subscription: Subscription) -> Subscription:
        """Refuse a stream. A probe shows it: only a stream rejects `basic.get` as not implemented."""
        if self._is_queue or subscription.is_over:
            return subscription
        if subscription.is_stream_like or not subscription.has_arrived():
            try:
                await subscription.probe()
            except DatabaseError as error:
                if refusal_code(error) != LOCKED:
                    raise
                # A queue with a single active consumer rejects `basic.get` too, and closes the channel; consume on a
                # new one.
                subscription = await self._opened()
        self._is_queue = True
        return subscription

    async def _renew(self, subscription: Subscription, unfit: Sequence[Delivery]) -> None:
        """Copy messages that are near the delivery limit, and delay those that came too early."""
        worn = await self._delay_early(subscription, unfit)
        try:
            await self._copy(subscription, worn, 0.0)
        except (DatabaseError, UnavailableError):
            # Near the limit is not at it: hand them over without a copy.
            subscription.put_back(worn)

    async def _delay_early(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Delay the messages that came too early until they are due; return the others."""
        now, others = time.time(), list[Delivery]()
        for one, properties in subscription.unsettled(deliveries):
            if (due := due_of(properties, one.body)) <= now:
                others.append(one)
                continue
            try:
                await self._copy(subscription, [one], due - now, due)
            except (DatabaseError, UnavailableError):
                subscription.requeue_later([one], due - now)
            else:
                subscription.withdraw([one])
        return others

    async def _renew_old(self) -> None:
        """Copy messages before the broker's ack timeout, after which it would close the channel.

        The broker would then redeliver every message of the channel. A message is held that long if, for example, its
        key is paused.
        """
        while True:
            await asyncio.sleep(self.ack_timeout_s / CHECKS_PER_ACK_TIMEOUT)
            subscription = self._subscription
            if subscription is None:
                continue
            old = [one for one in subscription.held_long() if one.receipt not in self._being_delayed]
            with suppress(DatabaseError, UnavailableError):
                old = await self._delay_early(subscription, old)
                await self._copy(subscription, old, RENEWED_S)
                # The flow may be working on some of these. Its ack will do nothing, and the copy will be a duplicate.
                subscription.withdraw(old)

    async def _delay(self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float) -> None:
        receipts = {one.receipt for one in deliveries}
        self._being_delayed |= receipts
        try:
            await self._copy(subscription, deliveries, delay_s)
        finally:
            self._being_delayed -= receipts

    async def _release_later(self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float) -> None:
        try:
            await self._delay(subscription, deliveries, delay_s)
        except (DatabaseError, UnavailableError):
            subscription.requeue_later(deliveries, delay_s)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _set_idle_timer(self, seconds: float | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if seconds is not None and self._subscription is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(seconds, self._subscription.stop_consuming)

    # Publishing.

    async def _copy(
        self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float, due: float = 0.0
    ) -> None:
        """Publish copies to the queue, perhaps after a delay, and ack each original once its copy is confirmed."""
        due = due or due_after(delay_s, time.time())
        for start in range(0, len(deliveries), MESSAGES_IN_FLIGHT_MAX):
            if delay_s > 0 and (usable_in_s := await self._delay_queues.usable_in_s(delay_s)) > 0:
                await asyncio.sleep(usable_in_s)
            await self._publisher.open()
            # Check again after the waits: messages whose channel was lost meanwhile come again and need no copy.
            mine = subscription.unsettled(deliveries[start : start + MESSAGES_IN_FLIGHT_MAX])
            await self._copy_now(subscription, mine, delay_s, due)

    async def _copy_now(
        self, subscription: Subscription, mine: Sequence[tuple[Delivery, Any]], delay_s: float, due: float
    ) -> None:
        messages, identities, contents = list[Message](), list[MessageIdentity](), list[bytes]()
        for one, properties in mine:
            given = identity_of(properties.headers or {}, one.body)
            content = content_of(properties, one.body, one.routing_key)
            id = given.id if given is not None else str(one.id)
            number = self._copies.begin(id, content, one.count, is_original=given is None)
            identity = MessageIdentity(id, number, one.sent_at, due)
            routing_key = one.routing_key if one.routing_key != self._queue else None
            messages.append((one.body, copied_properties(properties, one.body, identity, routing_key)))
            identities.append(identity)
            contents.append(content)
        confirmed: list[Delivery] = []

        def on_confirmed(place: int) -> None:
            self._copies.confirm(identities[place].id, contents[place], identities[place].count)
            confirmed.append(mine[place][0])

        try:
            await self._put(messages, delay_s, on_confirmed)
        finally:
            # Ack the confirmed ones even if others failed or the call was cancelled: the broker has their copies.
            subscription.ack(confirmed)
            for identity, content in zip(identities, contents, strict=True):
                self._copies.end(identity.id, content)

    async def _put(
        self, messages: Sequence[Message], delay_s: float, on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Publish messages to the queue, or to a delay queue if there is a delay."""
        if not messages:
            return
        try:
            if delay_s <= 0:
                await self._publisher.publish(self._queue, messages, on_confirmed)
            else:
                await self._delay_queues.publish(messages, delay_s, on_confirmed)
        except NoSuchQueue as error:
            raise DatabaseError(
                f"{self._broker.name}: no queue is called {self._queue!r}; declare it first: keywise consumes queues "
                "as they are"
            ) from error

    # Counting.

    async def _count(self) -> int:
        """Count in the order in which messages move, so that one that moves meanwhile is not missed."""
        delayed = await self._delay_queues.count()
        ready = await self._link.ready(self._queue)
        return delayed + ready + sum(len(subscription) for subscription in self._subscriptions())

    def _activity(self) -> set[tuple[str, int, int]]:
        return {subscription.activity for subscription in self._subscriptions()}

    def _subscriptions(self) -> Iterator[Subscription]:
        """The subscriptions of this process to the queue, by this source or another one of the app."""
        return (subscription for subscription in self._broker.subscriptions if subscription.queue == self._queue)

    def _stream_error(self) -> DatabaseError:
        return DatabaseError(
            f"{self._broker.name}: the queue {self._queue!r} is a stream, which has offsets and no acks; consume from "
            "a classic or a quorum queue, for example one that is bound to the same exchange"
        )

    def _as_transient(self, error: DatabaseError | UnavailableError) -> DatabaseError | UnavailableError:
        """Turn the error of a deleted queue into `UnavailableError`: another process may declare the queue again."""
        if refusal_code(error) == NOT_IMPLEMENTED:
            return self._stream_error()
        if isinstance(error, DatabaseError) and refusal_code(error) in (0, NOT_FOUND):
            return UnavailableError(str(error))
        return error


def connect(address: Address) -> Source:
    """Make the source for `amqp://user:password@host:5672/vhost?queue=NAME`; the default is the pipeline's name."""
    options = address.take("queue", "prefetch", "ack_timeout", "dead_letter_timeout", "management", *OPTIONS)
    url, broker = redacted(address.url), broker_at(address, options)
    prefetch = options.get("prefetch", str(PREFETCH))
    if not prefetch.isdecimal() or not 1 <= int(prefetch) <= PREFETCH_MAX:
        raise AddressError(f"{url}: prefetch={prefetch} has to be a whole number from 1 to {PREFETCH_MAX}")
    queue = options.get("queue", address.name)
    if not 0 < len(queue.encode()) <= QUEUE_MAX_BYTES:
        raise AddressError(f"{url}: the name of a queue has from 1 to {QUEUE_MAX_BYTES} bytes")
    management = options.get("management", "")
    if management and not _is_api(management):
        raise AddressError(
            f"{url}: management={management} is no address of an API; write for example "
            "management=http://localhost:15672"
        )
    ack_timeout_s = seconds(options.get("ack_timeout", ACK_TIMEOUT_S))
    return RabbitSource(
        broker,
        queue,
        prefetch=int(prefetch),
        ack_timeout_s=ack_timeout_s,
        management=management,
        dead_letter_timeout_s=seconds(options.get("dead_letter_timeout", DEAD_LETTER_TIMEOUT_S)),
    )


def _is_api(management: str) -> bool:
    try:
        parts = urlsplit(management)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
