"""A subscription of Google Cloud Pub/Sub, consumed as it is, by unary pulls.

The ack deadline of a message is its visibility timeout, and is extended as long as a worker holds the message.
A dead-letter policy moves a message away when it was delivered too often. A copy, as the SQS source sends it, would go
to all subscriptions of the topic. So nothing is copied: the source says which delivery is the last that the policy
allows, and the flow stores it as a dead letter.
"""

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec
from google.pubsub_v1 import types
from grpc.aio import AioRpcError

from keywise.adapters.pubsub.activity import SubscriptionActivity
from keywise.adapters.pubsub.errors import pubsub_errors, refused_receipts
from keywise.adapters.pubsub.messages import MESSAGE_MAX_BYTES, delivery_of, due_at, new_message, sized_batches
from keywise.adapters.pubsub.polls import Polls
from keywise.adapters.pubsub.service import OPTIONS, PUBLISHER, SUBSCRIBER, PubSubService, service_at
from keywise.core.change import Delivery
from keywise.core.clock import Clock
from keywise.core.errors import AddressError, DatabaseError, KeywiseError, UnavailableError
from keywise.core.settings import seconds
from keywise.core.source import VISIBILITY_S, Backlog, Source, visibility_of
from keywise.core.url import Address, redacted

DEADLINE_MIN_S, DEADLINE_MAX_S = 10, 600
"""The ack deadlines that Pub/Sub allows a subscription; a request may set a shorter one, but no longer one."""
RECEIPTS_MAX = 1_000
"""The most receipts of one request, which may have 512 KiB."""
ATTEMPTS_MIN = 5
"""The fewest delivery attempts of a dead-letter policy, and its default."""
POLICY_S = 60.0
"""How old the known dead-letter policy may be when a message has come so often that it matters."""
REQUESTS, REQUESTS_MAX = 4, 100
SETTLED_S = 30.0
DELETED_TOPIC = "_deleted-topic_"
UNCOUNTED = "Pub/Sub does not count messages: look at num_undelivered_messages of the subscription in Cloud Monitoring"

_SUBSCRIPTION = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")


class PubSubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL says about how to use a subscription."""

    visibility_s: float | None = None
    """None: as long as a lease."""
    requests: int = REQUESTS
    """The most pulls side by side."""
    settled_s: float = SETTLED_S
    """How long no message must have come before the subscription counts as empty."""


class PubSubSource:
    """One subscription."""

    database: object | None = None

    def __init__(
        self,
        service: PubSubService,
        subscription: str,
        settings: PubSubSettings | None = None,
        activity: SubscriptionActivity | None = None,
        wall: Clock = time.time,
    ) -> None:
        self._settings = settings or PubSubSettings()
        self.visibility_s = _whole(self._settings.visibility_s or VISIBILITY_S)
        self._service = service
        self._subscription = f"projects/{service.project}/subscriptions/{subscription}"
        self._activity = activity or SubscriptionActivity(self._subscription)
        self._wall = wall
        """The clock by which a delayed message is due."""
        self._topic = ""
        self._deadline_s = 0
        """The ack deadline of the subscription, which a pull gives to each message."""
        self._attempts_max: int | None = None
        """How often the dead-letter policy lets a message be delivered; None: there is no policy."""
        self._read_at = 0.0
        self._polls = Polls(self._pull, self._return, self._settings.requests)

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        if self._settings.visibility_s is None:
            self.visibility_s = max(DEADLINE_MIN_S, _whole(lease_s))

    async def __aenter__(self) -> Self:
        await self._service.open()
        try:
            await self._read_subscription()
        except BaseException:
            await self._service.close()
            raise
        self._service.started()
        self._activity.stir(asyncio.get_running_loop().time())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._polls.close()
        await self._service.close()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        try:
            deliveries = await self._polls.receive(limit, wait_s)
        except KeywiseError:
            self._activity.stir(asyncio.get_running_loop().time())
            raise
        return deliveries

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        """Only a subscription with exactly-once delivery says which receipts are too old."""
        refused = await self._hide(deliveries, visibility_s)
        extended = [one for one in deliveries if one.receipt not in refused]
        self._activity.extend(extended, asyncio.get_running_loop().time() + visibility_s)
        return [one for one in deliveries if one.receipt in refused]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        request = types.AcknowledgeRequest.pb()
        for receipts in _batches(deliveries):
            await self._change("Acknowledge", request(subscription=self._subscription, ack_ids=receipts))
        self._activity.drop(deliveries)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Pub/Sub has no delayed release: the ack deadline is set to the delay, which is ten minutes at the most."""
        await self._hide(deliveries, delay_s)
        self._activity.put_off(deliveries, asyncio.get_running_loop().time() + _whole(delay_s) if deliveries else 0.0)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Publish to the topic of the subscription; other subscriptions of it get the messages too."""
        due = self._wall() + delay_s if delay_s > 0 else 0.0
        await self._publish([new_message(body, {}, due=due) for body in bodies])

    async def send_again(self, body: bytes, headers: Mapping[str, str], routing_key: str) -> None:
        await self._publish([new_message(body, headers, routing_key)])

    async def depth(self) -> None:
        """Pub/Sub does not count its messages."""
        return None

    async def backlog(self) -> Backlog:
        """What this app holds. It is unsure for a while after the last message came, and while some are put off."""
        await self._read_subscription()
        now, activity = asyncio.get_running_loop().time(), self._activity
        quiet_s = now - activity.stirred_at if activity.stirred_at is not None else 0.0
        unsure_s = max(0.0, self._settings.settled_s - quiet_s, activity.away_s(now))
        return Backlog(activity.held(now), is_all=False, unsure_s=unsure_s, advice=UNCOUNTED)

    def last_delivery(self, delivery: Delivery) -> str:
        if self._attempts_max is None or delivery.count < self._attempts_max:
            return ""
        return (
            f"delivered {delivery.count} times, and the dead-letter policy of the subscription allows "
            f"{self._attempts_max}; replay it, and raise maxDeliveryAttempts or remove the policy"
        )

    # Opening.

    async def _read_subscription(self) -> None:
        """Read what matters of the subscription: its owner may change that at any time."""
        request = types.GetSubscriptionRequest.pb()(subscription=self._subscription)
        found = await self._service.ask(SUBSCRIBER + "GetSubscription", types.Subscription, request)
        if found.push_config.push_endpoint or found.bigquery_config.table or found.cloud_storage_config.bucket:
            raise DatabaseError(
                f"{self._service.name}: Pub/Sub itself delivers the messages of this subscription to a push endpoint, "
                "a table or a bucket; create a pull subscription"
            )
        if found.detached:
            raise DatabaseError(f"{self._service.name}: the subscription is detached from its topic; create another")
        self._topic, self._deadline_s = found.topic, found.ack_deadline_seconds
        has_policy = bool(found.dead_letter_policy.dead_letter_topic)
        self._attempts_max = found.dead_letter_policy.max_delivery_attempts or ATTEMPTS_MIN if has_policy else None
        self._read_at = asyncio.get_running_loop().time()

    # Receiving.

    async def _pull(self, limit: int, wait_s: float) -> list[Delivery]:
        messages = await self._service.pull(self._subscription, limit, wait_s=wait_s)
        if not messages:
            return []
        now = asyncio.get_running_loop().time()
        self._activity.stir(now)
        if now - self._read_at > POLICY_S and any(one.delivery_attempt >= ATTEMPTS_MIN for one in messages):
            with suppress(KeywiseError):
                await self._read_subscription()
        deliveries, early = self._sorted_by_due(messages)
        # A message that cannot be hidden now has the deadline of the subscription, and comes back after that.
        with suppress(DatabaseError, UnavailableError):
            for left_s, some in early.items():
                await self._hide(some, left_s)
                self._activity.await_until(now + left_s)
            if self.visibility_s != self._deadline_s:
                await self._hide(deliveries, self.visibility_s)
        self._activity.hold(deliveries, now + self.visibility_s)
        return deliveries

    def _sorted_by_due(self, messages: Sequence[Any]) -> tuple[list[Delivery], dict[int, list[Delivery]]]:
        """Return deliveries that are due, and the others by the seconds that they have to wait."""
        deliveries, early, wall = list[Delivery](), dict[int, list[Delivery]](), self._wall()
        for received in messages:
            count = received.delivery_attempt or self._activity.count_of(received.message.message_id)
            delivery = delivery_of(received, count)
            left_s = due_at(received) - wall
            # The last delivery cannot wait: Pub/Sub would move the message away.
            if left_s > 0 and not self.last_delivery(delivery):
                early.setdefault(_whole(left_s), []).append(delivery)
            else:
                deliveries.append(delivery)
        return deliveries, early

    async def _return(self, deliveries: Sequence[Delivery]) -> None:
        await self.release(deliveries, 0.0)

    # Changing.

    async def _hide(self, deliveries: Sequence[Delivery], visibility_s: float) -> set[str | int]:
        """Hide deliveries for so long from now. Return the receipts that the service refused."""
        request, whole, refused = types.ModifyAckDeadlineRequest.pb(), _whole(visibility_s), set[str | int]()
        for receipts in _batches(deliveries):
            asked = request(subscription=self._subscription, ack_ids=receipts, ack_deadline_seconds=whole)
            refused |= await self._change("ModifyAckDeadline", asked)
        return refused

    async def _change(self, method: str, request: Any) -> set[str]:
        """Change messages by their receipts. Return those that the service refuses: their messages came back."""
        with pubsub_errors(self._service.name):
            try:
                await self._service.change(SUBSCRIBER + method, request)
            except AioRpcError as error:
                refused = refused_receipts(error)
                if not refused:
                    raise
                passing = [reason for reason in refused.values() if reason.startswith("TRANSIENT")]
                if passing:
                    raise UnavailableError(
                        f"{self._service.name}: Pub/Sub failed on {len(passing)} messages: {passing[0]}"
                    ) from error
                return set(refused)
        return set()

    # Sending.

    async def _publish(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if (size := message.ByteSize()) > MESSAGE_MAX_BYTES:
                raise DatabaseError(
                    f"{self._service.name}: a message of {size} bytes is above the limit of Pub/Sub, which is "
                    f"{MESSAGE_MAX_BYTES}; store the content elsewhere and send where it is"
                )
        if messages and self._topic == DELETED_TOPIC:
            await self._read_subscription()
            if self._topic == DELETED_TOPIC:
                raise DatabaseError(
                    f"{self._service.name}: the topic of the subscription was deleted; create both again"
                )
        request = types.PublishRequest.pb()
        for batch in sized_batches(messages):
            asked = request(topic=self._topic, messages=batch)
            await self._service.ask(PUBLISHER + "Publish", types.PublishResponse, asked)


def connect(address: Address) -> Source:
    """`pubsub://PROJECT/SUBSCRIPTION`; the subscription is named like the pipeline by default."""
    options = address.take("visibility", "requests", "settled", *OPTIONS)
    url, service = redacted(address.url), service_at(address, options)
    subscription = address.path.strip("/") or address.name
    if not _SUBSCRIPTION.fullmatch(subscription):
        raise AddressError(
            f"{url}: {subscription!r} is no name of a subscription, which has 3 to 255 letters, digits and -._~+%, "
            "and begins with a letter"
        )
    visibility_s = visibility_of(options)
    if visibility_s is not None and not DEADLINE_MIN_S <= visibility_s <= DEADLINE_MAX_S:
        raise AddressError(f"{url}: visibility={options['visibility']} has to be from 10s to 10m")
    requests = options.get("requests", str(REQUESTS))
    if not requests.isdecimal() or not 1 <= int(requests) <= REQUESTS_MAX:
        raise AddressError(f"{url}: requests={requests} has to be a whole number from 1 to {REQUESTS_MAX}")
    settings = PubSubSettings(
        visibility_s=visibility_s,
        requests=int(requests),
        settled_s=seconds(options.get("settled", SETTLED_S)),
    )
    activity = address.shared(SubscriptionActivity, f"{service.emulator}/{service.project}/{subscription}")
    return PubSubSource(service, subscription, settings, activity)


def _batches(deliveries: Sequence[Delivery]) -> list[list[str]]:
    """The receipts of deliveries, in batches that fit into a request."""
    receipts = [str(one.receipt) for one in deliveries]
    return [receipts[start : start + RECEIPTS_MAX] for start in range(0, len(receipts), RECEIPTS_MAX)]


def _whole(duration_s: float) -> int:
    """Pub/Sub knows whole seconds only; part of one is rounded up, so that nothing comes too early."""
    return min(DEADLINE_MAX_S, max(0, math.ceil(duration_s)))
