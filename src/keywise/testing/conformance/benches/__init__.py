"""Technology benches: how the conformance suites prepare a technology, move its clock, and clean up.

Adapters have no test hooks, so a bench may use what is private to its adapters.
A package outside keywise registers the bench of its scheme as an entry point of the group `keywise.benches`.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from keywise.core.change import Delivery
from keywise.core.url import Address
from keywise.testing.conformance.origins import KeyKind, RowWriter
from keywise.testing.conformance.promise import UncheckedError

GROUP = "keywise.benches"
# Written as entry points: a bench is imported only when it is used, because its client library may be missing.
BENCHES = {
    "memory": "keywise.testing.conformance.benches.memory:MemoryBench",
    "sqlite": "keywise.testing.conformance.benches.sqlite:SqliteBench",
    "postgresql": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres-lock": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres-queue": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "amqp": "keywise.testing.conformance.benches.rabbitmq:RabbitBench",
    "amqps": "keywise.testing.conformance.benches.rabbitmq:RabbitBench",
    "sqs": "keywise.testing.conformance.benches.sqs:SqsBench",
    "pubsub": "keywise.testing.conformance.benches.pubsub:PubSubBench",
    "redis": "keywise.testing.conformance.benches.redis:RedisBench",
    "rediss": "keywise.testing.conformance.benches.redis:RedisBench",
}
DRAIN_MAX = 1000


class Bench(Protocol):
    """What a check needs of a technology, and its adapters do not offer."""

    async def prepare(self, address: Address, role: str) -> None:
        """Create what the adapter expects to exist, such as a queue of a broker.

        The suite calls it for each address before it makes the adapter. It may put a database into what adapters share.
        """

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        """Move the clock of the store ahead, as these open adapters see it.

        Raises `UncheckedError` if the clock cannot be moved.
        """

    async def remove(self, adapter: Any, name: str) -> None:
        """Remove what a check has written under a name.

        The adapter is open, unless opening it failed after `prepare`.
        """


@runtime_checkable
class SharingBench(Protocol):
    """A bench whose adapters share a process, because another process would not see their messages."""

    shares: bool


@runtime_checkable
class RowBench(Protocol):
    """A bench that can write the rows of an origin, which its adapter only reads."""

    def rows(self, address: Address, keys: KeyKind) -> AbstractAsyncContextManager[RowWriter]:
        """Create an empty table for an address, and remove it in the end.

        Raises `UncheckedError` if the store has no such keys.
        """


class DefaultBench:
    """The bench of a technology without its own: its clock cannot be moved, and queues are drained."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of this store cannot be moved, and waiting would take too long")

    async def remove(self, adapter: Any, name: str) -> None:
        if not isinstance(adapter, _Drainable):
            return
        for _ in range(DRAIN_MAX):
            deliveries = await adapter.receive(DRAIN_MAX, 0.0)
            if not deliveries:
                return
            await adapter.ack(deliveries)


def bench_of(scheme: str) -> Bench:
    """Return a new bench for the adapters of a URL scheme: of keywise, of another package, or the default."""
    registered = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    value = (registered | BENCHES).get(scheme)
    if value is None:
        return DefaultBench()
    make: Callable[[], Bench] = importlib.metadata.EntryPoint(scheme, value, GROUP).load()
    return make()


@runtime_checkable
class _Drainable(Protocol):
    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]: ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...
