"""The clock by which a worker judges its own deadlines: it never jumps, and it keeps counting during suspend."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""A function that returns seconds and never goes back. The simulator passes a virtual one."""


def boot_time() -> float:
    """Return the seconds since boot, including time in suspend.

    A plain monotonic clock stops during suspend: a laptop that slept past its lease would take its claim for valid.
    """
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On systems without CLOCK_BOOTTIME (macOS, for example) the monotonic clock is the best one available."""
