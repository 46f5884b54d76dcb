"""A gateway before the sink of a simulated world: at times it answers in place of the sink, which may still write."""

import random
from typing import TYPE_CHECKING, Any

from keywise.adapters.memory.sink import MemorySink
from keywise.core.change import Change, Order, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.sink import APPLIED, SinkResult

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

FIRST_AT_S, LAST_AT_S = 5.0, 80.0
SHORTEST_S, LONGEST_S = 1.0, 60.0
LATE_MAX_S = 5.0
AWAY = SinkResult(Outcome.BUSY, "the gateway waits for the sink in vain", certainty=Certainty.UNKNOWN)


class Gateway:
    """Draws from a generator of its own, so that worlds without such a gateway are what they always were."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"gateway {world.grade.value} {seed}")
        self._stretches = self._drawn() if self._rng.random() < 0.3 else []

    def is_shut(self) -> bool:
        """Whether it answers a call itself."""
        now = self._world.now()
        shares = [share for start, end, share in self._stretches if start <= now < end]
        if self._world.faults.is_over or not shares or self._rng.random() >= max(shares):
            return False
        self._world.faults.injected["gateway"] += 1
        return True

    def answer(self, sink: MemorySink, change: Change[Any], claim: Claim) -> SinkResult:
        """The sink writes at once, or while the lease lasts, or not at all; who asked cannot tell."""
        match self._rng.choice(("now", "later", "never")):
            case "now":
                self._world.write(sink, change, claim.token)
            case "later":
                late_s = self._rng.uniform(0.0, min(LATE_MAX_S, self._left_s(claim)))
                loop, write = self._world.loop, self._world.write
                loop.call_later(late_s, write, sink, change, claim.token, context=self._world.outside)
        return AWAY

    def _left_s(self, claim: Claim) -> float:
        entry = self._world.entries().get(claim.key)
        holds = entry is not None and entry.token == claim.token
        return max(0.0, entry.lease_until - self._world.store_now()) if entry is not None and holds else 0.0

    def _drawn(self) -> list[tuple[float, float, float]]:
        rng, found = self._rng, list[tuple[float, float, float]]()
        for _ in range(rng.randint(1, 3)):
            start = rng.uniform(FIRST_AT_S, LAST_AT_S)
            found.append((start, start + rng.uniform(SHORTEST_S, LONGEST_S), rng.choice((1.0, 1.0, 0.3))))
        return found


class Blame:
    """What one process may hold against a change that a gateway answered: that others passed since the last time."""

    def __init__(self) -> None:
        self._passed = 0
        self._seen: dict[tuple[str, Order], int] = {}

    def is_due(self, change: Change[Any], result: SinkResult) -> bool:
        """Whether this answer may cost an attempt."""
        if result is not AWAY:
            self._passed += result is APPLIED or result.outcome is Outcome.SUPERSEDED
            return False
        seen = self._seen.get((change.key, change.order), self._passed)
        self._seen[change.key, change.order] = self._passed
        return seen < self._passed
