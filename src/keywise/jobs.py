"""What is claimed and waits for a worker: live before bulk, and some workers are for live jobs only."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Jobs(Generic[T]):
    """Two lines of jobs, and the workers that wait for one."""

    def __init__(self) -> None:
        self._live: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._is_closed = False

    def put(self, job: T, *, is_bulk: bool = False) -> None:
        (self._bulk if is_bulk else self._live).append(job)
        self._wake(is_bulk)

    def close(self) -> None:
        """No more will come: who waits for a job is told that there is none."""
        self._is_closed = True
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def get(self, *, live_only: bool = False) -> T | None:
        """The next job; None once there will be none any more."""
        while True:
            if self._live:
                return self._live.popleft()
            if self._bulk and not live_only:
                return self._bulk.popleft()
            if self._is_closed:
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((live_only, waiter))
            await waiter

    def take_beside(self, fits: Callable[[T], bool], limit: int, *, is_bulk: bool) -> list[T]:
        """What follows in one line, as far as it fits."""
        line, taken = self._bulk if is_bulk else self._live, list[T]()
        while line and len(taken) < limit and fits(line[0]):
            taken.append(line.popleft())
        return taken

    def _wake(self, is_bulk: bool) -> None:
        """Wake one worker that may take it; one that was cancelled meanwhile does not count."""
        for place, (live_only, waiter) in enumerate(self._waiting):
            if not (is_bulk and live_only) and not waiter.done():
                waiter.set_result(None)
                del self._waiting[place]
                return
