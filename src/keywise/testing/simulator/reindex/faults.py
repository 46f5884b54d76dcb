"""The faults of a simulated reindex: each seed draws its own rates, and the world counts what it has injected."""

import random

from keywise.testing.fault_injector import FaultInjector, draw_rate

FAULT_KINDS = (
    "crash",
    "crash at the call",
    "stop before the call",
    "crash with a last row",
    "pause",
    "stop",
    "lost before",
    "lost after",
    "slow call",
    "late call",
    "clock jump",
    "command killed",
    "origin away",
    "origin throttles",
    "origin fails",
    "origin lags",
    "late message",
    "message twice",
    "no message",
    "row that is soon gone",
    "stray row",
    "stop with a stray row",
)
STEP_KINDS = (
    "operator starts in place",
    "operator starts some rows",
    "operator starts beside",
    "operator starts into another's target",
    "operator pauses run",
    "operator cancels",
    "operator consents",
    "operator wants swap",
    "operator wants rollback",
    "operator drops",
    "operator removes",
    "operator forces",
    "operator pauses key",
    "run in place ended",
    "swap",
    "rollback",
)
"""What operators do, and what came of it. The world counts these like faults, because they disturb a run too."""
KINDS = FAULT_KINDS + STEP_KINDS


class ReindexFaults(FaultInjector):
    """The rates of one run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.lost_rate, self.slow_rate = draw_rate(rng, 0.06), draw_rate(rng, 0.03)
        self.pause_rate, self.crash_rate = draw_rate(rng, 0.03), draw_rate(rng, 0.02)
        self.stop_rate, self.late_rate = draw_rate(rng, 0.01), draw_rate(rng, 0.3)
        self.jump_rate, self.command_rate = draw_rate(rng, 0.01), draw_rate(rng, 0.15)
        self.away_rate, self.throttle_rate = draw_rate(rng, 0.03), draw_rate(rng, 0.05)
        self.fail_rate, self.lag_rate = draw_rate(rng, 0.02), draw_rate(rng, 0.5)
        self.late_message_rate, self.twice_rate = draw_rate(rng, 0.4), draw_rate(rng, 0.3)
        self.crash_at_call_rate, self.late_move_rate = draw_rate(rng, 0.5), draw_rate(rng, 0.8)
        self.crash_with_row_rate = draw_rate(rng, 1.0)
        self.no_message_rate, self.short_rate = draw_rate(rng, 0.3), draw_rate(rng, 0.5)
