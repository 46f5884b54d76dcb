"""Factories for the source on RabbitMQ: benches on a real broker, with queues that nobody else uses."""

import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from adapters.rabbitmq.fast_source import SECOND_S, FastRabbitSource
from adapters.rabbitmq.waiting import until
from chaos.fleet import pause
from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.messages import DELAYS
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.testing.conformance import SourceBench
from servers import shared

DELAY_S = 30.0
"""What the promises put off, they put off for so long."""
WAY_S = 20.0
"""What the way back from a delay queue takes, at the most."""
LOOK_S = 0.02

_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{os.getpid()}_{next(_numbers)}"


async def declared(url: str, queue: str, **arguments: Any) -> None:
    """Make a queue as its owner does."""
    link = BrokerLink(Broker(url), "declaring")
    channel = await link.channel()
    await channel.ask("queue_declare", queue=queue, durable=True, arguments=arguments)
    await link.close()


class Clock:
    """Lets time pass for real, once a delay should be over; before that there is nothing to wait for."""

    def __init__(self, queue: str) -> None:
        self._delays = f"{DELAYS}{queue}."
        self._passed_s = 0.0

    def advance(self, seconds: float) -> None:
        self._passed_s += seconds
        if self._passed_s >= DELAY_S:
            pause(DELAY_S * SECOND_S)
            deadline = time.monotonic() + WAY_S
            while shared.rabbitmq().messages(self._delays) and time.monotonic() < deadline:
                pause(LOOK_S)


def rabbit_source(kind: str):
    @asynccontextmanager
    async def make() -> AsyncIterator[SourceBench]:
        broker, name = Broker(shared.rabbitmq().url), fresh("queue")
        await declared(shared.rabbitmq().url, name, **{"x-queue-type": kind})
        async with (
            FastRabbitSource(broker, name) as source,
            FastRabbitSource(broker, name) as another,
        ):
            # The clock stops the event loop, so nothing may be left to do beside.
            await until(lambda: _can_delay(source))
            await until(lambda: _can_delay(another))
            yield SourceBench(source=source, another=another, advance=Clock(name).advance)

    return make


async def _can_delay(source: RabbitSource) -> bool:
    return await source._delay_queues.usable_in_s(DELAY_S * SECOND_S) <= 0


SOURCES = {
    "rabbitmq.source": {
        "rabbitmq": rabbit_source("classic"),
        "rabbitmq quorum": rabbit_source("quorum"),
    }
}
