"""A whole pipeline on virtual time: real consumer, memory plugs, and a store that behaves as a test wants."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.adapters.memory.source import MemorySource
from keywise.core import events
from keywise.core.change import Change, Outcome
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Certainty, Claim, Entry, LedgerPolicy
from keywise.core.errors import TransientError
from keywise.core.events import Event
from keywise.core.failures import cause_of_error, is_permanent
from keywise.core.settings import Settings
from keywise.core.sink import Grade, SinkResult
from keywise.core.transaction import Transaction
from keywise.flow.consumer import Consumer
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from keywise.flow.pipeline import OpenPipeline
from keywise.observe.counters import Counters
from keywise.testing.virtual_loop import VirtualLoop

QUEUE_TRANSACTION = "queue_transaction"
LEDGER_TRANSACTION = "ledger_transaction"
CLAIMED_TRANSACTION = "claimed_transaction"
LEASED = "leased"
LEASED_CONDITIONAL = "leased, conditional"
WAYS = [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]

Behaviour = Callable[[Change[Any]], Coroutine[Any, Any, None] | None]


async def behave(behaviour: Behaviour | None, change: Change[Any]) -> None:
    waiting = behaviour(change) if behaviour is not None else None
    if waiting is not None:
        await waiting


class SteadyLoop(VirtualLoop):
    """A virtual loop that wakes at or after a moment, never a rounding error before it."""

    def select(self, timeout: float | None) -> list[Any]:
        return super().select(timeout + 1e-6 if timeout else timeout)


class Store(MemorySink):
    """A plain or conditional store that asks the test before every write, and notes every try."""

    def __init__(self, grade: Grade, clock: Callable[[], float]) -> None:
        super().__init__(grade, clock=clock)
        self.behaviour: Behaviour | None = None
        self.tries: list[tuple[float, str, int | None]] = []
        self.calls: list[int] = []

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        self.calls.append(len(changes))
        return [await self._apply_one(change, claim) for change, claim in zip(changes, claims, strict=True)]

    async def _apply_one(self, change: Change[Any], claim: Claim) -> SinkResult:
        self.tries.append((self._clock(), change.key, change.version))
        try:
            await behave(self.behaviour, change)
        except OSError:
            raise  # No answer came: the outcome of the whole call is unknown.
        except Exception as error:
            certainty = Certainty.CLEAN if isinstance(error, TransientError) or is_permanent(error) else Certainty.ENDED
            return SinkResult(Outcome.FAILED, cause_of_error(error), is_permanent(error), certainty)
        return self.write(change, claim.token)


class Table(MemoryTable):
    """An atomic store that asks the test before every write, and notes every try."""

    def __init__(self, database: MemoryDatabase, *, runs_user_code: bool) -> None:
        super().__init__(database, "table")
        self.runs_user_code = runs_user_code
        self.behaviour: Behaviour | None = None
        self.tries: list[tuple[float, str, int | None]] = []
        self.calls: list[int] = []

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        self.calls.append(len(changes))
        for change in changes:
            self.tries.append((self.database.clock(), change.key, change.version))
            await behave(self.behaviour, change)
            await super().write(transaction, [change])


class Rig:
    """One pipeline of one way, and what became of it."""

    def __init__(self, way: str = LEASED, *, retention_s: float | None = None, **settings: Any) -> None:
        self.loop = SteadyLoop()
        self.way = way
        given = {"lease_s": 30.0, "margin_s": 2.0, "redelivery_s": 300.0, "retention_s": retention_s, **settings}
        self.settings = Settings(**given)
        clock = self.loop.time
        self.database = MemoryDatabase(clock=clock, rng=random.Random(1))
        queues = self.database if way == QUEUE_TRANSACTION else MemoryDatabase(clock=clock)
        self.source = MemorySource(queues, "queue", visibility_s=60.0)
        self.queue = queues.queue("queue")
        plain = way == LEASED
        self.policy = LedgerPolicy(intents=plain, redelivery_s=self.settings.redelivery_s, retention_s=retention_s)
        self.ledger = MemoryLedger(self.database, "test", self.policy)
        self.sink: Any = Store(Grade.PLAIN if plain else Grade.CONDITIONAL, clock)
        if not way.startswith(LEASED):
            self.sink = Table(self.database, runs_user_code=way == CLAIMED_TRANSACTION)
        self.events: list[Event] = []
        self.figures = Counters()
        self.refetch: Callable[[str], Any] | None = None
        self.reader = MessageReader(FieldRoute(Fields("id", "v", {"gone": [True]})), body_max_bytes=10_000)
        self.more: dict[str, Any] = {}
        """What a test puts in place of a part of the pipeline."""

    def pipeline(self, owner: str = "w1") -> OpenPipeline:
        parts: dict[str, Any] = {
            "name": "test",
            "sources": [("queue", self.source)],
            "ledger": self.ledger,
            "admin": self.ledger,
            "control_store": self.ledger,
            "history_store": self.ledger,
            "sink": self.sink,
            "reader": self.reader,
            "settings": self.settings,
            "owner": owner,
            "observers": [self.events.append, self.figures],
            "refetch": self.refetch,
            "clock": self.loop.time,
            "rng": random.Random(2),
            **self.more,
        }
        return OpenPipeline(**parts)

    # Doing.

    def play(self, story: Coroutine[Any, Any, Any]) -> Any:
        """Run a story on virtual time; an error that nobody handles fails the test."""
        surprises: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: surprises.append(context))
        result = self.loop.run_until_complete(story)
        assert surprises == []
        return result

    def run(self, *bodies: dict[str, Any] | bytes, limit_s: float = 3000.0) -> None:
        """Send messages, work until the queue is empty, and stop."""
        self.play(self.work(*bodies, limit_s=limit_s))

    async def work(self, *bodies: dict[str, Any] | bytes, limit_s: float = 3000.0) -> None:
        await self.send(*bodies)
        async with Running(self):
            await self.until(lambda: not self.queue, limit_s)

    async def send(self, *bodies: dict[str, Any] | bytes) -> None:
        await self.source.send([body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies])

    async def until(self, condition: Callable[[], Any], limit_s: float = 3000.0) -> None:
        """Let virtual time pass until something is true."""
        deadline = self.loop.time() + limit_s
        while not condition():
            assert self.loop.time() < deadline, f"not within {limit_s} s; happened: {self.events[-5:]}"
            await self.pass_s(0.05)

    async def pass_s(self, seconds: float) -> None:
        await asyncio.wait([self.loop.create_future()], timeout=seconds)

    # Seeing.

    @property
    def stored(self) -> dict[str, int | None]:
        """Versions by key; a deleted key is not there."""
        return {key: held.order[1] for key, held in self.sink.stored.items() if not held.deleted}

    @property
    def written(self) -> list[tuple[str, int]]:
        """Every accepted write."""
        writes = self.sink.writes
        return [(w.key, w.order[1]) for w in (writes.values() if isinstance(writes, dict) else writes)]

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self.figures.outcomes)

    @property
    def letters(self) -> list[DeadLetter]:
        return [letter for _, letter in self.database.scope("test").letters.values()]

    def entry(self, key: str) -> Entry | None:
        return self.database.scope("test").entries.get(key)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def open_changes(self) -> int:
        """How many changes are worked on, by the events."""
        opened = sum(event.changes for event in self.of(events.BatchOpened))
        return opened - sum(event.changes for event in self.of(events.BatchClosed))


class Running:
    """A consumer at work inside the block; it is stopped and waited for at its end."""

    def __init__(self, rig: Rig, owner: str = "w1") -> None:
        self.consumer = Consumer(rig.pipeline(owner))
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Running":
        self.task = asyncio.get_running_loop().create_task(self.consumer.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self.task is not None
        self.consumer.stop()
        if not self.task.cancelled():
            await self.task
