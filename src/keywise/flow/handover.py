"""A queue in memory between a producer and a pipeline in the same process.

Nothing is lost with the process: the producer keeps a cursor in the ledger, and advances it only past deliveries that
have ended.
"""

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Self

from keywise.core.change import Delivery, Outcome
from keywise.core.clock import Clock, boot_time
from keywise.core.errors import SettingsError
from keywise.flow.wakeup import Wakeup

IGNORED = "ignored"
"""Counted beside the outcomes: the read function returned `Ignore`."""


class HandoverQueue:
    """A source for one pipeline, whose producer waits until its deliveries have ended, and learns how they ended."""

    visibility_s = None
    database = None

    def __init__(self, clock: Clock = boot_time) -> None:
        self._clock = clock
        self._ready: deque[Delivery] = deque()
        """The deliveries that may be received now, in the order in which they came."""
        self._delayed: list[tuple[float, int, Delivery]] = []
        """The other waiting deliveries, by the time from which on they may be received."""
        self._numbers = itertools.count(1)
        self._open: dict[str | int, Handover] = {}
        """The handovers of the deliveries that have not ended, by id."""
        self._arrivals = Wakeup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def put(self, deliveries: Iterable[Delivery]) -> "Handover":
        """Hand over deliveries. No other delivery with one of their ids waits for its end."""
        handover = Handover()
        for delivery in deliveries:
            assert delivery.id not in self._open, f"delivery {delivery.id!r} is handed over twice"
            handover.waiting[delivery.id] = delivery
            self._ready.append(delivery)
            self._open[delivery.id] = handover
        self._arrivals.notify()
        handover.check()
        return handover

    def forget(self, handover: "Handover") -> None:
        """Deliver no more of a handover, because the producer has stopped waiting for it."""
        self._ready = deque(one for one in self._ready if self._open.get(one.id) is not handover)
        self._delayed = [one for one in self._delayed if self._open.get(one[2].id) is not handover]
        heapq.heapify(self._delayed)
        for identity in handover.waiting:
            self._open.pop(identity, None)

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if not self._has_ready():
            next_s = self._delayed[0][0] - self._clock() if self._delayed else wait_s
            await self._arrivals.wait(min(wait_s, max(next_s, 0.0)))
        self._has_ready()
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        return ()

    def note_outcome(self, deliveries: Iterable[Delivery], outcome: Outcome | None) -> None:
        name, still_open = IGNORED if outcome is None else outcome.value, self._open
        for delivery in deliveries:
            if (handover := still_open.get(delivery.id)) is not None:
                handover.note(delivery.id, name)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if (handover := self._open.pop(delivery.id, None)) is not None:
                del handover.waiting[delivery.id]
                handover.check()

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        due = self._clock() + delay_s
        for delivery in deliveries:
            if delivery.id in self._open:
                heapq.heappush(self._delayed, (due, next(self._numbers), delivery))
        self._arrivals.notify()

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        raise SettingsError("this queue is filled by keywise itself; send to another source of the pipeline")

    async def depth(self) -> int:
        return len(self._open)

    def _has_ready(self) -> bool:
        """Whether a delivery may be received now; those whose delay is over are from now on."""
        while self._delayed and self._delayed[0][0] <= self._clock():
            self._ready.append(heapq.heappop(self._delayed)[2])
        return bool(self._ready)


class Handover:
    """Deliveries that were handed over together. `ended` is set when the last of them ends."""

    def __init__(self) -> None:
        self.waiting: dict[str | int, Delivery] = {}
        """The deliveries that are not acked yet, by id."""
        self.outcomes: Counter[str] = Counter()
        """How deliveries have ended; most are acked a moment later."""
        self.ended = asyncio.Event()
        self._noted: set[str | int] = set()
        self._progress = Wakeup()

    @property
    def left(self) -> list[Delivery]:
        """The deliveries that are neither acked nor counted in `outcomes`."""
        return [delivery for identity, delivery in self.waiting.items() if identity not in self._noted]

    def note(self, identity: str | int, outcome: str) -> None:
        """Count how a delivery has ended, once."""
        if identity not in self._noted:
            self._noted.add(identity)
            self.outcomes[outcome] += 1

    def check(self) -> None:
        self._progress.notify()
        if not self.waiting:
            self.ended.set()

    async def settle(self, first_s: float, next_s: float) -> None:
        """Wait until all have ended, or until none has ended for a while: `first_s` for the first, then `next_s`."""
        with suppress(TimeoutError):
            while not self.ended.is_set():
                left = len(self.waiting)
                async with asyncio.timeout(next_s if self.outcomes else first_s):
                    while len(self.waiting) == left:
                        await self._progress.wait()
