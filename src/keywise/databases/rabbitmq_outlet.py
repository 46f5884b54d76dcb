"""Publishing to RabbitMQ: a message counts as sent once the broker has confirmed it and a queue has it."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from keywise.databases.rabbitmq import ANSWER_S, Broker, Channel, Link, rabbit_errors
from keywise.errors import UnavailableError

AT_ONCE = 1_000
BYTES_AT_ONCE = 8 * 1024 * 1024
"""So many messages and bytes at the most are on their way before they are confirmed."""

Message = tuple[bytes, Any]
"""Body and properties."""


class Rejection(Exception):
    """The broker did not take messages: no queue has this name, or the queue is full."""

    def __init__(self, is_missing: bool) -> None:
        super().__init__("no queue has this name" if is_missing else "the queue is full")
        self.is_missing = is_missing


class _Batch:
    """Messages that were published together."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.rejection: Rejection | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def confirm(self) -> None:
        self.left -= 1
        if self.left == 0 and not self.done.done():
            self.done.set_result(None)


class Outlet:
    """A connection for publishing alone: a broker that is short of memory stops reading it, and acks have to go on."""

    def __init__(self, broker: Broker) -> None:
        self._link = Link(broker, "publishing")
        self._opening = asyncio.Lock()
        self._channel: Channel | None = None
        self._numbers = count(1)
        self._unconfirmed: dict[int, tuple[str, _Batch]] = {}

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into a queue by its name; raises `Rejection` if one of them did not get there."""
        for part in _parts(messages):
            await self._publish(queue, part)

    async def declare(self, queue: str, arguments: dict[str, Any]) -> None:
        """Make a queue of ours."""
        channel = await self._link.channel()
        try:
            await channel.ask("queue_declare", queue=queue, durable=True, arguments=arguments)
        finally:
            await channel.close()

    async def close(self) -> None:
        await self._link.close()

    async def _publish(self, queue: str, messages: Sequence[Message]) -> None:
        channel = await self._opened()
        batch = _Batch(len(messages))
        with rabbit_errors(self._link.name):
            for body, properties in messages:
                self._unconfirmed[next(self._numbers)] = (queue, batch)
                channel.raw.basic_publish("", queue, body, properties, mandatory=True)
            async with asyncio.timeout(ANSWER_S):
                await batch.done
        if batch.rejection is not None:
            raise batch.rejection

    async def _opened(self) -> Channel:
        async with self._opening:
            if self._channel is None or not self._channel.is_open:
                channel = await self._link.channel()
                # Numbers begin anew with each channel.
                self._numbers, self._unconfirmed = count(1), {}
                channel.on_end = lambda: self._end(channel)
                channel.raw.add_on_return_callback(self._return)
                await channel.ask("confirm_delivery", ack_nack_callback=self._confirm)
                self._channel = channel
            return self._channel

    def _confirm(self, frame: Any) -> None:
        method = frame.method
        is_taken = type(method).__name__ == "Ack"
        for number in self._confirmed(method.delivery_tag, method.multiple):
            _, batch = self._unconfirmed.pop(number)
            if not is_taken:
                batch.rejection = batch.rejection or Rejection(is_missing=False)
            batch.confirm()

    def _confirmed(self, number: int, multiple: bool) -> list[int]:
        if not multiple:
            return [number] if number in self._unconfirmed else []
        return [one for one in self._unconfirmed if one <= number]

    def _return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """What nobody takes comes back before it is confirmed; then nobody takes the others for this queue either."""
        for queue, batch in self._unconfirmed.values():
            if queue == method.routing_key:
                batch.rejection = Rejection(is_missing=True)

    def _end(self, channel: Channel) -> None:
        """Nothing more is confirmed."""
        if channel is not self._channel and self._channel is not None:
            return
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        reason = channel.ended or UnavailableError(f"{self._link.name}: the channel is closed")
        for batch in {id(batch): batch for _, batch in unconfirmed.values()}.values():
            if not batch.done.done():
                batch.done.set_exception(reason)


def _parts(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    part: list[Message] = []
    size = 0
    for message in messages:
        part.append(message)
        size += len(message[0])
        if len(part) == AT_ONCE or size >= BYTES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
