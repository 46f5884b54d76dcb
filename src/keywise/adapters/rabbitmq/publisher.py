"""Publishing to RabbitMQ with confirms: a message counts as sent once the broker has confirmed it in a queue."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import ANSWER_S, Broker, BrokerLink, Channel, rabbit_errors, resolve
from keywise.core.errors import UnavailableError

MESSAGES_IN_FLIGHT_MAX = 1_000
BYTES_IN_FLIGHT_MAX = 8 * 1024 * 1024
"""The most messages and bytes of one batch; the next batch is published when this one is confirmed."""
FULL = "takes no more messages; raise its length limit"

Message = tuple[bytes, Any]
"""Body and properties."""


class NoSuchQueue(Exception):
    """The broker returned messages, because no queue has the name that they were published to."""


class ConfirmChannel:
    """A channel in confirm mode, and the messages on it that are not confirmed yet.

    The broker numbers the messages of a channel as they arrive. The numbers here match only if every counted message
    was really sent, so a failed send closes the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sent = 0
        self._unconfirmed: dict[int, tuple[str, asyncio.Future[None]]] = {}
        channel.on_end = self._end
        channel.raw.add_on_return_callback(self._return)

    def publish(self, queue: str, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Send messages; each future is done when the broker has confirmed or refused that message."""
        loop = asyncio.get_running_loop()
        confirmations: list[asyncio.Future[None]] = [loop.create_future() for _ in messages]
        try:
            for confirmation, (body, properties) in zip(confirmations, messages, strict=True):
                self._sent += 1
                self._unconfirmed[self._sent] = (queue, confirmation)
                self.channel.raw.basic_publish("", queue, body, properties, mandatory=True)
        except BaseException:
            # The numbers no longer match the broker's, and the caller does not wait for this batch.
            for confirmation in confirmations:
                confirmation.cancel()
            self.channel.close()
            raise
        return confirmations

    def confirm(self, frame: Any) -> None:
        method, last = frame.method, frame.method.delivery_tag
        is_taken = type(method).__name__ == "Ack"
        for number in [one for one in self._unconfirmed if one <= last] if method.multiple else [last]:
            queue, confirmation = self._unconfirmed.pop(number)
            outcome = None if is_taken else UnavailableError(f"{self.channel.name}: the queue {queue!r} {FULL}")
            resolve(confirmation, outcome)

    def _return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Fail all unconfirmed messages to a queue that does not exist.

        The broker returns an unroutable message before it confirms it, so the confirm finds the future done already.
        All other messages to that queue are unroutable too.
        """
        for queue, confirmation in self._unconfirmed.values():
            if queue == method.routing_key:
                resolve(confirmation, NoSuchQueue(queue))

    def _end(self) -> None:
        """Fail all unconfirmed messages: the channel is closed, and whether the broker has them is unknown."""
        assert self.channel.ended is not None, "without a reason, lost messages would count as confirmed"
        for _, confirmation in self._unconfirmed.values():
            resolve(confirmation, self.channel.ended)


class Publisher:
    """A connection that only publishes.

    A broker that is short of memory stops reading from connections that publish; acks must not wait behind that.
    """

    def __init__(self, broker: Broker) -> None:
        self.link = BrokerLink(broker, "publishing")
        self._opening = asyncio.Lock()
        self._confirm_channel: ConfirmChannel | None = None

    async def publish(
        self, queue: str, messages: Sequence[Message], on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Publish messages to a queue by its name, and wait for the confirms; raises `NoSuchQueue`.

        `on_confirmed` gets the index of each confirmed message, even if others failed.
        """
        first = 0
        for part in _batches(messages):
            confirms = await self._opened()
            with rabbit_errors(self.link.name):
                async with asyncio.timeout(ANSWER_S):
                    await _confirmed(confirms.publish(queue, part), first, on_confirmed)
            first += len(part)

    async def open(self) -> None:
        """Open the connection and the channel if necessary."""
        await self._opened()

    async def close(self) -> None:
        await self.link.close()

    async def _opened(self) -> ConfirmChannel:
        async with self._opening:
            if self._confirm_channel is None or not self._confirm_channel.channel.is_open:
                confirms = ConfirmChannel(await self.link.channel())
                await confirms.channel.ask("confirm_delivery", ack_nack_callback=confirms.confirm)
                self._confirm_channel = confirms
            return self._confirm_channel


async def _confirmed(
    confirmations: list[asyncio.Future[None]], first: int, on_confirmed: Callable[[int], None] | None
) -> None:
    """Wait for all confirms, and raise the first error; reports the confirmed ones even if the wait is cancelled."""
    try:
        await asyncio.wait(confirmations)
    finally:
        errors = []
        for place, one in enumerate(confirmations, start=first):
            if one.cancel() or one.cancelled():
                continue  # Not confirmed in time: the message may or may not be in the queue.
            if (error := one.exception()) is not None:
                errors.append(error)
            elif on_confirmed is not None:
                on_confirmed(place)
    if errors:
        raise errors[0]


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
