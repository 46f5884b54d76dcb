"""Threads for serial functions that are not `async`; a function sees the context variables of its caller."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Threads that are started as they are needed."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """What it returns. Who is cancelled waits for its end, unless it has not begun: then it never does."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads_max, thread_name_prefix="keywise-serial")
        work = self._pool.submit(copy_context().run, _called, function)
        future = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not work.cancel():
                # The thread goes on, and nobody else may run this key meanwhile.
                await asyncio.wait([future])
            raise

    def close(self) -> None:
        if self._pool is not None:
            # A thread cannot be cancelled; what hangs is not waited for.
            self._pool.shutdown(wait=False, cancel_futures=True)


def _called(function: Callable[[], T]) -> T:
    try:
        return function()
    except StopIteration as error:
        # No future takes it: whoever awaits one would wait for ever.
        raise RuntimeError("the function raised StopIteration") from error
