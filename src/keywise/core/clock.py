"""The one clock that holders judge their deadlines by: it counts suspend and never jumps."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds that only grow; the simulator passes its own."""


def boot_time() -> float:
    """Seconds since boot, suspended ones included: a laptop that slept must not think its claim is fresh."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Systems without CLOCK_BOOTTIME have no better clock than the monotonic one."""
