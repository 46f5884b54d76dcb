"""Publishing to RabbitMQ: a message counts as sent once the broker has confirmed it and a queue has it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keywise.adapters.rabbitmq.broker import ANSWER_S, Broker, BrokerLink, Channel, rabbit_errors, resolve
from keywise.core.errors import UnavailableError

MESSAGES_IN_FLIGHT_MAX = 1_000
BYTES_IN_FLIGHT_MAX = 8 * 1024 * 1024
"""So many messages and bytes at the most are on their way before they are confirmed."""
FULL = "takes no more messages; raise its length limit"

Message = tuple[bytes, Any]
"""Body and properties."""


class NoSuchQueue(Exception):
    """The broker returned messages, because no queue has the name that they were published to."""


class ConfirmChannel:
    """One channel for publishing, and what was published on it and is not confirmed yet.

    The broker numbers messages as they come, so the numbers here are right only as long as each of them was sent.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sent = 0
        self._unconfirmed: dict[int, tuple[str, asyncio.Future[None]]] = {}
        channel.on_end = self._end
        channel.raw.add_on_return_callback(self._return)

    def publish(self, queue: str, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Send messages; each result is there when the broker has confirmed that message."""
        loop = asyncio.get_running_loop()
        confirmations: list[asyncio.Future[None]] = [loop.create_future() for _ in messages]
        try:
            for confirmation, (body, properties) in zip(confirmations, messages, strict=True):
                self._sent += 1
                self._unconfirmed[self._sent] = (queue, confirmation)
                self.channel.raw.basic_publish("", queue, body, properties, mandatory=True)
        except BaseException:
            # Nobody knows any more which number is whose, and nobody waits for this batch.
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
        """What nobody takes comes back before it is confirmed; then nobody takes the others for this queue either."""
        for queue, confirmation in self._unconfirmed.values():
            if queue == method.routing_key:
                resolve(confirmation, NoSuchQueue(queue))

    def _end(self) -> None:
        """Nothing more is confirmed."""
        assert self.channel.ended is not None, "or what is lost would count as confirmed"
        for _, confirmation in self._unconfirmed.values():
            resolve(confirmation, self.channel.ended)


class Publisher:
    """A connection for publishing alone: a broker that is short of memory stops reading it, and acks have to go on."""

    def __init__(self, broker: Broker) -> None:
        self.link = BrokerLink(broker, "publishing")
        self._opening = asyncio.Lock()
        self._confirm_channel: ConfirmChannel | None = None

    async def publish(
        self, queue: str, messages: Sequence[Message], on_confirmed: Callable[[int], None] | None = None
    ) -> None:
        """Put messages into a queue by its name; raises `NoSuchQueue` if there is none.

        `on_confirmed` gets the place of each message that was confirmed, also if others were not.
        """
        first = 0
        for part in _batches(messages):
            confirms = await self._opened()
            with rabbit_errors(self.link.name):
                async with asyncio.timeout(ANSWER_S):
                    await _confirmed(confirms.publish(queue, part), first, on_confirmed)
            first += len(part)

    async def open(self) -> None:
        """Connect now if there is no connection."""
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
    """Wait for all confirmations, and raise the first error."""
    try:
        await asyncio.wait(confirmations)
    finally:
        errors = []
        for place, one in enumerate(confirmations, start=first):
            if one.cancel() or one.cancelled():
                continue  # Nobody waits for it any more.
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
