"""Queues of RabbitMQ that a check makes for itself, and removes with all that was put off there."""

import time

from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.delay_classes import waits_of


async def declare_queue(broker: Broker, queue: str) -> None:
    """Declare a queue that outlives a restart, as the broker makes them by default."""
    await _run_on_channel(broker, "queue_declare", [queue], durable=True)


async def delete_queues(broker: Broker, queue: str) -> None:
    """Delete a queue and its delay queues; those that are not there are no error."""
    delays = [wait.queue for wait in waits_of(queue, time.time())]
    await _run_on_channel(broker, "queue_delete", [queue, *delays])


async def _run_on_channel(broker: Broker, act: str, queues: list[str], **options: bool) -> None:
    link = BrokerLink(broker, "checking")
    try:
        channel = await link.channel()
        for queue in queues:
            await channel.ask(act, queue=queue, **options)
    finally:
        await link.close()
