"""What can go wrong in a simulated run: each seed draws its own rates, and what was really injected is counted."""

import functools
import random

import msgspec

from keywise.testing.fault_injector import FaultInjector, draw_rate

KINDS = (
    "duplicate",
    "reorder",
    "delay",
    "lost ack",
    "lost before",
    "lost after",
    "lost renewal",
    "slow call",
    "slow begin",
    "crash",
    "pause",
    "drain",
    "clock jump",
    "poison",
    "flaky",
    "killer",
    "deadly repair",
    "unversioned",
    "malformed",
    "purge",
    "prune",
    "restore",
    "operator's pause",
    "restart of versions",
    "forced write",
    "replay",
    "outage",
    "unclaimed write",
    "full disk",
    "gateway",
    "backlog",
)


class FaultRates(msgspec.Struct, frozen=True):
    """How likely each kind of fault is in one run."""

    duplicate: float
    reorder: float
    delay: float
    lost: float
    lost_renewal: float
    slow: float
    slow_begin: float
    crash: float
    pause: float
    drain: float
    jump: float
    poison: float
    flaky: float
    killer: float
    deadly_repair: float
    malformed: float
    purge: float
    prune: bool
    restore: bool
    unversioned: bool
    zombies: bool
    """Pauses are longer than the horizon: nothing else may then hide a late write."""


class Faults(FaultInjector):
    """The faults of a flow."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.rates = _draw(rng)
        self.slow_rate, self.lost_rate = self.rates.slow, self.rates.lost / 2
        self.pause_rate, self.crash_rate = self.rates.pause, self.rates.crash

    def begin_s(self) -> float:
        """How long a transaction waits for others before it begins."""
        return self.rng.uniform(0.5, 14.0) if self.happens("slow begin", self.rates.slow_begin) else 0.0


def _draw(rng: random.Random) -> FaultRates:
    often = functools.partial(draw_rate, rng)
    zombies = rng.random() < 0.15
    return FaultRates(
        duplicate=often(0.4),
        reorder=often(1.0),
        delay=often(0.3),
        lost=often(0.12),
        lost_renewal=often(0.6, never=0.7),
        slow=0.0 if zombies else often(0.25 if rng.random() < 0.2 else 0.06),
        slow_begin=often(0.5, never=0.6),
        crash=0.0 if zombies else often(0.05),
        pause=0.05 if zombies else often(0.05),
        drain=often(0.03),
        jump=often(0.02, never=0.6),
        poison=often(0.15, never=0.5),
        flaky=often(0.3, never=0.4),
        killer=0.0 if zombies else often(0.08, never=0.6),
        deadly_repair=0.0 if zombies else often(0.3, never=0.8),
        malformed=often(0.1, never=0.5),
        purge=often(0.05, never=0.7),
        prune=rng.random() < 0.4,
        restore=rng.random() < 0.2,
        unversioned=rng.random() < 0.3,
        zombies=zombies,
    )
