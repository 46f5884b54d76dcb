"""Waiting for what a source on Pub/Sub gets."""

import asyncio
from collections.abc import Callable, Sequence

from keywise.adapters.pubsub.source import PubSubSource
from keywise.core.change import Delivery


async def until(condition: Callable[[], object]) -> None:
    """Look again and again, while everything else goes on."""
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


async def received(source: PubSubSource, count: int) -> list[Delivery]:
    """So many deliveries, whenever they come."""
    found: list[Delivery] = []
    while len(found) < count:
        found += await source.receive(count - len(found), 5.0)
    return found


def bodies_of(deliveries: Sequence[Delivery]) -> list[bytes]:
    return sorted(one.body for one in deliveries)
