"""Runs one coroutine of a test to its end, under a time limit."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[object, object, T], *, limit_s: float = 30) -> T:
    """Return what the coroutine returns; one that hangs raises TimeoutError instead of holding up the suite."""
    return asyncio.run(_limited(coroutine, limit_s))


def awaited(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """A test that is a coroutine, as one that is not."""

    @functools.wraps(test)
    def waiting(*arguments: object, **fixtures: object) -> None:
        run(test(*arguments, **fixtures))

    return waiting


async def _limited(coroutine: Coroutine[object, object, T], limit_s: float) -> T:
    async with asyncio.timeout(limit_s):
        return await coroutine
