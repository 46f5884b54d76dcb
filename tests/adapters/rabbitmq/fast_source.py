"""A source on RabbitMQ whose delays are shorter than they say: nobody can move the clock of a broker."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.change import Delivery

SECOND_S = 0.03
"""How long a second of a delay takes."""


class FastRabbitSource(RabbitSource):
    """Shortens the delays that it is given, and the time in which a new delay queue is not used."""

    def __init__(self, broker: Broker, queue: str, *, second_s: float = SECOND_S, **options: Any) -> None:
        super().__init__(broker, queue, **options)
        self._second_s = second_s
        self._delay_queues._fresh_s *= second_s
        self._delay_queues._absent_s *= second_s

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await super().release(deliveries, delay_s * self._second_s)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        await super().send(bodies, delay_s=delay_s * self._second_s)
