"""The contract of a source: where deliveries come from.

An adapter turns the errors of its client library into `UnavailableError` and never retries by itself.
`UnavailableError` means that the call may or may not have taken effect, and that the caller may repeat it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from keywise.core.change import Delivery, Outcome
from keywise.core.resource import AsyncResource
from keywise.core.settings import seconds

VISIBILITY_S = 60.0
"""How long a queue with a visibility timeout hides a delivery, if neither its URL nor a pipeline's lease says."""


class Source(AsyncResource, Protocol):
    """Hands over deliveries. A source never looks inside a body."""

    @property
    def visibility_s(self) -> float | None:
        """How long a delivery stays hidden from other consumers; None: as long as the connection lives."""

    @property
    def database(self) -> object | None:
        """The open database of the queue, if one of its transactions can also receive and ack; otherwise None."""

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        """Return up to `limit` deliveries; wait up to `wait_s` for the first one."""

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        """Keep deliveries hidden for longer, and return those that it refused, as far as the service says so.

        A refused delivery is no longer this consumer's: its receipt has expired, or another consumer has received the
        message since. It is left alone.
        """

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries. Acking one that already came back does nothing."""

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Make deliveries visible to every consumer again, after a delay."""

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Append messages. They are durable when the call returns."""

    async def depth(self) -> int | None:
        """Count the messages that are not acked yet, including delayed and delivered ones.

        None: the service does not count them. Such a source is a `BacklogSource`.
        """


class Backlog(msgspec.Struct, frozen=True):
    """What a source knows about the messages that are not acked yet."""

    seen: int
    """How many it can count."""
    is_all: bool = True
    """False if there may be more: other consumers may hold some, or the broker may be moving some."""
    held: int | None = None
    """How many of them are delivered, to consumers in any process; None if the source does not know."""
    unsure_s: float = 0.0
    """For how long messages may still appear that cannot be counted now."""
    advice: str = ""
    """What makes it possible to count all messages; empty if nothing has to be done."""

    @property
    def depth(self) -> int | None:
        """How many messages are not acked; None if that is unknown."""
        return self.seen if self.is_all else None


@runtime_checkable
class OutcomeSource(Protocol):
    """The ability of a source to learn how its deliveries end. The pipeline reports it before the ack."""

    def note_outcome(self, deliveries: Iterable[Delivery], outcome: Outcome | None) -> None:
        """Note the outcome of deliveries; None if they were ignored. A delivery that is not acked is noted again."""


@runtime_checkable
class ParkingSource(Protocol):
    """The ability of a source to bring back released messages before their delay is over, by key.

    Fresh messages and those that are due again share each of its receives while both wait, so that a backlog that
    comes back again and again keeps out nothing else.
    """

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        """Release `deliveries[i]` for `delays_s[i]`, as `release` does, and note that it belongs to `keys[i]`."""

    async def recall(self, keys: Sequence[str] | None) -> None:
        """Make the parked messages of these keys visible at once, no matter who parked them; None: of all keys."""


class TransactionalQueue(ParkingSource, Protocol):
    """The queue of a source, seen from inside a transaction of its database."""

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        """Return visible deliveries, which the transaction itself hides from other consumers.

        Return the `peeked` object itself if all of it is still there and nothing else is due before it.
        """

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None: ...


@runtime_checkable
class TransactionalSource(Protocol):
    """The ability of a source to receive and ack inside a transaction of its database."""

    def queue_in(self, connection: Any) -> TransactionalQueue:
        """Return this queue as the transaction on `connection` sees it."""

    async def arrived(self, wait_s: float) -> bool:
        """Say whether a message can be received; wait up to `wait_s` for one. Takes no lock."""

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        """Return the deliveries that probably follow `after`. Takes no lock: another consumer may receive them."""


@runtime_checkable
class OutboxSource(Protocol):
    """The ability of a source to send inside a transaction of the caller (a transactional outbox)."""

    async def send_within(self, connection: Any, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Append messages on the caller's connection: they exist if its transaction commits."""


@runtime_checkable
class HeaderSource(Protocol):
    """The ability of a source to send a message again with the headers and the routing key that it had."""

    async def send_again(self, body: bytes, headers: Mapping[str, str], routing_key: str) -> None:
        """Append one message. It is durable when the call returns."""


@runtime_checkable
class AckTimeoutSource(Protocol):
    """A source whose broker takes back a delivery that is not acked in time, whether or not it is extended."""

    @property
    def ack_timeout_s(self) -> float:
        """How long the broker lets a consumer hold a delivery."""


@runtime_checkable
class RedrivingSource(Protocol):
    """A source whose service takes a message away once it was delivered too often, and cannot be kept from it."""

    def last_delivery(self, delivery: Delivery) -> str:
        """Say why the service will not deliver this message again; empty if it will.

        The flow stores such a delivery as a dead letter and acks it, because any interruption would lose the message.
        """


@runtime_checkable
class LeaseFollowingSource(Protocol):
    """Redelivers the messages of a dead consumer about one lease after it died, unless the URL sets another time."""

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        """Take deliveries back from a process that was dead for a lease; called before the source is opened.

        A source with heartbeats sends them also while the event loop is blocked, but at most for `runtime_max_s`.
        """


@runtime_checkable
class BacklogSource(Protocol):
    """A source that may be unable to count all of its messages, and says so."""

    async def backlog(self) -> Backlog:
        """Count the messages that are not acked, and say whether these are all."""


async def backlog_of(source: Source) -> Backlog:
    """Return the backlog of any source; the depth of most is exact."""
    if isinstance(source, BacklogSource):
        return await source.backlog()
    depth = await source.depth()
    return Backlog(depth or 0, is_all=depth is not None)


def visibility_of(options: Mapping[str, str]) -> float | None:
    """Return the visibility timeout that the URL of a queue gives; None if it gives none."""
    return seconds(options["visibility"]) if "visibility" in options else None
