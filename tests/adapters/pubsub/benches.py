"""Factories for the source on Pub/Sub: benches on Google's own fake of it, with subscriptions of their own."""

import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from google.pubsub_v1 import types

from keywise.adapters.pubsub.service import PUBLISHER, SUBSCRIBER, PubSubService
from keywise.adapters.pubsub.source import PubSubSettings, PubSubSource
from keywise.core.change import Delivery
from keywise.core.clock import Clock
from keywise.testing.conformance import SourceBench
from servers import shared

PROJECT = "shop-1"
VISIBILITY_S = 60.0
ATTEMPTS_MAX = 100

_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{os.getpid()}_{next(_numbers)}"


def topic_of(subscription: str) -> str:
    return f"projects/{PROJECT}/topics/{subscription}"


async def asked(method: str, answer: Any, request: Any) -> Any:
    """What the server answers to its owner."""
    service = PubSubService("owner", PROJECT, emulator=shared.pubsub().address)
    await service.open()
    try:
        return await service.ask(method, answer, request)
    finally:
        await service.close()


async def created(subscription: str, *, attempts_max: int | None = None, **fields: Any) -> str:
    """Create a subscription as its owner does, and return its name. Its topics are named like it."""
    topic = topic_of(subscription)
    await asked(PUBLISHER + "CreateTopic", types.Topic, types.Topic.pb()(name=topic))
    if attempts_max is not None:
        await created(f"{subscription}_dead")
        fields["dead_letter_policy"] = types.DeadLetterPolicy.pb()(
            dead_letter_topic=f"{topic}_dead", max_delivery_attempts=attempts_max
        )
    fields = {"ack_deadline_seconds": 10} | fields
    name = f"projects/{PROJECT}/subscriptions/{subscription}"
    request = types.Subscription.pb()(name=name, topic=topic, **fields)
    await asked(SUBSCRIBER + "CreateSubscription", types.Subscription, request)
    return subscription


def source_at(address: str, subscription: str, *, wall: Clock = time.time, **settings: Any) -> PubSubSource:
    """A source of a subscription behind an address; it is not open."""
    service = PubSubService(f"pubsub://{PROJECT}/{subscription}", PROJECT, emulator=address)
    return PubSubSource(service, subscription, PubSubSettings(**settings), wall=wall)


class CountedSource:
    """A source whose depth is counted by the server's control port: Pub/Sub itself does not count."""

    def __init__(self, source: PubSubSource, subscription: str) -> None:
        self.visibility_s = source.visibility_s
        self.database = source.database
        self.receive = source.receive
        self.extend = source.extend
        self.ack = source.ack
        self.release = source.release
        self.send = source.send
        self._topic = topic_of(subscription)

    async def depth(self) -> int:
        return shared.pubsub().unacked(self._topic)


class MovedClock:
    """The clock of the server, which goes back at the end, and one for sources that stays with it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shared.pubsub().advance(-self._ahead_s)

    def wall(self) -> float:
        return time.time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        shared.pubsub().advance(seconds)


@asynccontextmanager
async def pubsub_source() -> AsyncIterator[SourceBench]:
    server, subscription = shared.pubsub(), await created(fresh("queue"), attempts_max=ATTEMPTS_MAX)
    with MovedClock() as clock:
        async with (
            source_at(server.address, subscription, wall=clock.wall, visibility_s=VISIBILITY_S) as source,
            source_at(server.address, subscription, wall=clock.wall, visibility_s=VISIBILITY_S) as another,
        ):
            yield SourceBench(
                source=CountedSource(source, subscription),
                another=CountedSource(another, subscription),  # type: ignore[arg-type]
                advance=clock.advance,
                # It would, with exactly-once delivery, which its fake does not know.
                reports_refusals=False,
            )


def seen_by(delivery: Delivery) -> tuple[Any, ...]:
    """What must be equal in each delivery of a message."""
    return delivery.id, delivery.body, delivery.sent_at, delivery.headers, delivery.routing_key


SOURCES = {"pubsub.source": {"pubsub": pubsub_source}}
