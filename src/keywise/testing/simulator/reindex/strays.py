"""Stray rows: a scan reads a row that no message ever announces, and the row is gone before it can be read again.

The worker that has claimed such a row is stopped until the name has moved. Nothing else in either target has the key,
so only one rule keeps that worker from writing the row to the target that is live by then: a swap ends expired claims.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keywise.core.entry import Claim
from keywise.core.origin import Shard
from keywise.testing.fault_injector import draw_rate
from keywise.testing.virtual_loop import Process, outside

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld

LOOK_S = 0.25
STAYS_MAX_S = 15.0
"""A row that no worker claims is gone after this time."""
STOP_MAX_S = 100.0
"""A worker goes on after this time, though the name has not moved."""
CALL_STOP_MAX_S = 24.0
"""The same for a worker that was about to begin a transaction, which a worker gives up a second later."""


class StrayRows:
    """The stray rows of one world. They have random numbers of their own, so worlds without them stay as they are."""

    def __init__(self, world: "ReindexWorld", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        # Without suspects, only the swap itself ends the claim. With them, the gate waits for a repair, so fewer swaps
        # succeed; therefore most of those worlds have no stray rows.
        rate = draw_rate(rng, 0.4, never=0.6) if world.has_suspects else draw_rate(rng, 1.0, never=0.1)
        # A row that only looks gone is never deleted, and without claims a worker has nothing to wake up with.
        has_claims = world.has_suspects or world.runs_user_code
        self._rate = rate if has_claims and world.is_consistent else 0.0
        self.keys: list[str] = []
        """All keys that ever had a stray row."""
        self._there = ""
        """The key whose row is there now."""
        self._stops_at_call: set[Process] = set()
        """Workers that are stopped at their next transaction."""

    def reading(self, shard: Shard) -> None:
        """A page of a shard is about to be read: perhaps its last row is inserted now."""
        world, run = self._world, self._world.controls.run
        is_beside = run is not None and run.is_beside and not run.is_rollback
        if self._there or not is_beside or not self._rate or self._rng.random() >= self._rate:
            return
        if not world.faults.is_over:
            self._there = world.origin.last_key("stray", shard, len(self.keys))
            self.keys.append(self._there)
            self._edit(self._there, is_there=True)
            world.faults.injected["stray row"] += 1
            outside(world.loop, self._expire(self._there))

    async def _expire(self, key: str) -> None:
        await asyncio.sleep(STAYS_MAX_S)
        if self._there == key:
            self._delete()

    def _delete(self) -> None:
        if self._there:
            self._edit(self._there, is_there=False)
            self._there = ""

    def _edit(self, key: str, *, is_there: bool) -> None:
        row = self._world.origin.edit(key, is_there=is_there, lag_s=0.0)
        self._world.auditor.note(f"{key} v{row.version} {'is there' if is_there else 'is gone'}, unannounced")

    async def claimed(self, process: Process, scope: str, claims: Sequence[Claim]) -> None:
        """A process has claimed some keys: stop it if it has a stray row, here or when it begins to write."""
        if not any(claim.key == self._there for claim in claims) or scope not in self._world.other_scopes():
            return
        if self._world.has_table and self._rng.random() < 0.7:
            self._stops_at_call.add(process)
        else:
            await self._stop(process, STOP_MAX_S)

    async def writing(self, process: Process, scope: str) -> None:
        """A process is about to begin a transaction."""
        if process in self._stops_at_call and scope in self._world.other_scopes():
            self._stops_at_call.discard(process)
            await self._stop(process, CALL_STOP_MAX_S)

    async def _stop(self, process: Process, most_s: float) -> None:
        """Stop the process that calls this until the name has moved, and delete the row meanwhile."""
        world = self._world
        in_transaction = any(not session.has_ended for session in world.sessions.get(process, ()))
        if world.faults.is_over or process.is_paused or in_transaction:
            return  # A stopped process would lock all others out of the database.
        self._delete()
        world.faults.injected["stop with a stray row"] += 1
        process.pause()
        world.paused(process, most_s)
        outside(world.loop, self._resume(process, most_s))
        await asyncio.sleep(0)

    async def _resume(self, process: Process, most_s: float) -> None:
        world, target = self._world, self._world.current_target()
        for _ in range(int(most_s / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            if world.current_target() != target:
                break
        world.resume(process)
