"""What is claimed and waits for a worker: live before bulk, and some workers are for live jobs only."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from keywise.lanes import LIVE_BEFORE_BULK

T = TypeVar("T")


class Jobs(Generic[T]):
    """Two lines of jobs, and the workers that wait for one."""

    def __init__(self) -> None:
        self._live: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._live_in_row = 0
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._is_closed = False

    def put(self, job: T, *, is_bulk: bool = False) -> None:
        (self._bulk if is_bulk else self._live).append(job)
        self._wake_one()

    def close(self) -> None:
        """No more will come: who waits for a job is told that there is none."""
        self._is_closed = True
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def get(self, *, live_only: bool = False) -> T | None:
        """The next job; None once there will be none any more."""
        while (line := self._next(live_only)) is None:
            if self._is_closed:
                return None
            await self._something(live_only)
        job = line.popleft()
        self._live_in_row = self._live_in_row + 1 if line is self._live else 0
        # Whoever was woken for what is left may not be the one who may take it.
        self._wake_one()
        return job

    def take_beside(self, fits: Callable[[T], bool], limit: int, *, is_bulk: bool) -> list[T]:
        """What follows in one line, as far as it fits."""
        line, taken = self._bulk if is_bulk else self._live, list[T]()
        while line and len(taken) < limit and fits(line[0]):
            taken.append(line.popleft())
        return taken

    def _next(self, live_only: bool) -> deque[T] | None:
        """The line whose turn it is. A single worker that always finds a live job must not starve bulk."""
        if live_only or not self._bulk:
            return self._live or None
        return self._live if self._live and self._live_in_row < LIVE_BEFORE_BULK else self._bulk

    async def _something(self, live_only: bool) -> None:
        """Wait for a job that may be taken, or for the close."""
        waiter = asyncio.get_running_loop().create_future()
        place = (live_only, waiter)
        self._waiting.append(place)
        try:
            await waiter
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            self._wake_one()
            raise

    def _wake_one(self) -> None:
        """Wake a worker that may take a job which is there, if there are both."""
        if not self._live and not self._bulk:
            return
        for place, (live_only, waiter) in enumerate(self._waiting):
            if (self._live or not live_only) and not waiter.done():
                waiter.set_result(None)
                del self._waiting[place]
                return
