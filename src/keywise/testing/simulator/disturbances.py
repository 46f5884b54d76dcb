"""What happens to the servers of a simulated flow: clocks jump, messages are purged, the ledger is restored."""

from typing import TYPE_CHECKING

from keywise.core.entry import Entry
from keywise.core.sink import Grade
from keywise.testing.simulated_world import PAUSE_MAX_S
from keywise.testing.simulator import workload
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

JUMP_MAX_S = 20.0


class Disturbances:
    """Draws its moments from the rates of the world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._snapshot: tuple[dict[str, Entry], int] | None = None
        self._deaf_until: dict[Process, float] = {}

    def disturb(self) -> None:
        rates, faults = self._world.faults.rates, self._world.faults
        if faults.happens("purge", rates.purge):
            self._purge()
        if faults.happens("clock jump", rates.jump):
            self._jump()
        self._disturb_ledger()

    def begin_late_s(self, process: Process) -> float:
        """How long a transaction waits for others; sometimes its claims end meanwhile, and nobody tells it."""
        faults = self._world.faults
        late_s = faults.begin_s()
        if late_s and faults.happens("clock jump", faults.rates.jump * 40):
            self._jump()
            self._deaf_until[process] = self._world.now() + late_s
        return late_s

    def loses_renewal(self, process: Process) -> bool:
        faults = self._world.faults
        is_deaf = self._world.now() < self._deaf_until.get(process, 0.0)
        return faults.happens("lost renewal", 1.0 if is_deaf else faults.rates.lost_renewal)

    def _jump(self) -> None:
        self._world.store_ahead_s += self._world.rng.uniform(1.0, JUMP_MAX_S)
        self._world.auditor.excused_until = self._world.store_now() + self._world.settings.lease_s + PAUSE_MAX_S

    def _disturb_ledger(self) -> None:
        if self._world.faults.rates.prune and self._world.faults.happens("prune", 0.05):
            self._prune()
        if not self._world.faults.rates.restore or self._world.has_suspects or self._world.grade is Grade.ATOMIC:
            return
        if self._snapshot is None and self._world.rng.random() < 0.05:
            self._snapshot = (dict(self._world.entries()), self._world.database.tokens)
        elif self._snapshot is not None and self._world.faults.happens("restore", 0.03):
            entries, tokens = self._snapshot
            self._world.entries().clear()
            self._world.entries().update(entries)
            self._world.database.tokens = tokens
            self._snapshot = None
            self._world.auditor.restored()
            self._world.auditor.excused_until = self._world.store_now() + self._world.settings.lease_s + PAUSE_MAX_S

    def _purge(self) -> None:
        """Somebody deletes a message from the queue by hand, as people do."""
        sent = [(number, self._world.sent_by_body[message.body]) for number, message in self._world.messages().items()]
        candidates = [(number, one) for number, one in sent if not one.malformed and one.key != workload.MEETING]
        if self._world.queue_database._writer.locked() or not candidates:
            return
        number, one = self._world.rng.choice(candidates)
        one.purged = True
        self._world.auditor.purged(number)
        for queue in self._world.queue_database.queues.values():
            queue.pop(number, None)

    def _prune(self) -> None:
        retention_s = self._world.settings.retention_s
        assert retention_s is not None
        before = dict(self._world.entries())
        coroutine = self._world.ledger.prune(retention_s)
        if self._world.database._writer.locked():
            coroutine.close()
            return
        try:
            coroutine.send(None)
        except StopIteration:
            self._world.auditor.pruned(before, self._world.entries(), retention_s)
