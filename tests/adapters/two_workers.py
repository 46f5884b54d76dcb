"""Workers of one pipeline on one ledger: real consumers, each with a clock and a way to the store of its own."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from adapters.benches import MovingClock
from flow.rig import Behaviour, Store, behave
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.source import MemorySource
from keywise.adapters.memory.targets import MemoryStore, MemoryTarget
from keywise.core.change import Change
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Claim, Entry, LedgerPolicy
from keywise.core.events import Event
from keywise.core.limits import Debounce
from keywise.core.settings import Settings
from keywise.core.sink import Grade, SinkResult
from keywise.flow.consumer import Consumer
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.conformance import LedgerBench

LEASE_S, VISIBILITY_S, REDELIVERY_S = 30.0, 60.0, 600.0
PATIENCE_S = 20.0
"""How long something may take that has to happen."""
HOPELESS, HOPELESS_S = "", 1.0
"""What cannot happen, because something was broken on purpose, and how long it is waited for all the same."""
LOOK_S = 0.002

POLICIES = {
    Grade.CONDITIONAL: LedgerPolicy(redelivery_s=REDELIVERY_S),
    Grade.PLAIN: LedgerPolicy(intents=True, redelivery_s=REDELIVERY_S),
}


class Shop:
    """A store, its queues, and a ledger that its workers open twice."""

    def __init__(self, bench: LedgerBench, grade: Grade = Grade.CONDITIONAL) -> None:
        self.bench = bench
        self.grade = grade
        self.store = MemoryStore()
        self.overlaps: list[str] = []
        """Keys that the store was called about twice at the same time, in one batch or in two."""
        self.inside: list[str] = []
        """The keys that the store is being called about."""
        self.queue_clock = MovingClock()
        self._queues = MemoryDatabase(clock=self.queue_clock)
        self.workers: list[Worker] = []

    def source(self, queue: str = "queue") -> MemorySource:
        return MemorySource(self._queues, queue, VISIBILITY_S)

    async def send(self, *changes: tuple[str, int], queue: str = "queue") -> None:
        await self.source(queue).send([json.dumps({"id": key, "v": version}).encode() for key, version in changes])

    def worker(self, name: str, *, queue: str = "queue", **more: Any) -> "Worker":
        """One that is not at work yet; those whose names end in 2 have a connection of their own."""
        self.workers.append(Worker(self, name, queue, **more))
        return self.workers[-1]

    def advance(self, seconds: float) -> None:
        """Let time pass everywhere: in the ledger, the queues and the workers."""
        self.bench.advance(seconds)
        self.queue_clock.advance(seconds)
        for worker in self.workers:
            worker.advance(seconds)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for something that has to happen."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (HOPELESS_S if what == HOPELESS else PATIENCE_S)
        while not condition():
            assert loop.time() < deadline, f"it did not come to this: {what}; written: {self.written}"
            await asyncio.wait([loop.create_future()], timeout=LOOK_S)

    async def until_empty(self, *queues: str) -> None:
        names = queues or ("queue",)
        await self.until(lambda: not any(self._queues.queue(name) for name in names), "all messages are acked")

    def left(self, queue: str = "queue") -> int:
        """How many messages are not acked."""
        return len(self._queues.queue(queue))

    async def entry(self, key: str = "a") -> Entry:
        return await self.bench.entry(key)

    async def letters(self) -> list[DeadLetter]:
        return [letter for _, _, letter in await self.bench.ledger.admin.dead_letters(100)]

    @property
    def written(self) -> list[tuple[str, int]]:
        """Every accepted write."""
        return [(one.key, one.order[1]) for one in self._target.writes]

    @property
    def versions(self) -> dict[str, int]:
        """What the store holds."""
        return {key: one.order[1] for key, one in self._target.stored.items()}

    @property
    def _target(self) -> MemoryTarget:
        return self.store.targets[self.store.current]


class Writer(Store):
    """One worker's way to the store."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop.grade, shop.queue_clock)
        self.store = shop.store
        self.batch_max = 1
        self.reason: Behaviour | None = None
        """What happens after a write, before the worker hears of it."""
        self._shop = shop

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        keys, shop = [change.key for change in changes], self._shop
        shop.inside += keys
        shop.overlaps += (key for key in keys if shop.inside.count(key) > 1)
        try:
            results = await super().apply(changes, claims)
            for change in changes:
                await behave(self.reason, change)
            return results
        finally:
            for key in keys:
                shop.inside.remove(key)


class Worker:
    """A consumer at work inside the block."""

    def __init__(
        self,
        shop: Shop,
        name: str,
        queue: str,
        *,
        debounce: Debounce | None = None,
        refetch: Callable[[str], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.sink = Writer(shop)
        self.events: list[Event] = []
        self._clock = MovingClock()
        ledger = shop.bench.another if name.endswith("2") else shop.bench.ledger
        self._consumer = Consumer(
            OpenPipeline(
                name="shop",
                sources=[(queue, shop.source(queue))],
                ledger=ledger,
                admin=ledger.admin,
                control_store=ledger.control_store,
                history_store=ledger.history_store,
                sink=self.sink,
                reader=MessageReader(FieldRoute(Fields("id", "v", {})), body_max_bytes=10_000),
                settings=Settings(lease_s=LEASE_S, redelivery_s=REDELIVERY_S, poll_s=0.05, **settings),
                owner=name,
                observers=[self.events.append],
                debounce=debounce,
                refetch=refetch,
                clock=self._clock,
                rng=random.Random(name),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Worker":
        self._task = asyncio.create_task(self._consumer.run())
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is None:
            await self.stop()
        else:
            await self.kill()

    @property
    def waiting(self) -> int:
        """How many deliveries it holds."""
        return len(self._consumer._lanes)

    def reported(self, kind: type[Event], key: str = "a") -> list[Any]:
        """The events of this kind that it reported about a key."""
        return [event for event in self.events if isinstance(event, kind) and event.key == key]

    def advance(self, seconds: float) -> None:
        """Let time pass for this worker: what it waits for may be due now."""
        self._clock.advance(seconds)
        self._consumer._lanes.arrivals.notify()

    def drain(self) -> None:
        """Take no more, give the rest back."""
        self._consumer.stop()

    async def stop(self) -> None:
        assert self._task is not None, "it is not at work"
        if not self._task.cancelled():
            self.drain()
            await self._task

    async def kill(self) -> None:
        """It does nothing any more, and gives nothing back."""
        assert self._task is not None, "it is not at work"
        self._task.cancel()
        await asyncio.wait([self._task])


async def breathe(change: Change[Any]) -> None:
    """Give others a turn."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=LOOK_S)


class Gate:
    """Holds up whoever comes until it is opened, at some keys or at all."""

    def __init__(self, *keys: str) -> None:
        self.reached: list[str] = []
        self._keys = keys
        self._opened = asyncio.Event()

    async def __call__(self, change: Change[Any]) -> None:
        if not self._keys or change.key in self._keys:
            self.reached.append(change.key)
            await self._opened.wait()

    def open(self) -> None:
        self._opened.set()
