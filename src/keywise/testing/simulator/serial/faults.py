"""What can go wrong in a simulated merge queue: each seed draws its own rates, and what was injected is counted."""

import asyncio
import functools
import random
from collections import Counter

import msgspec

from keywise.core.errors import OutcomeUnknownError, TransientError
from keywise.testing.fault_injector import FaultInjector, draw_rate

SLOW_MAX_S = 14.0
"""So long a call may be on its way, each way."""
KINDS = (
    "crash",
    "pause",
    "lost before",
    "lost after",
    "slow call",
    "outage",
    "clock jump",
    "same id twice",
    "impatient caller",
    "caller that gives up",
    "nested call",
    "failing call",
    "passing trouble",
    "unknown outcome",
    "switch",
    "cancel",
    "closed app",
    "broken store",
    "cancelled call",
)


class SerialFaultRates(msgspec.Struct, frozen=True):
    """How likely each kind is in one run."""

    crash: float
    pause: float
    lost: float
    slow: float
    outage: float
    jump: float
    same: float
    impatient: float
    gives_up: float
    nested: float
    failing: float
    passing: float
    unknown: float
    switch: float
    cancel: float
    close: float
    broken: float
    cancelled: float


def meet(kind: str, id: str, tries: Counter[str]) -> None:
    """What a function itself does wrong."""
    tries[id] += 1
    if kind == "failing":
        raise ValueError(id)
    if kind == "unknown":
        raise OutcomeUnknownError(id)
    if kind == "cancelled":
        raise asyncio.CancelledError(id)
    if kind == "passing" and tries[id] == 1:
        raise TransientError(id)


class SerialFaults(FaultInjector):
    """The faults of serial functions."""

    usual_s = (0.0005, 0.01)
    slow_s = (0.5, SLOW_MAX_S)
    silent_s = (0.05, 2.0)

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.rates = _draw(rng)
        self.slow_rate, self.lost_rate = self.rates.slow, self.rates.lost / 2
        self.pause_rate, self.crash_rate = self.rates.pause, self.rates.crash


def _draw(rng: random.Random) -> SerialFaultRates:
    often = functools.partial(draw_rate, rng)
    return SerialFaultRates(
        crash=often(0.04),
        pause=often(0.06),
        lost=often(0.12),
        slow=often(0.04, never=0.5),
        outage=often(0.03, never=0.5),
        jump=often(0.02, never=0.7),
        same=often(0.5),
        impatient=often(0.4),
        gives_up=often(0.2),
        nested=often(0.4, never=0.5),
        failing=often(0.2),
        passing=often(0.2),
        unknown=often(0.1, never=0.5),
        switch=often(0.1, never=0.5),
        cancel=often(0.1, never=0.6),
        close=often(0.02, never=0.6),
        broken=often(0.1, never=0.6),
        cancelled=often(0.1, never=0.5),
    )
