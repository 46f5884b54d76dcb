"""A key of a simulated world with more waiting messages than a worker may hold, while it is paused or fails."""

import asyncio
import random
from typing import TYPE_CHECKING

from keywise.core.controls import Pause
from keywise.testing.simulator.workload import STUBBORN, Sent

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

SHARE = 0.35
KEY = "key-backlog"
FIRST_NUMBER = 20_000
PAUSED_SHARE = 0.6


class BacklogWorkload:
    """Draws from a generator of its own, so that worlds without a backlog are what they always were."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world = world
        self._rng = rng = random.Random(f"backlog {world.grade.value} {seed}")
        self._happens = rng.random() < SHARE
        self._is_paused = rng.random() < PAUSED_SHARE
        self._at = rng.uniform(2.0, 40.0)

    def changes(self) -> list[Sent]:
        """Versions of one key, sent at once: from a few more than a worker may hold to three times as many."""
        if not self._happens:
            return []
        rng, prefetch = self._rng, self._world.settings.prefetch
        count = rng.randint(prefetch + 2, 3 * prefetch)
        changes = [
            Sent(FIRST_NUMBER + number, KEY, number, rng.random() < 0.2, at=self._at + rng.random())
            for number in range(count)
        ]
        if not self._is_paused:
            changes[-1].flaky = rng.choice((2, 3, 4, STUBBORN))
        self._world.faults.injected["backlog"] += 1
        return changes

    async def operate(self) -> None:
        """Pause the key before its messages come, and resume it as an operator does."""
        if not self._happens or not self._is_paused:
            return
        world = self._world
        await asyncio.sleep(max(0.0, self._at - 1.0))
        await world.ledger.pause(Pause(KEY))
        world.auditor.note(f"{KEY} is paused")
        await asyncio.sleep(self._rng.uniform(5.0, 60.0))
        await world.ledger.resume(KEY, False)
        world.auditor.note(f"{KEY} is resumed")
        for source in (world.source, world.bulk):
            await source.recall(None)
