"""Publishing to RabbitMQ: a message counts as sent once the broker has confirmed it and a queue has it."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import ANSWER_S, Broker, BrokerLink, Channel, rabbit_errors

MESSAGES_IN_FLIGHT_MAX = 1_000
BYTES_IN_FLIGHT_MAX = 8 * 1024 * 1024
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


class ConfirmChannel:
    """One channel for publishing, and what was published on it and is not confirmed yet.

    The broker numbers messages as they come, so the numbers here are right only as long as each of them was sent.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sent = 0
        self._unconfirmed: dict[int, tuple[str, _Batch]] = {}
        channel.on_end = self._end
        channel.raw.add_on_return_callback(self._return)

    def publish(self, queue: str, messages: Sequence[Message]) -> _Batch:
        batch = _Batch(len(messages))
        try:
            for body, properties in messages:
                self._sent += 1
                self._unconfirmed[self._sent] = (queue, batch)
                self.channel.raw.basic_publish("", queue, body, properties, mandatory=True)
        except BaseException:
            # Nobody knows any more which number is whose, and nobody waits for this batch.
            batch.done.cancel()
            self.channel.close()
            raise
        return batch

    def confirm(self, frame: Any) -> None:
        method = frame.method
        is_taken = type(method).__name__ == "Ack"
        for number in self._confirmed(method.delivery_tag, method.multiple):
            _, batch = self._unconfirmed.pop(number)
            if not is_taken:
                batch.rejection = batch.rejection or Rejection(is_missing=False)
            batch.confirm()

    def _confirmed(self, number: int, multiple: bool) -> list[int]:
        if multiple:
            return [one for one in self._unconfirmed if one <= number]
        return [number] if number in self._unconfirmed else []

    def _return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """What nobody takes comes back before it is confirmed; then nobody takes the others for this queue either."""
        for queue, batch in self._unconfirmed.values():
            if queue == method.routing_key:
                batch.rejection = Rejection(is_missing=True)

    def _end(self) -> None:
        """Nothing more is confirmed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        assert self.channel.ended is not None
        for _, batch in unconfirmed.values():
            if not batch.done.done():
                batch.done.set_exception(self.channel.ended)


class Publisher:
    """A connection for publishing alone: a broker that is short of memory stops reading it, and acks have to go on."""

    def __init__(self, broker: Broker) -> None:
        self._link = BrokerLink(broker, "publishing")
        self._opening = asyncio.Lock()
        self._confirm_channel: ConfirmChannel | None = None

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into a queue by its name; raises `Rejection` if one of them did not get there."""
        for part in _batches(messages):
            confirms = await self._opened()
            with rabbit_errors(self._link.name):
                batch = confirms.publish(queue, part)
                async with asyncio.timeout(ANSWER_S):
                    await batch.done
            if batch.rejection is not None:
                raise batch.rejection

    async def declare(self, queue: str, arguments: dict[str, Any]) -> None:
        """Make a queue of ours."""
        await self._link.ask("queue_declare", queue=queue, durable=True, arguments=arguments)

    async def close(self) -> None:
        await self._link.close()

    async def _opened(self) -> ConfirmChannel:
        async with self._opening:
            if self._confirm_channel is None or not self._confirm_channel.channel.is_open:
                confirms = ConfirmChannel(await self._link.channel())
                await confirms.channel.ask("confirm_delivery", ack_nack_callback=confirms.confirm)
                self._confirm_channel = confirms
            return self._confirm_channel


def _batches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    part: list[Message] = []
    size = 0
    for message in messages:
        part.append(message)
        size += len(message[0])
        if len(part) == MESSAGES_IN_FLIGHT_MAX or size >= BYTES_IN_FLIGHT_MAX:
            yield part
            part, size = [], 0
    if part:
        yield part
