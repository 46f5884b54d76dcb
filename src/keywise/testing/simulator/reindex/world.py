"""A simulated pipeline whose rows are read again, in place and beside, and whose sink swaps and rolls back."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.source import MemorySource
from keywise.adapters.memory.targets import MemoryStore, MemoryTables, MemoryTarget, Stored
from keywise.core import rules
from keywise.core.change import Delete, Put
from keywise.core.controls import PLAIN, Controls
from keywise.core.entry import Entry, LedgerPolicy
from keywise.core.settings import Settings
from keywise.core.sink import Grade
from keywise.flow.consumer import Consumer
from keywise.flow.intake import FunctionRoute, MessageReader
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.refetch import from_origin
from keywise.reindex.shards import other_scope
from keywise.reindex.worker import ReindexWorker
from keywise.testing.fault_injector import draw_rate
from keywise.testing.simulated_world import ConsumerWorld
from keywise.testing.simulator.reindex.auditor import LIVE, SHARDS, ReindexAudit
from keywise.testing.simulator.reindex.faults import ReindexFaults
from keywise.testing.simulator.reindex.links import LinkedQueue, LinkedScope, ReindexLink
from keywise.testing.simulator.reindex.operator import FOREIGN, SimulatedOperator
from keywise.testing.simulator.reindex.origin import LinkedOrigin, SimulatedOrigin
from keywise.testing.simulator.reindex.sinks import LinkedAlias, LinkedTable
from keywise.testing.simulator.reindex.strays import StrayRows
from keywise.testing.virtual_loop import Process, outside

FAULTS_S = 400.0
REST_MAX_S = 700.0
FORGET_DELETIONS_S = 30.0
LAG_MAX_S = 40.0
CALL_STOP_S = 150.0
"""A worker that is stopped before it asks the store to move the name goes on after this time."""
LOOK_S = 0.25
"""How much later than its message a row may be seen: less than the horizon."""
JUMP_MAX_S = 3.0
SWAP_ROUNDS = 3
SETTINGS = Settings(
    lease_s=10.0,
    margin_s=1.0,
    runtime_max_s=25.0,
    horizon_s=60.0,
    repair_s=4.0,
    concurrency=4,
    prefetch=40,
    batch_max=10,
    attempts_max=10_000,
    crashes_max=10_000,
    backoff_s=0.2,
    backoff_max_s=2.0,
    poll_s=1.0,
    drain_s=20.0,
    redelivery_s=60.0,
    maintenance_s=100.0,
)


class WatchedDatabase(MemoryDatabase):
    """Counts changes, and knows whether some of them are not committed yet."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.changes = 0

    def set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self.changes += 1
        super().set(table, key, value)

    @property
    def is_dirty(self) -> bool:
        return self._undo is not None


