"""What the owner of a queue in RabbitMQ does to it: declares, publishes, looks, consumes, deletes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pika

from keywise.adapters.rabbitmq.broker import Broker, BrokerLink, Channel


class Owner:
    """Somebody else's hand on a broker, who knows nothing of keywise."""

    def __init__(self, channel: Channel, link: BrokerLink) -> None:
        self._channel = channel
        self._link = link

    async def declare(self, queue: str, **arguments: Any) -> str:
        named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        await self._channel.ask("queue_declare", queue=queue, durable=True, arguments=named)
        return queue

    async def publish(self, queue: str, *bodies: bytes, **properties: Any) -> None:
        await self.publish_as(queue, bodies, pika.BasicProperties(delivery_mode=2, **properties))

    async def publish_as(self, queue: str, bodies: Sequence[bytes], properties: pika.BasicProperties) -> None:
        for body in bodies:
            self._channel.raw.basic_publish("", queue, body, properties)
        # An answer comes after everything that was sent before the question.
        await self._channel.ask("basic_qos", prefetch_count=0)

    async def publish_through(self, exchange: str, queue: str, routing_key: str, body: bytes) -> None:
        await self._channel.ask("queue_bind", queue=queue, exchange=exchange, routing_key=routing_key)
        self._channel.raw.basic_publish(exchange, routing_key, body, pika.BasicProperties(delivery_mode=2))
        await self._channel.ask("basic_qos", prefetch_count=0)

    async def ready(self, queue: str) -> int:
        channel = await self._link.channel()
        answer = await channel.ask("queue_declare", queue=queue, passive=True)
        channel.close()
        return int(answer.method.message_count)

    async def delete(self, queue: str) -> None:
        await self._channel.ask("queue_delete", queue=queue)

    async def consume(self, queue: str) -> list[bytes]:
        """A list that fills with what this consumer gets; it acks at once."""
        got: list[bytes] = []

        def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            got.append(body)
            channel.basic_ack(method.delivery_tag)

        await self._channel.ask("basic_qos", prefetch_count=1)
        await self._channel.ask("basic_consume", queue=queue, on_message_callback=take)
        return got


@asynccontextmanager
async def owner(url: str) -> AsyncIterator[Owner]:
    link = BrokerLink(Broker(url), "owner")
    try:
        yield Owner(await link.channel(), link)
    finally:
        await link.close()


def bodies_of(deliveries: Sequence[Any]) -> list[bytes]:
    return sorted(one.body for one in deliveries)
