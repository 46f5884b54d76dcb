"""Waiting for what a source on RabbitMQ gets, and for what its broker keeps."""

import asyncio
from collections.abc import Callable

from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.change import Delivery
from keywise.core.errors import UnavailableError
from servers import shared
from servers.rabbitmq import RabbitServer


def opened(queue: str, kind: type[RabbitSource] = RabbitSource, **options) -> RabbitSource:
    """A source with connections and knowledge of its own, as another process has."""
    return kind(Broker(shared.rabbitmq().url), queue, **options)


async def until(condition: Callable[[], object]) -> None:
    """Look again and again, while everything else goes on."""
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


async def received(source: RabbitSource, count: int) -> list[Delivery]:
    """So many deliveries, whenever they come; a lost connection is made anew."""
    found: list[Delivery] = []
    while len(found) < count:
        try:
            found += await source.receive(count - len(found), 5.0)
        except UnavailableError:
            continue
    return found


async def cut(source: RabbitSource) -> None:
    """Cut all connections, and return when the source has noticed: until then it hands over what came before."""
    held = source._subscription
    assert held is not None, "nothing was received yet"
    await asyncio.to_thread(shared.rabbitmq().cut_connections)
    await until(lambda: held.is_over)


async def left_in(queue: str, count: int, broker: RabbitServer | None = None) -> bool:
    """Whether the broker keeps so many messages of a queue, wherever they are: acks are not answered."""
    return await asyncio.to_thread((broker or shared.rabbitmq()).left_in, queue) == count
