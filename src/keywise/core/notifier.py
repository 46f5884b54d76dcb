"""The contract of a notifier: it sends a message to one receiver outside of keywise, a URL or a queue."""

from typing import Protocol, Self

from keywise.core.resource import AsyncResource
from keywise.core.source import Source


class Notifier(AsyncResource, Protocol):
    """Sends messages to one receiver. Opening it may already need the receiver."""

    async def check(self) -> None:
        """Raise `UnavailableError` if the receiver cannot be reached. Nothing is sent to it."""

    async def notify(self, body: bytes) -> None:
        """Send one message, which is JSON; the receiver has it when the call returns.

        After `UnavailableError` the receiver may have it, too.
        """


class QueueNotifier:
    """Appends messages to a queue of which keywise has a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._source.__aexit__(*error)

    async def check(self) -> None:
        """An open source has found its queue, or creates it with the first message."""

    async def notify(self, body: bytes) -> None:
        await self._source.send([body])
