"""Flow control and an operator in a simulated world: what is drawn for a run, and what must hold of it."""

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING

from keywise.core import rules
from keywise.core.change import ChangeHeader
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.entry import LeaseTerms
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.limits import Debounce, Rate
from keywise.core.sink import Grade
from keywise.operate.force import ForceWriter
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.testing.simulator import workload
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

RESTARTED_FROM = -1_000_000
"""Versions after a restart of the numbering are far below all others, and so unlike them."""
DISPATCHES_KEPT = 30
RESTART_LOOKS = 200
FORCE_WAIT_S = 15.0


class Flow:
    """Which limits a run has, how often somebody meddles with it, and the auditor's part of both."""

    def __init__(self, rng: random.Random, grade: Grade, *, prunes: bool) -> None:
        self.rate = Rate(rng.choice((1, 2)), per=rng.uniform(1.0, 6.0)) if rng.random() < 0.25 else None
        self.debounce = None
        if rng.random() < 0.25:
            self.debounce = Debounce(rng.uniform(0.1, 2.0), max_wait=rng.uniform(2.0, 6.0))
        self.has_bulk = rng.random() < 0.3
        self._pauses = rng.random() < 0.3
        # A forgotten key is of no era any more, and nobody here would know.
        self.restarts = grade is not Grade.CONDITIONAL and not prunes and rng.random() < 0.4
        # Forced after it was forgotten, a key has its order a second time.
        self._forces = not prunes and rng.random() < 0.4
        self._operators = 0
        self._dispatched: dict[str, list[float]] = {}
        self._marked_at: dict[str, float] = {}
        self._eras: dict[str, int] = {}

    def era(self, key: str) -> int:
        """Of what is sent to a key now."""
        return self._eras.get(key, 0)

    def forget(self) -> None:
        """The ledger was restored from a backup, and knows of some dispatches no more."""
        self._dispatched.clear()

    # What must hold.

    def marked(self, world: "World", keys: list[str]) -> None:
        """Dispatched by a transaction, if it comes to its end."""
        self._marked_at = dict.fromkeys(keys, world.store_now())

    def committed(self, world: "World", key: str) -> None:
        if key in self._marked_at:
            self.dispatched(world, key, self._marked_at.pop(key))

    def dispatched(self, world: "World", key: str, now: float) -> None:
        """A bucket of n, filled evenly: whatever two dispatches one looks at, no more lie between them."""
        if self.rate is None:
            return
        times = self._dispatched.setdefault(key, [])
        times.append(now)
        del times[:-DISPATCHES_KEPT]
        for place, earlier in enumerate(times):
            allowed = self.rate.n + (now - earlier) / self.rate.interval_s
            if len(times) - place > allowed + 1e-6:
                world.auditor.violate(f"{key} is dispatched more often than its rate allows")
                return

    def started(self, world: "World", keys: list[str]) -> None:
        """Work on keys begins now: none of them may be paused."""
        controls = world.ledger.working_set.controls
        for key in keys:
            if controls.pauses_key(key):
                world.auditor.violate(f"{key} is worked on though it is paused")

    # Somebody meddles.

    async def operate(self, world: "World") -> None:
        """Restart the numbering of a key, then pause, resume and force keys until the faults are over."""
        if self.restarts:
            await asyncio.sleep(world.rng.uniform(5.0, 60.0))
            await self._restart(world)
        while (self._pauses or self._forces) and not world.faults.is_over:
            await asyncio.sleep(world.rng.uniform(2.0, 20.0))
            if self._forces and (not self._pauses or world.rng.random() < 0.5):
                self._force_in_process(world)
                continue
            pause = self._drawn_pause(world)
            await world.ledger.pause(pause)
            world.faults.injected["operator's pause"] += 1
            world.auditor.note(f"{pause.keys} is paused")
            await asyncio.sleep(world.rng.uniform(1.0, 10.0))
            world.auditor.note(f"{pause.keys} is resumed")
            await world.ledger.resume(pause.keys, pause.is_pattern)

    def _force_in_process(self, world: "World") -> None:
        """Somebody runs a command, which can be paused and killed like any process."""
        self._operators += 1
        process = Process(world.loop, f"operator-{self._operators}")
        process.spawn(self._force(world, process))

    async def _force(self, world: "World", process: Process) -> None:
        key = f"key-{world.rng.randrange(workload.KEYS)}"
        pipeline = world.pipeline(process)
        pipeline.refetch = world.refetch
        world.faults.injected["forced write"] += 1
        world.auditor.note(f"{process.name} forces {key}")
        async with running_heartbeat(pipeline) as heartbeat:
            wait_budget = WaitBudget(pipeline, FORCE_WAIT_S, lambda cause: None)
            # What could not be written is told, and nothing else follows from it.
            with suppress(AdminError, UnavailableError):
                await ForceWriter(pipeline, AdminClaimer(pipeline, wait_budget, heartbeat)).rewrite(key)

    def _drawn_pause(self, world: "World") -> Pause:
        key = f"key-{world.rng.randrange(workload.KEYS)}"
        return world.rng.choice((Pause(key), Pause("key-[0-2]", is_pattern=True), Pause(EVERYTHING, is_pattern=True)))

    async def _restart(self, world: "World") -> None:
        """Upstream numbers a key anew: wait until nothing of it is on its way, raise its era, send low versions."""
        for _ in range(RESTART_LOOKS):
            if world.faults.is_over:
                return
            key = f"key-{world.rng.randrange(workload.KEYS)}"
            if self._is_at_rest(world, key) and await self._reset(world, key):
                await self._send_low(world, key)
                return
            await asyncio.sleep(0.5)

    def _is_at_rest(self, world: "World", key: str) -> bool:
        entry = world.entries().get(key)
        held = entry is not None and (entry.token or entry.unknown or entry.suspicions)
        return entry is not None and not held and self._is_quiet(world, key)

    async def _reset(self, world: "World", key: str) -> bool:
        terms = LeaseTerms("operator", world.settings.lease_s, despite_pause=True)
        results = await world.ledger.claim([ChangeHeader(key, None)], terms)
        for claim in results.granted:
            world.auditor.operator_claimed(claim)
            if not self._is_quiet(world, key):
                await world.ledger.release([claim])
                return False
            # Whatever is sent from now on waits until the key is free, and belongs to the new era.
            self._eras[key] = rules.era_of(world.entries()[key], world.ledger.working_set.controls) + 1
            era = await world.ledger.reset(claim)
            assert era == self._eras[key], "the operator holds the key"
            world.faults.injected["restart of versions"] += 1
            world.auditor.note(f"{key} is reset to era {era}")
            return True
        return False

    def _is_quiet(self, world: "World", key: str) -> bool:
        """Nothing of it is on its way. An open transaction may have taken a message that comes back yet."""
        if world.database.is_dirty or world.queue_database._undo is not None:
            return False
        if world.delivery_audit.is_in_hands(key) or world.blackout.excuses(key):
            return False
        return not any(world.sent_by_body[message.body].key == key for message in world.messages().values())

    async def _send_low(self, world: "World", key: str) -> None:
        for number in range(world.rng.randint(1, 3)):
            deleted = world.rng.random() < 0.2
            sent = workload.Sent(10_000 + number, key, RESTARTED_FROM + number, deleted, at=world.now())
            world.changes.append(sent)
            world.sent_by_body[sent.body] = sent
            await world.send(sent, delay_s=world.rng.choice((0.0, 0.0, 3.0)))
