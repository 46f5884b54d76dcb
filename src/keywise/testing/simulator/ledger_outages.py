"""When the ledger of a simulated world cannot be reached, by all processes or by some, and what must hold then."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from keywise.core.change import Change, ChangeHeader, Order
from keywise.core.entry import Claim
from keywise.core.ledger import Failure
from keywise.core.sink import Grade
from keywise.flow.degraded.journal import JournalLine
from keywise.testing.simulator.disk import Disk, DiskFile
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

FIRST_AT_S, LAST_AT_S = 5.0, 80.0
SHORTEST_S, LONGEST_S = 1.0, 40.0
GRACE_S = 2.0
OLD_CALL_S = 25.0
"""A call that runs for longer may have ended because it counts as hung."""


class Stretch(msgspec.Struct, frozen=True):
    """A while in which the ledger cannot be reached."""

    start: float
    end: float
    share: float
    """Of the processes, how many are cut off; 1: all of them, as when the server is down."""


class Blackout:
    """Draws from a generator of its own, so that worlds without an outage are what they always were."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"blackout {world.grade.value} {seed}")
        self._stretches = self._drawn() if self._rng.random() < 0.4 else []
        self.is_write_anyway = bool(self._stretches) and world.grade is not Grade.ATOMIC and self._rng.random() < 0.6
        self.disk = Disk(world, self._rng)
        self._is_cut: dict[tuple[str, float], bool] = {}
        self._begun: set[Stretch] = set()
        self._unanswered: dict[str, bool] = {}
        self._cut_off: set[int] = set()
        """Tokens of claims that ended because they could not be renewed."""
        self._steps = 0
        self._noted_at: dict[tuple[str, str], int] = {}
        self._marked_suspect_at: Counter[str] = Counter()
        self._noted: dict[str, Order] = {}
        self._applied: dict[str, Order] = {}
        """The newest of each key, in the era of the key."""

    def options(self) -> dict[str, Any]:
        """Settings of a world with outages."""
        if not self.is_write_anyway:
            return {"ledger_grace_s": GRACE_S}
        return {"ledger_grace_s": GRACE_S, "on_ledger_down": "write-anyway", "journal": "simulated"}

    def cuts(self, process: Process) -> bool:
        """Whether the ledger cannot be reached from a process now."""
        if self._world.faults.is_over:
            return False
        now = self._world.now()
        return any(one.start <= now < one.end and self._is_concerned(process, one) for one in self._stretches)

    def holds_up(self, process_name: str) -> bool:
        """Whether a process has had reason to hold everything, not long ago."""
        now = self._world.now()
        return any(one.start <= now < one.end + LONGEST_S for one in self._stretches)

    def excuses(self, key: str) -> bool:
        """A key that is noted may hold anything."""
        return key in self.disk.noted_keys()

    # What must hold.

    def call_started(self, process: Process, changes: Sequence[Change[Any]]) -> None:
        """A change that no claim covers is noted, and the note would outlive a crash."""
        if not self.is_write_anyway:
            self._world.auditor.violate(f"{process.name} writes without a claim, and should wait")
        noted = self.disk.flying(process)
        for change in changes:
            if (change.key, change.order) not in noted:
                self._world.auditor.violate(f"{change.key} is written without a claim and without a note on disk")
        self._world.faults.injected["unclaimed write"] += len(changes)

    def noted(self, file: DiskFile, line: JournalLine) -> None:
        self._steps += 1
        for key, order, _ in line.begun:
            self._noted_at[file.name, key] = self._steps
            ranks = [sent.rank for sent in self._world.changes if sent.key == key and sent.order == order]
            self._noted[key] = max(self._noted.get(key, _LOWEST), *ranks)

    def marked_suspect(self, headers: Sequence[ChangeHeader]) -> None:
        self._steps += 1
        for header in headers:
            self._marked_suspect_at[header.key] = self._steps

    def removed(self, file: DiskFile) -> None:
        """The ledger knows of all that it said."""
        for header in file.contents().suspects():
            if self._marked_suspect_at[header.key] < self._noted_at[file.name, header.key]:
                self._world.auditor.violate(f"the note of {header.key} is gone before the ledger knows of it")

    def applied(self, key: str, rank: Order) -> None:
        """The sink has taken it, or has something newer."""
        self._applied[key] = max(self._applied.get(key, _LOWEST), rank)

    def has_ended(self, key: str, rank: Order) -> bool:
        """Whether it may be acked without the ledger: it is in the sink, and was noted."""
        return min(self._applied.get(key, _LOWEST), self._noted.get(key, _LOWEST)) >= rank

    def renewing(self, process: Process) -> None:
        self._unanswered[process.name] = True

    def renewed(self, process: Process) -> None:
        self._unanswered[process.name] = False

    def cut_off(self, process: Process, claims: Sequence[Claim], started: float) -> bool:
        """Whether a call was ended because its claim could not be renewed; that costs no attempt."""
        is_young = self._world.store_now() - started < OLD_CALL_S
        is_cut_off = is_young and self.cuts(process) and self._unanswered.get(process.name, False)
        if is_cut_off and process in self._world.workers:  # An operator's own try is no worker's.
            self._cut_off.update(claim.token for claim in claims)
        return is_cut_off

    def failed(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            claim = failure.claim
            # A repair that fails is no attempt of a change.
            is_attempt = claim.order is not None and failure.counts_attempt
            if is_attempt and claim.token and claim.token in self._cut_off:
                self._world.auditor.violate(f"an outage costs {claim.key} an attempt")

    def _is_concerned(self, process: Process, stretch: Stretch) -> bool:
        if stretch not in self._begun:
            self._begun.add(stretch)
            self._world.faults.injected["outage"] += 1
            self._world.auditor.note(f"the ledger is down until {stretch.end:.1f}")
        place = (process.name, stretch.start)
        if place not in self._is_cut:
            self._is_cut[place] = self._rng.random() < stretch.share
        return self._is_cut[place]

    def _drawn(self) -> list[Stretch]:
        rng, found = self._rng, list[Stretch]()
        for _ in range(rng.randint(1, 3)):
            start = rng.uniform(FIRST_AT_S, LAST_AT_S)
            found.append(Stretch(start, start + rng.uniform(SHORTEST_S, LONGEST_S), rng.choice((1.0, 1.0, 0.5))))
        return found


_LOWEST: Order = (-1, 0, 0)
