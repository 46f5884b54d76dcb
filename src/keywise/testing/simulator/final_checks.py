"""What a simulated run has to end with, and which deaths in it have a reason."""

from typing import TYPE_CHECKING

from keywise.core.change import Order
from keywise.core.entry import Level
from keywise.core.sink import Grade
from keywise.testing.simulator import workload

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World


class FinalChecks:
    """Compares a world with its workload."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def check_content(self) -> None:
        world = self._world
        stored = world.table.stored if world.grade is Grade.ATOMIC else world.sink.stored
        for key, sent in workload.truth(world.changes, world.auditor.letters.dead).items():
            held = stored.get(key)
            # Forced once more, it has a higher generation.
            holds = (0, held.order[1], min(0, held.order[2])) if held is not None else None
            found = None if held is None or held.deleted else holds
            late = {rank[1:] for late_key, rank in world.auditor.sent_too_late if late_key == key}
            if self._is_given_up(key) or (holds is not None and holds[1:] in late):
                continue
            purged = [other for other in world.changes if other.purged and other.key == key]
            if any(world.has_suspects or found == taken.order or taken.rank > sent.rank for taken in purged):
                continue  # Whether it was applied before it was taken away, nobody can say.
            expected = None if sent.deleted else sent.order
            if holds is not None and (key, holds) in world.auditor.letters.dead and self._may_be_applied(key, holds):
                continue
            newest = world.sent.get(key)
            if world.has_suspects and newest is not None and holds == newest.order:
                continue  # A repair wrote it, though its message was set aside.
            if world.has_suspects and newest is None and found is None:
                continue  # Nobody upstream knows of it any more, and a repair or an operator asked there.
            if found != expected:
                world.auditor.violate(f"{key} ends as {found}, the truth is {expected}")

    def _is_given_up(self, key: str) -> bool:
        """Its repair killed so many workers that the key stays suspect, and is shown as such."""
        entry = self._world.entries().get(key)
        return entry is not None and entry.suspicions > 0 and entry.crashes >= self._world.settings.crashes_max

    def _may_be_applied(self, key: str, order: Order) -> bool:
        """Though it was set aside: another copy was applied, or nobody knew that this one had been."""
        world = self._world
        committed = world.auditor.committed.get(key)
        return world.grade is Grade.CONDITIONAL or (committed is not None and committed[1:] == order[1:])

    def kills_max(self, killer: workload.Sent) -> int:
        """Deaths are counted anew for each copy, after a restore, after an outage that nobody waits for,
        after it or something newer was set aside, and after a repair when its message seemed to come no more."""
        world = self._world
        copies = sum(body == killer.body for body in world.bodies.values()) + world.faults.injected["restore"]
        copies += world.auditor.letters.count_of[killer.body] + world.auditor.exclusions[killer.key]
        copies += world.faults.injected["outage"] if world.blackout.is_write_anyway else 0
        newer = sum(
            sum(body == sent.body for body in world.bodies.values())
            for sent in world.changes
            if sent.key == killer.key and sent.rank > killer.rank and (sent.poison or sent.killer or sent.flaky)
        )
        return 2 * (Level.ALONE + world.settings.crashes_max + 1) * copies * (1 + newer)

    def check_death(self, key: str, order: Order, cause: str) -> None:
        """Nothing healthy may end as a dead letter."""
        world = self._world
        auditor, settings = world.auditor, world.settings
        sent = next(sent for sent in world.changes if (sent.key, sent.order) == (key, order))
        explained = (
            sent.poison
            or sent.mended
            or (sent.key == workload.MEETING and "unversioned" in cause)
            or auditor.tries[key, order] >= settings.attempts_max
            or auditor.deaths[key, order] >= settings.crashes_max
            or ("retention" in cause and world.store_now() - 1000.0 - sent.at > (settings.retention_s or 1e9) - 1.0)
        )
        if not explained:
            auditor.violate(f"{key} v{sent.version} is a dead letter without a reason: {cause}")
