"""The queue between the two pipelines of enveloped changes: records go in by parts, and come out as deliveries.

It is in the memory of one process. Nothing is lost with it: the position of an object advances only behind records that
have ended, and their message is acked only after the last of them.
"""

import asyncio
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Self

from keywise.core.change import Delivery
from keywise.core.clock import Clock, boot_time
from keywise.core.errors import SettingsError
from keywise.core.record import OBJECT_HEADER, Record
from keywise.flow.wakeup import Wakeup


class RecordQueue:
    """A source whose messages are records of objects. The pipeline that reads the objects waits until they end."""

    visibility_s = None
    database = None

    def __init__(self, clock: Clock = boot_time) -> None:
        self._clock = clock
        self._ready: list[tuple[float, int, Delivery]] = []
        """The waiting records by the time from which on they may be delivered."""
        self._numbers = itertools.count(1)
        self._open: dict[str | int, RecordBatch] = {}
        """The batches of the records that have not ended, by the id of the record."""
        self._arrivals = Wakeup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def put(self, records: Iterable[Record[Any]], sent_at: float) -> "RecordBatch":
        """Add records; the returned batch says when all of them have ended."""
        batch = RecordBatch()
        for record in records:
            identity = f"{record.key}@{'.'.join(map(str, record.order))}"
            batch.waiting.add(identity)
            is_known = identity in self._open
            self._open[identity] = batch
            if not is_known:
                headers = {OBJECT_HEADER: record.object, "ordinal": str(record.ordinal)}
                self._push(Delivery(identity, next(self._numbers), record.body, sent_at, headers=headers), 0.0)
        batch.check()
        return batch

    def forget(self, batch: "RecordBatch") -> None:
        """Hand over no more records of a batch: its reader waits no longer."""
        self._ready = [one for one in self._ready if self._open.get(one[2].id) is not batch]
        heapq.heapify(self._ready)
        for identity in batch.waiting:
            self._open.pop(identity, None)

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if not self._due():
            next_s = self._ready[0][0] - self._clock() if self._ready else wait_s
            await self._arrivals.wait(min(wait_s, max(next_s, 0.0)))
        received: list[Delivery] = []
        while len(received) < limit and self._due():
            received.append(heapq.heappop(self._ready)[2])
        return received

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        return ()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if (batch := self._open.pop(delivery.id, None)) is not None:
                batch.waiting.discard(str(delivery.id))
                batch.check()

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        for delivery in deliveries:
            if delivery.id in self._open:
                self._push(delivery, delay_s)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        raise SettingsError("records are read from objects; send the announcement of an object to its pipeline")

    async def depth(self) -> int:
        return len(self._open)

    def _push(self, delivery: Delivery, delay_s: float) -> None:
        heapq.heappush(self._ready, (self._clock() + delay_s, next(self._numbers), delivery))
        self._arrivals.notify()

    def _due(self) -> bool:
        return bool(self._ready) and self._ready[0][0] <= self._clock()


class RecordBatch:
    """Some records, of which the last one to end sets `ended`."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.ended = asyncio.Event()

    def check(self) -> None:
        if not self.waiting:
            self.ended.set()
