"""The bench of the RabbitMQ source: it declares queues, and deletes them with their delay queues."""

import time
from collections.abc import Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.delay_classes import waits_of
from keywise.adapters.rabbitmq.source import connect
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError


class RabbitBench:
    """Uses connections of its own. The clock of a broker cannot be moved."""

    shares = True
    """A broker does not show what other processes hold, so both sources run in one process, over two connections."""

    async def prepare(self, address: Address, role: str) -> None:
        """Declare a durable queue of the broker's default type."""
        source: Any = connect(address)
        await _run_on_channel(source._broker, "queue_declare", [address.name], durable=True)

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of a broker cannot be moved, and waiting would take too long")

    async def remove(self, adapter: Any, name: str) -> None:
        """Delete a queue and its delay queues; a missing one is not an error."""
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
