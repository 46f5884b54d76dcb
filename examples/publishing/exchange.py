"""Hands each event to both pipelines: an exchange of RabbitMQ with two queues, or two queues in a SQLite file."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Self

from examples.publishing.place import NAMES, Place

import keywise

EXCHANGE = "publishing"


class Exchange(Protocol):
    """Whatever takes events from the content management system."""

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Durably, once it returns."""


class RabbitExchange:
    """As publishers do it: they know the exchange, and nothing of who listens."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection: Any = None
        self._channel: Any = None

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._connection.close)

    async def publish(self, bodies: Sequence[bytes]) -> None:
        await asyncio.to_thread(self._publish, bodies)

    def _open(self) -> None:
        import pika

        self._connection = pika.BlockingConnection(pika.URLParameters(self._place.broker))
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        for name in NAMES:
            self._channel.queue_declare(f"publishing.{name}", durable=True)
            self._channel.queue_bind(f"publishing.{name}", EXCHANGE)

    def _publish(self, bodies: Sequence[bytes]) -> None:
        import pika

        for body in bodies:
            self._channel.basic_publish(EXCHANGE, "", body, pika.BasicProperties(delivery_mode=2), mandatory=True)


class FileExchange:
    """The same without a broker."""

    def __init__(self, app: keywise.App) -> None:
        self._app = app

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def publish(self, bodies: Sequence[bytes]) -> None:
        for name in NAMES:
            await self._app.send(name, *bodies)
