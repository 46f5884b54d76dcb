"""Draws the faults of a simulated run from its seed, and counts those that it injects."""

import random
from collections import Counter


class FaultInjector:
    """Draws faults from one seeded generator until `is_over` is set."""

    usual_s = (0.0005, 0.02)
    """How long a call is on its way, in each direction."""
    slow_s = (1.0, 20.0)
    """The same for a slow call: some take longer than a lease."""
    silent_s = (0.05, 3.0)
    """How long a caller waits for a lost answer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.injected: Counter[str] = Counter()
        self.is_over = False
        self.slow_rate = self.lost_rate = self.pause_rate = self.crash_rate = 0.0

    def happens(self, kind: str, rate: float) -> bool:
        if self.is_over or self.rng.random() >= rate:
            return False
        self.injected[kind] += 1
        return True

    def latency_s(self) -> float:
        return self.rng.uniform(*(self.slow_s if self.happens("slow call", self.slow_rate) else self.usual_s))

    def loses(self, kind: str) -> bool:
        """Whether a call or its answer gets lost."""
        return self.happens(kind, self.lost_rate)

    def silence_s(self) -> float:
        return self.rng.uniform(*self.silent_s)


def draw_rate(rng: random.Random, most: float, never: float = 0.3) -> float:
    """Draw how likely a kind of fault is in one run; with the probability `never` it does not happen at all."""
    return 0.0 if rng.random() < never else rng.random() * most
