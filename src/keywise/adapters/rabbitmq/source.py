"""A queue of RabbitMQ, consumed as it is.

Messages come as they are asked for, and belong to the channel that they came on until they are acked.
A message that is put off is copied to a delay queue of ours; only when that is confirmed, the original is acked.
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
"""What a broker is set to by default."""
DELIVERY_LIMIT_MIN = COPY_AFTER_DELIVERIES + 2
"""With less, a message may be thrown away before it is made anew."""
PREFETCH = 2_000
PREFETCH_MAX = 65_535
QUEUE_MAX_BYTES = 255
IDLE_S = 1.0
"""If nobody asks for so long, nothing more comes, and what came ahead goes back."""
MOVING_S = 0.25
"""How long a message is on its way, from a delay queue to its queue or from the broker to here, at the most."""
LOOKS_MAX = 10
"""So often an empty queue is looked at again, because something was taken or settled meanwhile."""
AGES = 4
"""The source looks for old messages this many times per ack timeout, and copies those that it held two looks before."""
PREPARED_DELAYS_S = (1.0, 5.0)
"""The delays that are needed first: what finds no room behind a blocked key waits for half a second, then longer."""
DEAD_LETTER_TIMEOUT_S = 180.0
"""What a broker is set to by default: after so long it tries again to move a message from a delay queue."""
DEAD_LETTER_MARGIN, MOVING_LATE_S = 1.1, 5.0
"""Margin on the dead-letter timeout: a factor, and seconds."""
STATISTICS_S = 11.0
"""A broker collects its statistics every five seconds, and those of quorum queues from figures that are as old."""
UNCOUNTED = "name the management API with management= in the URL of the source, to count what other consumers hold"
BACKGROUND_MAX = 100
"""The most background releases at a time; further ones wait in `release`."""
RENEWED_S = 1.0
"""Delay of a renewed copy, so that original and copy are not delivered together."""


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
        """How long the broker lets a delivery be held."""
        self._management = management
        self._dead_letter_timeout_s = dead_letter_timeout_s
        self._empty_since: float | None = None
        """Since when nothing was counted."""
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._link = BrokerLink(broker, f"taking from {queue}")
        self._publisher = Publisher(broker)
        self._opening = asyncio.Lock()
        self._subscription: Subscription | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._delay_queues = DelayQueues(broker, self._link, self._publisher, queue)
        self._background: set[asyncio.Task[None]] = set()
        """Tasks of this source; they never raise."""
        self._copies = CopyLog()
        self._is_queue = False
        """Whether it is certain that the queue is no stream."""
        self._leaving: set[str | int] = set()
        """Receipts of what is about to be put off; it is copied for that anyway."""

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        self._link.liveness = self._publisher.link.liveness = Liveness(lease_s, runtime_max_s)

    async def __aenter__(self) -> Self:
        try:
            await self._link.ready(self._queue)
            if self._management:
                await self._learn_limits()
        except BaseException:
            await self._link.close()
            raise
        self._run_in_background(self._keep_young())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._rest_later(None)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._subscription is not None:
            self._broker.subscriptions.discard(self._subscription)
            self._subscription.flush_acks()
        await self._link.close()
        await self._publisher.close()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        self._rest_later(None)
        subscription = await self._opened()
        try:
            if wait_s > 0:
                await subscription.wait(limit, wait_s)
                subscription = await self._without_streams(subscription)
            else:
                await subscription.pull(limit)
        except DatabaseError as error:
            raise self._while_running(error) from error
        finally:
            self._rest_later(IDLE_S)
        subscription.check()
        if unfit := subscription.take_unfit():
            await self._renew(subscription, unfit)
        return subscription.take(limit)

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        """They are hidden as long as the channel lives."""

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
                # Whoever releases has more to do than to wait for that.
                self._run_in_background(self._release_later(subscription, [*deliveries], delay_s))
            else:
                await self._put_off(subscription, deliveries, delay_s)
        except (DatabaseError, UnavailableError) as error:
            # Whoever releases forgets them, and they would be here until the channel ends.
            subscription.requeue_later(deliveries, delay_s)
            raise self._while_running(error) from error

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
        """What is ready or delayed, and what this process holds; a broker tells nobody what other processes hold."""
        for _ in range(LOOKS_MAX):
            before = self._activity()
            # What is on its way is in no queue for a moment.
            for pause_s in (0.0, MOVING_S):
                await asyncio.sleep(pause_s)
                if counted := await self._count():
                    return counted
            if self._activity() == before:
                return 0
        # Something went through it each time, so it is not empty, and nobody can say more.
        return 1

    async def backlog(self) -> Backlog:
        """With the management API, everything is counted; without it, what other processes hold is unknown."""
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
        """For how long messages may be on their way back from a delay queue, where nobody can count them.

        A broker that has been restarted may move what had expired only after its time limit for that. It does not say
        when it was started, so the time since the connection was made counts. Delay queues that are younger are safe.
        """
        found = self._delay_queues.found
        if self._link.connections <= 1 and found <= self._broker.made:
            return 0.0
        longest_s = DEAD_LETTER_MARGIN * self._dead_letter_timeout_s + MOVING_LATE_S
        return max(0.0, longest_s - (now - self._link.connected_at)) if found else 0.0

    # Taking.

    async def _learn_limits(self) -> None:
        management = self._broker.management(self._management)
        limits = await asyncio.to_thread(management.limits_of, self._queue)
        if limits.is_stream:
            raise self._refused_stream()
        if limits.ack_timeout_s is not None:
            self.ack_timeout_s = limits.ack_timeout_s
        if limits.delivery_limit is not None and limits.delivery_limit < DELIVERY_LIMIT_MIN:
            raise DatabaseError(
                f"{self._broker.name}: the queue {self._queue!r} has the delivery limit {limits.delivery_limit}, and "
                f"would throw away messages whose workers were restarted; raise it to {DELIVERY_LIMIT_MIN} or more"
            )
        # What is set for all queues is set for delay queues too, though nobody thought of them.
        wait = wait_of(self._queue, CLASSES_S[-1], time.time())
        for policy in await asyncio.to_thread(management.policies_for, wait.queue):
            if (limit := wait.cut_by(policy.definition)) is not None:
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
                    # Early, so that they can be used when they are needed, and a user without the rights finds out now.
                    for delay_s in PREPARED_DELAYS_S:
                        await self._delay_queues.usable_in_s(delay_s)
                channel = await self._link.channel()
                self._subscription = Subscription(channel, self._queue, self._prefetch, self._copies)
                self._broker.subscriptions.add(self._subscription)
            return self._subscription

    async def _without_streams(self, subscription: Subscription) -> Subscription:
        """Refuse a stream. Only a stream rejects `basic.get` as not implemented, so a probe tells."""
        if self._is_queue or subscription.is_over:
            return subscription
        if subscription.is_stream_like or not subscription.has_arrived():
            try:
                await subscription.probe()
            except DatabaseError as error:
                if refusal_code(error) != LOCKED:
                    raise
                # A queue with a single active consumer refuses that too, and ends the channel.
                subscription = await self._opened()
        self._is_queue = True
        return subscription

    async def _renew(self, subscription: Subscription, unfit: Sequence[Delivery]) -> None:
        """Copy worn messages: a copy starts with delivery count 0. Messages that came too early wait again."""
        worn = await self._without_early(subscription, unfit)
        try:
            await self._copy(subscription, worn, 0.0)
        except (DatabaseError, UnavailableError):
            subscription.put_first(worn)

    async def _without_early(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Put off what came too early until it is due; return the others."""
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

    async def _keep_young(self) -> None:
        """A broker ends the channel of whoever holds a message for too long, such as one of a key that is paused."""
        while True:
            await asyncio.sleep(self.ack_timeout_s / AGES)
            subscription = self._subscription
            if subscription is None:
                continue
            old = [one for one in subscription.held_long() if one.receipt not in self._leaving]
            with suppress(DatabaseError, UnavailableError):
                old = await self._without_early(subscription, old)
                await self._copy(subscription, old, RENEWED_S)
                subscription.withdraw(old)

    async def _put_off(self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float) -> None:
        receipts = {one.receipt for one in deliveries}
        self._leaving |= receipts
        try:
            await self._copy(subscription, deliveries, delay_s)
        finally:
            self._leaving -= receipts

    async def _release_later(self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float) -> None:
        try:
            await self._put_off(subscription, deliveries, delay_s)
        except (DatabaseError, UnavailableError):
            subscription.requeue_later(deliveries, delay_s)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _rest_later(self, seconds: float | None) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if seconds is not None and self._subscription is not None:
            self._resting = asyncio.get_running_loop().call_later(seconds, self._subscription.stop_consuming)

    # Putting.

    async def _copy(
        self, subscription: Subscription, deliveries: Sequence[Delivery], delay_s: float, due: float = 0.0
    ) -> None:
        """A copy goes to the end of the queue, perhaps after a delay, and then its original is acked."""
        due = due or due_after(delay_s, time.time())
        for start in range(0, len(deliveries), MESSAGES_IN_FLIGHT_MAX):
            if delay_s > 0 and (usable_in_s := await self._delay_queues.usable_in_s(delay_s)) > 0:
                await asyncio.sleep(usable_in_s)
            await self._publisher.open()
            # Look again after the waits: messages whose channel was lost meanwhile will come again and need no copy.
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
            # Also if others failed: the broker has these.
            subscription.ack(confirmed)
            for identity, content in zip(identities, contents, strict=True):
                self._copies.end(identity.id, content)

    async def _put(
        self, messages: Sequence[Message], delay_s: float, on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Into the queue, or into a delay queue first."""
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

    # Looking.

    async def _count(self) -> int:
        """In the order in which messages move, so that one which moves meanwhile is met at least once."""
        delayed = await self._delay_queues.count()
        ready = await self._link.ready(self._queue)
        return delayed + ready + sum(len(subscription) for subscription in self._subscriptions())

    def _activity(self) -> set[tuple[str, int, int]]:
        return {subscription.activity for subscription in self._subscriptions()}

    def _subscriptions(self) -> Iterator[Subscription]:
        """What this process takes from the queue, by this source or another."""
        return (subscription for subscription in self._broker.subscriptions if subscription.queue == self._queue)

    def _refused_stream(self) -> DatabaseError:
        return DatabaseError(
            f"{self._broker.name}: the queue {self._queue!r} is a stream, which has offsets and no acks; consume from "
            "a classic or a quorum queue, for example one that is bound to the same exchange"
        )

    def _while_running(self, error: DatabaseError | UnavailableError) -> DatabaseError | UnavailableError:
        """A queue that vanished may be declared again, and everything else goes on meanwhile."""
        if refusal_code(error) == NOT_IMPLEMENTED:
            return self._refused_stream()
        if isinstance(error, DatabaseError) and refusal_code(error) in (0, NOT_FOUND):
            return UnavailableError(str(error))
        return error


def connect(address: Address) -> Source:
    """`amqp://user:password@host:5672/vhost?queue=NAME`; the queue is named like the pipeline by default."""
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
