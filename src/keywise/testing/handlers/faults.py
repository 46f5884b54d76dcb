"""The faults of a handler simulation: each seed draws its own kinds, and counts those that it injects."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keywise.testing.fault_injector import FaultInjector
from keywise.testing.handlers.call_log import SimulatedWorker

if TYPE_CHECKING:
    from keywise.testing.handlers.world import HandlerWorld

KINDS = {
    "sent twice": 0.4,
    "handed over twice": 0.2,
    "out of order": 0.8,
    "late": 0.3,
    "lost before": 0.06,
    "lost after": 0.06,
    "death before the handler": 0.2,
    "death after the handler": 0.25,
    "death in a call": 0.02,
    "pause": 0.15,
    "no answer": 0.25,
}
"""The kinds of faults, each with its highest rate."""
ALIVE = 0.4
"""The probability of each kind in a seed: with few kinds at a time, a person can follow the story."""
DEATHS_MAX, PAUSES_MAX, NO_ANSWERS_MAX = 6, 4, 2


class HandlerFaults(FaultInjector):
    """The faults of a handler simulation. They spare a change that one more fault would make a dead letter."""

    usual_s = silent_s = (0.001, 0.02)

    def __init__(self, world: "HandlerWorld", rng: random.Random, *, is_ideal: bool) -> None:
        super().__init__(rng)
        self._world = world
        self._rates = {
            kind: most * rng.uniform(0.3, 1.0) if not is_ideal and rng.random() < ALIVE else 0.0
            for kind, most in KINDS.items()
        }
        self.is_over = is_ideal
        self._falls: Counter[str] = Counter()
        """Deaths and pauses of workers that held a key in isolation; too many make its change a dead letter."""
        self._errors: Counter[str] = Counter()
        """Injected faults that cost a key an attempt."""

    def occurs(self, kind: str) -> bool:
        return self.happens(kind, self._rates[kind])

    def loses(self, kind: str) -> bool:
        return self.occurs(kind)

    def latency_s(self) -> float:
        return self.rng.uniform(*self.usual_s)

    def meanwhile(self, worker: SimulatedWorker) -> None:
        """Perhaps kill a worker that waits for the answer to a call, or stop it for longer than its lease."""
        if worker.process.is_dead or worker.process.is_paused or not worker.handed:
            return
        if self._may_die(worker) and self.occurs("death in a call"):
            self._world.kill_worker(worker, [], "dies")
        elif self._may_pause(worker, worker.inside) and self.occurs("pause"):
            self._world.pause(worker.process)

    def dies(self, worker: SimulatedWorker, when: str) -> bool:
        return self._may_die(worker) and self.occurs(f"death {when} the handler")

    def pauses_after(self, worker: SimulatedWorker, keys: Sequence[str]) -> bool:
        """Whether to pause; not while another handler of the worker runs, which would resume with a late write."""
        others = [key for key in worker.inside if key not in keys]
        return self._may_pause(worker, others) and self.occurs("pause")

    def pauses_before(self, worker: SimulatedWorker) -> bool:
        """Whether to stop a worker just before its write, until long after its claim has expired."""
        return self._world.zombies and self._may_pause(worker, ()) and self.occurs("pause")

    def answer_is_lost(self, keys: Sequence[str]) -> bool:
        if not self._may_err(keys, NO_ANSWERS_MAX) or not self.occurs("no answer"):
            return False
        self._errors.update(keys)
        return True

    def _may_die(self, worker: SimulatedWorker) -> bool:
        deaths = sum(count for kind, count in self.injected.items() if kind.startswith("death"))
        return deaths < DEATHS_MAX and self._may_fall(worker)

    def _may_pause(self, worker: SimulatedWorker, at_work: Sequence[str]) -> bool:
        is_late_write = bool(at_work) and not self._world.is_atomic and not self._world.zombies
        if is_late_write or self.injected["pause"] >= PAUSES_MAX or not self._may_err(worker.inside, NO_ANSWERS_MAX):
            return False
        return self._may_fall(worker)

    def _may_fall(self, worker: SimulatedWorker) -> bool:
        """Whether a change that runs alone stays below `crashes_max` after one more crash."""
        return worker.alone_with is None or self._falls[worker.alone_with] < self._world.settings.crashes_max - 1

    def fell(self, worker: SimulatedWorker) -> None:
        """Record that a worker was killed or stopped for longer than its lease."""
        if worker.alone_with is not None:
            self._falls[worker.alone_with] += 1
        self._errors.update(worker.inside)

    def _may_err(self, keys: Sequence[str], most: int) -> bool:
        limit = min(most, self._world.settings.attempts_max - 1)
        return all(self._errors[key] < limit for key in keys)
