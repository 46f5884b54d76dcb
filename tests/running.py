"""Time limits of tests: each says how long a quiet machine may take, and a busy one gets more."""

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")

SLOWER = 4.0
"""A machine that is not busy at the moment may be slow all the same, or become busy."""


def scaled(limit_s: float) -> float:
    """A limit for this machine as it is now; it only matters to a test that hangs."""
    load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    return limit_s * max(SLOWER, 2 * load_per_core)


def run(coroutine: Coroutine[object, object, T], *, limit_s: float = 30) -> T:
    """Return what the coroutine returns; one that hangs raises TimeoutError instead of holding up the suite."""
    return asyncio.run(_limited(coroutine, scaled(limit_s)))


def awaited(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """A test that is a coroutine, as one that is not."""

    @functools.wraps(test)
    def waiting(*arguments: object, **fixtures: object) -> None:
        run(test(*arguments, **fixtures))

    return waiting


async def _limited(coroutine: Coroutine[object, object, T], limit_s: float) -> T:
    async with asyncio.timeout(limit_s):
        return await coroutine
