"""What the conformance suites need to know about each technology: how to prepare it, move its clock, and clean up.

Adapters have no test hooks, so a bench may use what is private to its adapters.
A package outside of keywise registers the bench of its scheme as an entry point of the group `keywise.benches`.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from keywise.core.change import Delivery
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError

GROUP = "keywise.benches"
# As entry points are written. No bench is imported before it is used, because its client library may be missing.
BENCHES = {
    "memory": "keywise.testing.conformance.benches.memory:MemoryBench",
    "sqlite": "keywise.testing.conformance.benches.sqlite:SqliteBench",
    "postgresql": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres-lock": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgres-queue": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "amqp": "keywise.testing.conformance.benches.rabbitmq:RabbitBench",
    "amqps": "keywise.testing.conformance.benches.rabbitmq:RabbitBench",
    "redis": "keywise.testing.conformance.benches.redis:RedisBench",
    "rediss": "keywise.testing.conformance.benches.redis:RedisBench",
}
DRAIN_MAX = 1000


class Bench(Protocol):
    """One technology as the conformance suites see it: what its adapters do not offer, and a check needs."""

    async def prepare(self, address: Address, role: str) -> None:
        """Make what the adapter expects to exist, such as a queue of a broker.

        It is called for each address before its adapter is made, and may put a database into what the adapters share.
        """

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        """Move the clock of the store ahead, as these open adapters see it.

        Raises `UncheckedError` if it cannot be moved.
        """

    async def remove(self, adapter: Any, name: str) -> None:
        """Remove what a check has written under a name.

        The adapter is open, unless `prepare` has worked and opening the adapter has failed.
        """


@runtime_checkable
class SharingBench(Protocol):
    """A bench whose adapters have to share what an app shares, because no other process sees their messages."""

    shares: bool


class DefaultBench:
    """The bench of a technology that has none: its clock cannot be moved, and queues are drained."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of this store cannot be moved, and nobody wants to wait so long")

    async def remove(self, adapter: Any, name: str) -> None:
        if not isinstance(adapter, _Drainable):
            return
        for _ in range(DRAIN_MAX):
            deliveries = await adapter.receive(DRAIN_MAX, 0.0)
            if not deliveries:
                return
            await adapter.ack(deliveries)


def bench_of(scheme: str) -> Bench:
    """A new bench for the adapters of a URL scheme: one of keywise, one of another package, or the default."""
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
