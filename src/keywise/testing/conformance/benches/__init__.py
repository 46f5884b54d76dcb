"""What the conformance suites need to know about each technology: preparing, moving a clock, and cleaning up.

A bench does what an adapter does not offer and a check needs, so that adapters have no test hooks.
Those of other packages are found by entry points of the group `keywise.benches`, named by the scheme of their URLs.
"""

from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any, Protocol

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.clock import Clock
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError

BENCHES = {
    "postgres": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "postgresql": "keywise.testing.conformance.benches.postgres:PostgresBench",
    "sqlite": "keywise.testing.conformance.benches.sqlite:SqliteBench",
}
DRAIN_MAX = 1000


class Bench(Protocol):
    """One technology as the conformance suites see it: what its adapters do not offer, and a check needs."""

    async def prepare(self, address: Address, role: str) -> None:
        """Make what the adapter expects to exist, such as a queue of a broker.

        It is called for each address before its adapter is made, and may put a database into what the adapters share.
        """

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        """Move the store's clock ahead; raises `UncheckedError` if it cannot be moved."""

    async def remove(self, adapter: Any, name: str) -> None:
        """Remove what a check has written under a name."""


def bench_of(scheme: str) -> Bench:
    """The bench for URLs of this scheme: one of ours, one of another package, else one that does without."""
    if scheme in BENCHES:
        module, _, name = BENCHES[scheme].partition(":")
        found: Bench = getattr(import_module(module), name)()
        return found
    for point in metadata.entry_points(group="keywise.benches", name=scheme):
        loaded: Bench = point.load()()
        return loaded
    return DefaultBench()


class DefaultBench:
    """Moves the clocks that adapters let it move, and cleans up by draining."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        clocks = {id(clock): clock for one in adapters if (clock := _clock_of(one)) is not None}
        if not clocks:
            raise UncheckedError("the clock of this store cannot be moved, and nobody wants to wait so long")
        for clock in clocks.values():
            if isinstance(clock, MemoryDatabase):
                moved = clock.clock = clock.clock if isinstance(clock.clock, _MovedClock) else _MovedClock(clock.clock)
                moved.ahead_s += seconds
            else:
                clock.advance(seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        database: Any = getattr(adapter, "database", None)
        if hasattr(database, "forget"):
            await database.forget(name)
        elif hasattr(adapter, "forget"):
            await adapter.forget(name)
        elif hasattr(adapter, "receive"):
            await _drain(adapter)


class _MovedClock:
    def __init__(self, now: Clock) -> None:
        self._now = now
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._now() + self.ahead_s


def _clock_of(adapter: Any) -> Any:
    candidates = [one for one in (getattr(adapter, "database", None), adapter) if one is not None]
    return next((one for one in candidates if isinstance(one, MemoryDatabase) or hasattr(one, "advance")), None)


async def _drain(source: Any) -> None:
    for _ in range(DRAIN_MAX):
        deliveries = await source.receive(DRAIN_MAX, 0.0)
        if not deliveries:
            return
        await source.ack(deliveries)
