"""Factories for the source on SQS: benches on a real ElasticMQ, with queues of their own."""

import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from adapters.sqs.short_times import ShortTimesSource, WaitingClock
from keywise.adapters.sqs.service import sqs_service
from keywise.adapters.sqs.source import SqsSettings, SqsSource
from keywise.testing.conformance import SourceBench
from keywise.testing.conformance.promise import UncheckedError
from servers import shared
from servers.aws_answers import aws_answers
from servers.elasticmq import ElasticMqServer

ACCOUNT = "000000000000"
VISIBILITY_S = 900.0
"""Long, so that nothing comes back only because the machine is busy."""
SHORT_VISIBILITY_S = 10.0
"""In the seconds of a waiting clock, for promises about time."""

_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{os.getpid()}_{next(_numbers)}"


def created(server: ElasticMqServer, name: str, **attributes: str) -> str:
    """Create a queue as its owner does, and return its name."""
    attributes |= {"FifoQueue": "true"} if name.endswith(".fifo") else {}
    fields: dict[str, str] = {}
    for number, (attribute, value) in enumerate(attributes.items(), start=1):
        fields |= {f"Attribute.{number}.Name": attribute, f"Attribute.{number}.Value": quote(value)}
    server.ask("CreateQueue", QueueName=name, **fields)
    return name


def source_at(port: int, queue: str, **settings: Any) -> SqsSource:
    """A source of a queue behind a port of this machine; it is not open."""
    service = sqs_service(f"sqs://127.0.0.1:{port}/{queue}", f"http://127.0.0.1:{port}", "us-east-1")
    return SqsSource(service, queue, ACCOUNT, SqsSettings(**settings))


def sqs_source(ending: str) -> Callable[[], Any]:
    """For promises that no time has to pass for; the others find out when they move the clock."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SourceBench]:
        server = shared.elasticmq()
        queue = created(server, fresh("queue") + ending)
        async with (
            source_at(server.port, queue, visibility_s=VISIBILITY_S) as source,
            source_at(server.port, queue, visibility_s=VISIBILITY_S) as another,
        ):
            yield SourceBench(source=source, another=another, advance=refuse_to_move)

    return make


def short_times_source(ending: str, clock: WaitingClock) -> Callable[[], Any]:
    """For promises about time: it passes for real, and is short. The dates in the answers of ElasticMQ are too old."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SourceBench]:
        server, visibility_s = shared.elasticmq(), SHORT_VISIBILITY_S * clock.second_s
        queue = created(server, fresh("queue") + ending)
        async with (
            aws_answers(server.url) as aws,
            source_at(aws.port, queue, visibility_s=visibility_s) as source,
            source_at(aws.port, queue, visibility_s=visibility_s) as another,
        ):
            with clock.running():
                yield SourceBench(
                    source=ShortTimesSource(source, clock.second_s),
                    another=ShortTimesSource(another, clock.second_s),
                    advance=clock.advance,
                )

    return make


def refuse_to_move(seconds: float) -> None:
    raise UncheckedError("this promise needs a clock that can be moved")


ENDINGS = {"sqs": "", "sqs fifo": ".fifo"}
SOURCES = {"sqs.source": {name: sqs_source(ending) for name, ending in ENDINGS.items()}}
