"""The contract of a source: where deliveries come from.

`UnavailableError` means that nothing is known to have happened and that the caller may try again;
adapters turn their client library's errors into it, and never retry on their own.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from keywise.core.change import Delivery
from keywise.core.resource import AsyncResource


class Source(AsyncResource, Protocol):
    """Hands over deliveries. It never looks inside a body."""

    visibility_s: float | None
    """How long a delivery stays hidden from others; None: as long as the connection lives."""
    database: object | None
    """The opened database that the queue lives in, if a transaction of it can also receive and ack."""

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        """Up to `limit` deliveries; waits up to `wait_s` for the first one."""

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        """Keep deliveries hidden for longer. One that already came back to somebody else is left alone."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries. Acking one that already came back does nothing."""

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Let deliveries come back after a delay, to anybody."""

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Append messages, durably once it returns."""

    async def depth(self) -> int:
        """How many messages are not acked yet, delayed and handed-over ones included."""


class TransactionalQueue(Protocol):
    """A source's queue seen from inside a transaction of its database."""

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        """Visible deliveries, hidden from others by the transaction itself.

        It is `peeked` itself if all of that is still there and nothing else is due before it.
        """

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None: ...


class TransactionalSource(Protocol):
    """What a source has besides if it lives in a database which can hold a ledger too."""

    def queue_in(self, connection: Any) -> TransactionalQueue:
        """This queue inside a transaction of its database."""

    async def arrived(self, wait_s: float) -> bool:
        """Whether something can be received; waits up to `wait_s` for it. It takes no lock."""

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        """What probably comes after a delivery. It takes no lock, so others may receive it meanwhile."""
