"""Factories for the source on SQS: benches on a real ElasticMQ whose clock is moved, with queues of their own."""

import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

from keywise.adapters.sqs.service import SqsService
from keywise.adapters.sqs.source import SqsSettings, SqsSource
from keywise.testing.conformance import SourceBench
from keywise.testing.conformance.promise import UncheckedError
from servers import shared
from servers.elasticmq import ElasticMqServer
from servers.faketime import MovableClock

ACCOUNT = "000000000000"
VISIBILITY_S = 900.0
"""Long, so that nothing comes back only because the machine is busy."""

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
    service = SqsService(f"sqs://127.0.0.1:{port}/{queue}", f"http://127.0.0.1:{port}", "us-east-1")
    return SqsSource(service, queue, ACCOUNT, SqsSettings(**settings))


def advance(server: ElasticMqServer, clock: MovableClock, seconds: float) -> None:
    """Return once the answers of the server have the new date, too."""
    before = server.date()
    clock.advance(seconds)
    while server.date() < before + seconds - 1:
        pass


def sqs_source(ending: str, *, is_moved: bool) -> Callable[[], Any]:
    """On the server whose clock can be moved, which is slow, or on the usual one."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SourceBench]:
        moves = refuse_to_move
        server = shared.elasticmq()
        if is_moved:
            server, clock = shared.moved_elasticmq()
            moves = partial(advance, server, clock)
        queue = created(server, fresh("queue") + ending)
        async with (
            source_at(server.port, queue, visibility_s=VISIBILITY_S) as source,
            source_at(server.port, queue, visibility_s=VISIBILITY_S) as another,
        ):
            yield SourceBench(source=source, another=another, advance=moves)

    return make


def refuse_to_move(seconds: float) -> None:
    raise UncheckedError("this promise needs a clock that can be moved")


ENDINGS = {"sqs": "", "sqs fifo": ".fifo"}
SOURCES = {"sqs.source": {name: sqs_source(ending, is_moved=True) for name, ending in ENDINGS.items()}}
