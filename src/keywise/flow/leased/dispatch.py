"""What is claimed and waits for a worker: live before bulk, and some workers are for live jobs only; some rest."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from keywise.core.clock import Clock, boot_time
from keywise.flow.lanes import LIVE_BEFORE_BULK

T = TypeVar("T")

CLAIM_WINDOW_S = 0.1
"""What is claimed ahead should be through in about this time: if this worker dies, others wait for its claims."""
CLAIM_WINDOW_MAX = 16
"""Changes claimed for each worker, at the most: after a death they are run one at a time."""
RESERVED_PART = 4
"""Bulk changes leave one part in so many of all workers to live ones."""
LOOK_S = 0.05
LIVE_S = 1.0
"""So long after the last live job it counts that live ones come."""


class ClaimWindow:
    """How many changes are claimed before a worker is free for them: the quicker the work, the more at once.

    A claim of many costs little more than a claim of one, so it waits until half of them are through.
    """

    def __init__(self, workers: int, batch_max: int, most: int) -> None:
        self._workers = workers * batch_max
        self.least = min(2 * self._workers, most)
        """Of bulk changes never more are claimed beside live ones, whose turn would come late."""
        self._most = min(CLAIM_WINDOW_MAX * self._workers, most)
        self._looked_at = -math.inf
        self.limit = self.least
        """Changes that are claimed and not committed, at the most."""

    def is_due(self, free: int, waiting: int) -> bool:
        """Whether to claim, with so much room and so many that wait for a worker."""
        return 2 * free >= self.limit or waiting < self._workers

    def adapt(self, waiting: int, now: float) -> None:
        """Before a claim: were the workers through early, or do the last ones still wait?"""
        took_s, self._looked_at = now - self._looked_at, now
        if took_s < CLAIM_WINDOW_S and waiting < self._workers:
            self.limit = min(2 * self.limit, self._most)
        elif took_s >= CLAIM_WINDOW_S and waiting:
            self.limit = max(self.limit // 2, self.least)


class DispatchQueue(Generic[T]):
    """Two lines of jobs, and the workers that wait for one.

    While live jobs come, at most `bulk_max` calls for bulk jobs run: whatever is called has to serve the live ones too.
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

    def put(self, job: T, *, is_bulk: bool = False) -> None:
        (self._bulk if is_bulk else self._live).append(job)
        if not is_bulk:
            self._live_at = self._clock()
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
        self._bulk_calls += line is self._bulk
        # Whoever was woken for what is left may not be the one who may take it.
        self._wake_one()
        return job

    def done(self, *, is_bulk: bool) -> None:
        """The call for what was got is over."""
        self._bulk_calls -= is_bulk
        self._wake_one()

    def __len__(self) -> int:
        """How many wait for a worker."""
        return len(self._live) + len(self._bulk)

    def take_beside(self, fits: Callable[[T], bool], limit: int, *, is_bulk: bool) -> list[T]:
        """What follows in one line, as far as it fits."""
        line, taken = self._bulk if is_bulk else self._live, list[T]()
        while line and len(taken) < limit and fits(line[0]):
            taken.append(line.popleft())
        return taken

    def take_all(self) -> list[T]:
        """Whatever waits for a worker."""
        taken = [*self._live, *self._bulk]
        self._live.clear()
        self._bulk.clear()
        return taken

    def _next(self, live_only: bool) -> deque[T] | None:
        """The line whose turn it is. A single worker that always finds a live job must not starve bulk."""
        if live_only or not self._bulk or not self._may_call_bulk():
            return self._live or None
        return self._live if self._live and self._live_in_row < LIVE_BEFORE_BULK else self._bulk

    def _may_call_bulk(self) -> bool:
        is_quiet = self._is_closed or self._clock() > self._live_at + LIVE_S
        return is_quiet or self._bulk_calls < self._bulk_max

    def _look_again_s(self, live_only: bool) -> float | None:
        """When a bulk job may be taken though nobody tells: no live one has come for a while."""
        if live_only or not self._bulk:
            return None
        return max(LOOK_S, self._live_at + LIVE_S - self._clock())

    async def _something(self, live_only: bool) -> None:
        """Wait for a job that may be taken, or for the close."""
        waiter = asyncio.get_running_loop().create_future()
        place = (live_only, waiter)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._look_again_s(live_only)):
                await waiter
        except TimeoutError:
            if place in self._waiting:
                self._waiting.remove(place)
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
            if self._next(live_only) is not None and not waiter.done():
                waiter.set_result(None)
                del self._waiting[place]
                return


class WorkerBackoff:
    """Workers that begin nothing for a while."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._resting = 0
        self._is_over = asyncio.Event()

    @property
    def all_resting(self) -> bool:
        """Whether nobody is left who would begin something."""
        return self._resting == self._workers

    def end(self) -> None:
        """Wake those that rest; nobody rests from now on."""
        self._is_over.set()

    async def wait(self, seconds: float, last: Callable[[], None]) -> None:
        """`last` is called before if all the others rest already."""
        self._resting += 1
        if self.all_resting:
            last()
        try:
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        except TimeoutError:
            pass
        self._resting -= 1