class SimulatedWorker:
    """What runs in one process: the consumer of live changes, and the worker of reindexes."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._consumer = Consumer(pipeline)
        self._reindex = ReindexWorker(pipeline)

    def stop(self) -> None:
        self._consumer.stop()
        self._reindex.stop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._consumer.run())
            group.create_task(self._reindex.run())


class ReindexWorld(ConsumerWorld):
    """A few workers, an origin, and a sink whose name moves between targets."""

    processes = (2, 3)
    restart_max_s = 2.0
    faults_s = FAULTS_S
    rest_max_s = REST_MAX_S
    auditor: ReindexAudit
    faults: ReindexFaults
    workers: dict[Process, Any]

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"reindex {grade.value} {seed}")
        rng = self.rng
        self.grade = grade
        self.faults = ReindexFaults(rng)
        self.has_table = grade is Grade.ATOMIC
        self.has_suspects = grade is not Grade.ATOMIC
        self.runs_user_code = rng.random() < 0.3
        self.forget_deletions_s = FORGET_DELETIONS_S if grade is Grade.CONDITIONAL and rng.random() < 0.5 else None
        self.is_consistent = rng.random() < 0.8
        self.database = WatchedDatabase(clock=self.store_now, rng=random.Random(rng.random()))
        self.source = MemorySource(MemoryDatabase(clock=self.now), "queue", visibility_s=20.0)
        self.queue = self.source.database.queue("queue")
        self.store = MemoryStore("sink")
        self.origin = SimulatedOrigin(self.now, rng, rng.choice((1, 2, 3)))
        self.keys = [f"key-{number}" for number in range(rng.randint(3, 9))]
        self.commands: set[Process] = set()
        self.short: set[str] = set()
        """Keys whose row is soon gone, and was never announced."""
        self._stops = random.Random(f"stops before a call {grade.value} {seed}")
        """Numbers of its own, so worlds without such a stop stay as they are."""
        self._stop_rate = draw_rate(self._stops, 1.0, never=0.2)
        self.strays = StrayRows(self, random.Random(f"stray rows {grade.value} {seed}"))
        self.auditor = ReindexAudit(self)
        self._operator = SimulatedOperator(self)
        self._under_way = 0
        """How many messages are about to be sent."""
        if rng.random() < 0.3:
            self._plant()
        self.auditor.begin()

    # What the run looks like from outside.

    @property
    def controls(self) -> Controls:
        return self.controls_of(LIVE)

    def controls_of(self, scope: str) -> Controls:
        committed: dict[str, Controls] = self.database.committed(self.database.scope(scope).controls)
        return committed.get("", PLAIN)

    def entries(self, scope: str) -> Mapping[str, Entry]:
        return self.database.committed(self.database.scope(scope).entries)

    def scopes(self) -> list[str]:
        """Return the scopes of the pipeline and of its other targets."""
        return [name for name in self.database.scopes if name != SHARDS]

    def other_scopes(self) -> list[str]:
        return [name for name in self.scopes() if name != LIVE]

    def policy_of(self, scope: str) -> LedgerPolicy:
        intents = self.has_suspects and scope != SHARDS
        return LedgerPolicy(intents=intents, redelivery_s=SETTINGS.redelivery_s)

    def current_target(self) -> str:
        return MemoryTables(self.database, "sink").current if self.has_table else self.store.current

    def target_names(self) -> list[str]:
        if not self.has_table:
            return sorted(self.store.targets)
        names = {target for _, target in self.database.targets} | {FOREIGN} & self.database.tables.keys()
        return sorted(names)

    def content(self, target: str) -> Mapping[str, Stored]:
        """Return what a target holds."""
        if not self.has_table:
            return dict(self.store.targets[target].stored) if target in self.store.targets else {}
        table = MemoryTables(self.database, "sink").place_of(target)
        return self.database.committed(self.database.tables.get(table, {}))

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._edit(key) for key in self.keys]

    def operators(self) -> list[Coroutine[Any, Any, None]]:
        return [self._operator.operate()]

    def disturb(self) -> None:
        # A swap takes only seconds, so workers are stopped more often meanwhile.
        run = self.controls.run
        for _ in range(SWAP_ROUNDS if run is not None and run.swaps else 1):
            self.disturb_processes("stop", self.faults.stop_rate, self.stop)
        if self.faults.happens("origin away", self.faults.away_rate):
            self.origin.away_until = self.now() + self.rng.uniform(1.0, 30.0)
        if self.store_ahead_s < 2 * JUMP_MAX_S and self.faults.happens("clock jump", self.faults.jump_rate):
            self.store_ahead_s += self.rng.uniform(1.0, JUMP_MAX_S)

    def served(self) -> None:
        self.auditor.look()

    def is_at_rest(self) -> bool:
        controls, policy = self.controls, self.policy_of(LIVE)
        is_suspect = any(rules.suspect_since(entry, policy) is not None for entry in self.entries(LIVE).values())
        is_busy = controls.move is not None or (controls.run is not None and controls.run.is_active)
        return not self.queue and not self._under_way and not is_suspect and not is_busy

    async def check_end(self) -> None:
        self.auditor.check_end()

    # The workload.

    def _plant(self) -> None:
        """Make a target of another program, with a name that an operator may choose."""
        junk = Stored((0, 10**6, 0), False, b"", 0.0)
        if self.has_table:
            self.database.table(FOREIGN)["key-0"] = junk
        else:
            self.store.targets[FOREIGN] = MemoryTarget(stored={"key-0": junk})
        self.auditor.planted(FOREIGN)

    async def _edit(self, key: str) -> None:
        """Put, change, delete and put again one row, and announce each change; some long ago, others at the end."""
        rng, is_there = self.rng, False
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0.0, FAULTS_S / 2))
        for _ in range(rng.randint(1, 14)):
            is_short = not is_there and self.faults.happens("row that is soon gone", self.faults.short_rate * 0.5)
            is_there = not is_there or rng.random() < 0.7
            self._change(key, is_there=is_there, is_announced=not is_short)
            if is_short:
                self.short.add(key)
                await asyncio.sleep(rng.uniform(0.5, 20.0))
                self.short.discard(key)
                is_there = False
                self._change(key, is_there=False, is_announced=not self.is_consistent)
            await asyncio.sleep(rng.uniform(0.0, rng.choice((2.0, 30.0, 60.0))))

    def _change(self, key: str, *, is_there: bool, is_announced: bool) -> None:
        rng, faults = self.rng, self.faults
        lags = faults.happens("origin lags", faults.lag_rate)
        row = self.origin.edit(key, is_there=is_there, lag_s=rng.uniform(0.0, LAG_MAX_S) if lags else 0.0)
        self.auditor.note(f"{key} v{row.version} {'is there' if is_there else 'is gone'}, seen at {row.visible_at:.1f}")
        may_be_silent = is_there or self.is_consistent
        if not is_announced or (may_be_silent and faults.happens("no message", faults.no_message_rate)):
            return
        body = self.origin.body(key, row)
        for _ in range(1 + faults.happens("message twice", faults.twice_rate)):
            late = faults.happens("late message", faults.late_message_rate)
            outside(self.loop, self._send(body, rng.uniform(0.0, rng.choice((5.0, 60.0))) if late else 0.0))
            self._under_way += 1

    async def _send(self, body: bytes, late_s: float) -> None:
        await asyncio.sleep(late_s)
        await self.source.send([body])
        self._under_way -= 1

    # Processes.

    def begin(self, process: Process) -> None:
        worker: Any = SimulatedWorker(self.pipeline(process))
        self.workers[process] = worker
        process.spawn(self._work(process, worker))

    async def about_to_move(self, process: Process) -> None:
        """A worker has noted that it asks the store to move the name: perhaps stop it until the name is back."""
        if self.faults.is_over or process.is_paused or self._stops.random() >= self._stop_rate:
            return
        self.faults.injected["stop before the call"] += 1
        process.pause()
        self.paused(process, CALL_STOP_S)
        outside(self.loop, self._resume_later(process))
        await asyncio.sleep(0)

    async def _resume_later(self, process: Process) -> None:
        epoch, until = self.controls.target_epoch, self.now() + CALL_STOP_S
        while self.now() < until and self.controls.target_epoch < epoch + 2:  # noqa: ASYNC110 - the world has no event for it
            await asyncio.sleep(LOOK_S)
        self.resume(process)

    def stop(self, process: Process) -> None:
        """As SIGTERM."""
        self.auditor.note(f"{process.name} gets SIGTERM")
        super().stop(process)

    def kill(self, process: Process) -> None:
        if process not in self.commands:
            self.auditor.note(f"{process.name} is killed")
            super().kill(process)
        elif not process.is_dead:
            process.kill()
            self._fallen.append(process)
            for session in self.sessions.pop(process, []):
                session.end()

    def paused(self, process: Process, pause_s: float) -> None:
        self.auditor.note(f"{process.name} pauses")

    def resuming(self, process: Process) -> None:
        self.auditor.note(f"{process.name} goes on")

    def pipeline(self, process: Process) -> OpenPipeline:
        """Everything as one process sees it."""
        link = ReindexLink(self, process)
        ledger: Any = LinkedScope(link, self, LIVE)
        shards: Any = LinkedScope(link, self, SHARDS)
        sink: Any = LinkedTable(link, self) if self.has_table else LinkedAlias(link, self)
        queue: Any = LinkedQueue(link, self.source)
        origin = LinkedOrigin(link, self)
        pipeline = OpenPipeline(
            name=LIVE,
            sources=[("queue", queue)],
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=sink,
            reader=MessageReader(FunctionRoute(_read), body_max_bytes=1000),
            settings=SETTINGS,
            owner=process.name,
            observers=(self.auditor.saw,),
            origin=origin,
            refetch=from_origin(origin),
            shard_ledger=shards,
            clock=self.now,
            wall=self.store_now,
            rng=random.Random(self.rng.random()),
        )

        @asynccontextmanager
        async def open_target(target: str, generation: int) -> AsyncIterator[OpenPipeline]:
            other: Any = LinkedScope(link, self, other_scope(LIVE, generation))
            yield dataclasses.replace(
                pipeline,
                ledger=other,
                admin=other,
                control_store=other,
                history_store=other,
                sink=sink.at_target(target),
                controls=PLAIN,
            )

        pipeline.open_target = open_target
        return pipeline


def _read(body: dict[str, Any]) -> Put | Delete:
    kind = Delete if body["state"] == "gone" else Put
    return kind(body["id"], body["v"])
