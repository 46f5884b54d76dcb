"""The bench of the source on RabbitMQ: it declares queues, and deletes them with all that was put off there."""

import time
from collections.abc import Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.delay_classes import waits_of
from keywise.adapters.rabbitmq.source import connect
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError


class RabbitBench:
    """Works on connections of its own. Nobody can move the clock of a broker."""

    shares = True
    """A broker tells nobody what other processes hold, so both sources are of one; their connections are their own."""

    async def prepare(self, address: Address, role: str) -> None:
        """Declare a queue that outlives a restart, as the broker makes them by default."""
        source: Any = connect(address)
        await _run_on_channel(source._broker, "queue_declare", [address.name], durable=True)

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of a broker cannot be moved, and nobody wants to wait so long")

    async def remove(self, adapter: Any, name: str) -> None:
        """Delete a queue and its delay queues; those that are not there are no error."""
        delays = [wait.queue for wait in waits_of(name, time.time())]
        await _run_on_channel(adapter._broker, "queue_delete", [name, *delays])


async def _run_on_channel(broker: Broker, act: str, queues: list[str], **options: bool) -> None:
    link = BrokerLink(broker, "checking")
    try:
        channel = await link.channel()
        for queue in queues:
            await channel.ask(act, queue=queue, **options)
    finally:
        await link.close()
