"""The queue between the claim loop and the worker tasks: how much to claim ahead, what goes next, and who backs off."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from keywise.core.clock import Clock, boot_time
from keywise.flow.lanes import LIVE_BEFORE_BULK

T = TypeVar("T")

CLAIM_WINDOW_S = 0.1
"""The changes claimed ahead should take about this long: if this process dies, their keys wait for its leases."""
CLAIM_WINDOW_MAX = 64
"""At most this many times the changes that can run at once are claimed: after a crash, they go on probation."""
RESERVED_PART = 4
"""One worker in this many is reserved for live changes."""
LOOK_S = 0.05
LIVE_S = 1.0
"""For this long after the last live job, more live jobs are expected, and bulk calls are limited."""


class ClaimWindow:
    """How many changes are claimed ahead of the workers: the faster the work, the more.

    One claim call for many changes costs little more than a call for one. The next call therefore waits until half
    of the window is free.
    """

    def __init__(self, workers: int, batch_max: int, most: int) -> None:
        self._workers = workers * batch_max
        self.least = min(2 * self._workers, most)
        """The smallest window, and the limit for bulk changes beside live ones, which would wait behind them."""
        self._most = min(CLAIM_WINDOW_MAX * self._workers, most)
        self._looked_at = -math.inf
        self.limit = self.least
        """At most this many changes are claimed and not yet committed."""

    def is_due(self, free: int, waiting: int) -> bool:
        """Whether to claim now: half of the window is free, or workers may run out of claimed changes."""
        return 2 * free >= self.limit or waiting < self._workers

    def adapt(self, waiting: int, now: float) -> None:
        """Resize the window before a claim: double it if the last changes were fast, halve it if some still wait."""
        took_s, self._looked_at = now - self._looked_at, now
        if took_s < CLAIM_WINDOW_S and waiting < self._workers:
            self.limit = min(2 * self.limit, self._most)
        elif took_s >= CLAIM_WINDOW_S and waiting:
            self.limit = max(self.limit // 2, self.least)


class DispatchQueue(Generic[T]):
    """A queue of live jobs, a queue of bulk jobs, and the worker tasks that wait for a job.

    While live jobs arrive, at most `bulk_max` calls for bulk jobs run at a time, so that the sink can serve live ones.
    """

    def __init__(self, bulk_max: float = math.inf, clock: Clock = boot_time) -> None:
        self._bulk_max = bulk_max
        self._clock = clock
        self._bulk_calls = 0
        self._live_at = -math.inf
        self._live: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._live_in_row = 0
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._is_closed = False

    def put(self, *jobs: T, is_bulk: bool = False) -> None:
        (self._bulk if is_bulk else self._live).extend(jobs)
        if not is_bulk:
            self._live_at = self._clock()
        self._wake_one()

    def close(self) -> None:
        """No more jobs will come: once the queues are empty, `get` returns None."""
        self._is_closed = True
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def get(self, *, live_only: bool = False) -> T | None:
        """Wait for the next job; None once the queue is closed and empty."""
        while (line := self._next(live_only)) is None:
            if self._is_closed:
                return None
            await self._something(live_only)
        job = line.popleft()
        self._live_in_row = self._live_in_row + 1 if line is self._live else 0
        self._bulk_calls += line is self._bulk
        # A worker that was woken for one of the remaining jobs may not be allowed to take it: wake one that is.
        self._wake_one()
        return job

    def done(self, *, is_bulk: bool) -> None:
        """Report that the call for a job from `get` has ended."""
        self._bulk_calls -= is_bulk
        self._wake_one()

    def __len__(self) -> int:
        """How many jobs wait for a worker."""
        return len(self._live) + len(self._bulk)

    def take_beside(self, fits: Callable[[T], bool], limit: int, *, is_bulk: bool) -> list[T]:
        """Take the next jobs of one queue, up to the first that does not fit."""
        line, taken = self._bulk if is_bulk else self._live, list[T]()
        while line and len(taken) < limit and fits(line[0]):
            taken.append(line.popleft())
        return taken

    def take_all(self) -> list[T]:
        """Take all waiting jobs."""
        taken = [*self._live, *self._bulk]
        self._live.clear()
        self._bulk.clear()
        return taken

    def _next(self, live_only: bool) -> deque[T] | None:
        """Return the queue to take from; None if it is empty for this worker.

        Live goes first, but after `LIVE_BEFORE_BULK` live jobs in a row a bulk job is next, so that it cannot starve.
        """
        if live_only or not self._bulk or not self._may_call_bulk():
            return self._live or None
        return self._live if self._live and self._live_in_row < LIVE_BEFORE_BULK else self._bulk

    def _may_call_bulk(self) -> bool:
        is_quiet = self._is_closed or self._clock() > self._live_at + LIVE_S
        return is_quiet or self._bulk_calls < self._bulk_max

    def _look_again_s(self, live_only: bool) -> float | None:
        """Seconds until a bulk job may become available without a notification, because no live job has arrived."""
        if live_only or not self._bulk:
            return None
        return max(LOOK_S, self._live_at + LIVE_S - self._clock())

    async def _something(self, live_only: bool) -> None:
        """Wait until a job may be available, or the queue is closed."""
        waiter = asyncio.get_running_loop().create_future()
        place = (live_only, waiter)
        self._waiting.append(place)
        try:
            look_again_s = self._look_again_s(live_only)
            if look_again_s is None:
                await waiter
                return
            async with asyncio.timeout(look_again_s):
                await waiter
        except TimeoutError:
            if place in self._waiting:
                self._waiting.remove(place)
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            # This waiter may have been woken already: pass the notification on.
            self._wake_one()
            raise

    def _wake_one(self) -> None:
        """Wake one waiting worker that may take one of the waiting jobs, if there is one."""
        if not self._live and not self._bulk:
            return
        for place, (live_only, waiter) in enumerate(self._waiting):
            if self._next(live_only) is not None and not waiter.done():
                waiter.set_result(None)
                del self._waiting[place]
                return


class WorkerBackoff:
    """Counts the worker tasks that back off because the sink is busy."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._resting = 0
        self._is_over = asyncio.Event()

    @property
    def all_resting(self) -> bool:
        """Whether no worker is left that would start a job."""
        return self._resting == self._workers

    def end(self) -> None:
        """Wake all workers that back off; from now on `wait` returns at once."""
        self._is_over.set()

    async def wait(self, seconds: float, last: Callable[[], None]) -> None:
        """Back off for a while. If all other workers back off already, call `last` first."""
        self._resting += 1
        if self.all_resting:
            last()
        try:
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        except TimeoutError:
            pass
        self._resting -= 1
