"""The bench of the Pub/Sub source: it creates topics and subscriptions, and deletes them."""

from collections.abc import Sequence
from typing import Any

from google.pubsub_v1 import types
from grpc import StatusCode
from grpc.aio import AioRpcError

from keywise.adapters.pubsub.service import PUBLISHER, SUBSCRIBER
from keywise.adapters.pubsub.source import connect
from keywise.core.errors import DatabaseError
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError

ATTEMPTS_MAX = 100
"""The most that a dead-letter policy allows. Without a policy, Pub/Sub does not count deliveries."""


class PubSubBench:
    """Uses connections of its own. The clock of the service cannot be moved."""

    async def prepare(self, address: Address, role: str) -> None:
        """Create a subscription that counts deliveries, with its topic; creating it again changes nothing."""
        source: Any = connect(address)
        service, subscription = source._service, source._subscription
        topic, dead = _topics_of(subscription)
        policy = types.DeadLetterPolicy.pb()(dead_letter_topic=dead, max_delivery_attempts=ATTEMPTS_MAX)
        asked = types.Subscription.pb()(
            name=subscription, topic=topic, ack_deadline_seconds=60, dead_letter_policy=policy
        )
        await service.open()
        try:
            for name in (topic, dead):
                await _created(service, PUBLISHER + "CreateTopic", types.Topic, types.Topic.pb()(name=name))
            await _created(service, SUBSCRIBER + "CreateSubscription", types.Subscription, asked)
        finally:
            await service.close()

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of Pub/Sub cannot be moved, and waiting would take too long")

    async def remove(self, adapter: Any, name: str) -> None:
        """Delete a subscription with all its messages, and its topics."""
        service, subscription = adapter._service, adapter._subscription
        deleted = types.DeleteSubscriptionRequest.pb()(subscription=subscription)
        await service.ask(SUBSCRIBER + "DeleteSubscription", None, deleted)
        for topic in _topics_of(subscription):
            await service.ask(PUBLISHER + "DeleteTopic", None, types.DeleteTopicRequest.pb()(topic=topic))


def _topics_of(subscription: str) -> tuple[str, str]:
    """The names of its topic and of its dead-letter topic."""
    topic = subscription.replace("/subscriptions/", "/topics/")
    return topic, f"{topic}_dead"


async def _created(service: Any, method: str, answer: Any, request: Any) -> None:
    try:
        await service.ask(method, answer, request)
    except DatabaseError as error:
        if not isinstance(error.__cause__, AioRpcError) or error.__cause__.code() is not StatusCode.ALREADY_EXISTS:
            raise
