"""One simulated run: a few worker processes, a source, a ledger and a sink, and everything that can go wrong."""

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from keywise.adapters.memory.database import MemoryDatabase, Message
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, Delete, Order, Put
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Claim, Entry, LedgerPolicy
from keywise.core.rules import suspect_since
from keywise.core.settings import Settings
from keywise.core.sink import APPLIED, Grade, SinkResult
from keywise.flow.consumer import Consumer
from keywise.flow.intake import FunctionRoute, MessageReader
from keywise.flow.lanes import Lanes
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.simulated_world import EPOCH_S, ConsumerWorld
from keywise.testing.simulator import workload
from keywise.testing.simulator.auditor import TICK_S, Auditor
from keywise.testing.simulator.backlogs import BacklogWorkload
from keywise.testing.simulator.delivery_audit import DeliveryAudit
from keywise.testing.simulator.disturbances import Disturbances
from keywise.testing.simulator.faults import Faults
from keywise.testing.simulator.final_checks import FinalChecks
from keywise.testing.simulator.flow_control import Flow
from keywise.testing.simulator.gateway import Gateway
from keywise.testing.simulator.ledger_outages import Blackout
from keywise.testing.simulator.links import FlowLink, LinkedLedger, LinkedSource, WatchedDatabase
from keywise.testing.simulator.replays import Replays
from keywise.testing.simulator.sinks import LinkedSink, LinkedTable
from keywise.testing.virtual_loop import Process

SAFETY_S = 110.0
LIVENESS_MAX_S = 3000.0
FORGET_DELETIONS_S = 30.0


class World(ConsumerWorld):
    """A flow: a few workers, a source, a ledger and a sink, and everything that can go wrong."""

    faults_s = SAFETY_S
    rest_max_s = LIVENESS_MAX_S
    tick_s = TICK_S
    faults: Faults
    auditor: Auditor

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"{grade.value} {seed}")
        self.grade = grade
        self.faults = Faults(self.rng)
        self.blackout = Blackout(self, seed)
        self.gateway = Gateway(self, seed)
        self.settings = replace(_settings(self.rng, self.faults), **self.blackout.options())
        self.sink_batch_max = self.rng.choice((1, 3))
        self.has_threads = self.rng.random() < 0.5
        """A handler in a thread cannot be cancelled: it goes on when its claim is lost."""
        self.database = WatchedDatabase(clock=self.store_now, rng=random.Random(self.rng.random()))
        self.queue_database: MemoryDatabase = (
            self.database if self.rng.random() < 0.5 else MemoryDatabase(clock=self.store_now)
        )
        self.source = MemorySource(self.queue_database, "queue", visibility_s=15.0)
        self.bulk = MemorySource(self.queue_database, "bulk", visibility_s=15.0)
        self.flow = Flow(self.rng, grade, prunes=self.faults.rates.prune)
        forgets = grade is Grade.CONDITIONAL and self.rng.random() < 0.5
        self.has_suspects = grade is Grade.PLAIN or forgets
        settings = self.settings
        self.policy = LedgerPolicy(self.has_suspects, settings.redelivery_s, settings.retention_s, self.flow.rate)
        self.sink = MemorySink(grade, forget_deletions_s=FORGET_DELETIONS_S if forgets else None, clock=self.store_now)
        self.table = MemoryTable(self.database, "sink")
        self.runs_user_code = grade is not Grade.ATOMIC or self.rng.random() < 0.5
        self.ledger = MemoryLedger(self.database, "sim", self.policy)
        self.auditor = Auditor(self)
        self.delivery_audit = DeliveryAudit(self)
        self.final_checks = FinalChecks(self)
        self.disturbances = Disturbances(self)
        self.replays = Replays(self, seed)
        self.backlog = BacklogWorkload(self, seed)
        self.changes = sorted([*workload.draw(self.faults), *self.backlog.changes()], key=lambda sent: sent.at)
        self.sent_by_body = {sent.body: sent for sent in self.changes}
        self.bodies: dict[int, bytes] = {}
        self.sent: dict[str, workload.Sent] = {}
        self.paused_at: dict[Process, float] = {}
        self._deadly = {f"key-{i}" for i in range(workload.KEYS) if self.rng.random() < self.faults.rates.deadly_repair}
        """Keys whose repair takes its process with it."""
        self._table_writes = 0

    # What the run looks like from outside.

    def entries(self) -> dict[str, Entry]:
        return self.database.scope("sim").entries

    def letters(self) -> dict[int, tuple[float, DeadLetter]]:
        return self.database.scope("sim").letters

    def messages(self) -> dict[int, Message]:
        return self.queue_database.queue("queue") | self.queue_database.queue("bulk")

    def consumers(self) -> list[tuple[str, Consumer]]:
        """Those that run, by the names of their processes."""
        return [(process.name, consumer) for process, consumer in self.workers.items() if not process.is_paused]

    def lanes(self) -> list[tuple[str, Lanes]]:
        return [(name, consumer._lanes) for name, consumer in self.consumers()]

    def paused_since(self, process: Process, moment: float) -> bool:
        return self.paused_at.get(process, -1.0) >= moment

    def was_told_to_stop(self, process: Process) -> bool:
        """Long enough ago to know it."""
        stopped_at = self.stopped_at.get(process, self.now())
        return stopped_at < self.now() and not self.paused_since(process, EPOCH_S + stopped_at)

    @property
    def is_queue_transaction(self) -> bool:
        same = self.queue_database is self.database
        has_to_wait = self.flow.rate is not None or self.flow.debounce is not None
        return self.grade is Grade.ATOMIC and same and not self.runs_user_code and not has_to_wait

    def sent_of(self, change: Change[Any]) -> workload.Sent | None:
        """None for a deletion that a repair made up."""
        return self.sent_by_body.get(change.body)

    def is_zombie_write(self) -> bool:
        """Pauses beyond the horizon are outside the promise; only the end has to be right then."""
        return self.faults.rates.zombies and self.has_suspects

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._send_all()]

    def operators(self) -> list[Coroutine[Any, Any, None]]:
        return [self.flow.operate(self), self.replays.operate(), self.backlog.operate()]

    def disturb(self) -> None:
        self.disturb_processes("drain", self.faults.rates.drain, self.stop)
        self.disturbances.disturb()

    def tick(self) -> None:
        self.auditor.tick()
        self.delivery_audit.tick()

    def served(self) -> None:
        self.auditor.look()

    async def check_end(self) -> None:
        if not self.is_at_rest():
            waiting = sorted(self.sent_by_body[m.body].key for m in self.messages().values())
            journals = [file.name for file in self.blackout.disk.files]
            self.violate(f"not drained: messages {waiting}, entries {self._unrest()}, journals {journals}")
        self.final_checks.check_content()

    def is_at_rest(self) -> bool:
        # An open transaction has removed its messages, and not committed yet what they say.
        if self.database.is_dirty or self.messages() or self.blackout.disk.files:
            return False
        return not self._unrest() and not any(len(lanes) for _, lanes in self.lanes())

    def _unrest(self) -> list[str]:
        return [key for key, entry in self.entries().items() if self._is_restless(entry)]

    def _is_restless(self, entry: Entry) -> bool:
        if entry.token and entry.lease_until > self.store_now():
            return True
        gave_up = entry.crashes >= self.settings.crashes_max and entry.tried is None
        return suspect_since(entry, self.policy) is not None and not gave_up

    # Processes.

    def stop(self, process: Process) -> None:
        self.auditor.note(f"{process.name} drains")
        super().stop(process)

    def left(self, process: Process) -> None:
        if self.now() - self.stopped_at.get(process, 0.0) < self.settings.drain_s - 0.1:
            self.delivery_audit.left(process)

    def fell(self, process: Process) -> None:
        self.auditor.note(f"{process.name} killed")
        self.auditor.process_fell(process)
        self.blackout.disk.crashed(process)

    def paused(self, process: Process, pause_s: float) -> None:
        self.paused_at[process] = math.inf
        self.auditor.note(f"{process.name} pauses")
        self.delivery_audit.paused(process)
        self.auditor.process_fell(process)

    def resuming(self, process: Process) -> None:
        self.auditor.note(f"{process.name} goes on")
        self.paused_at[process] = self.store_now()
        self.delivery_audit.awake(process)

    def pipeline(self, process: Process) -> OpenPipeline:
        """Everything as one process sees it."""
        link = FlowLink(self, process)
        ledger: Any = LinkedLedger(FlowLink(self, process, lambda: self.blackout.cuts(process)), self.ledger)
        sink: Any = LinkedSink(link, self.sink)
        if self.grade is Grade.ATOMIC:
            sink = LinkedTable(link, self.table, runs_user_code=self.runs_user_code)
        sources: list[tuple[str, Any]] = [("queue", LinkedSource(link, self.source))]
        if self.flow.has_bulk:
            sources.append(("bulk", LinkedSource(link, self.bulk)))
        skew_s = self.rng.uniform(0.0, 10_000.0)
        return OpenPipeline(
            name="sim",
            sources=sources,
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=sink,
            reader=MessageReader(FunctionRoute(_read), body_max_bytes=1000),
            settings=self.settings,
            owner=process.name,
            bulk=frozenset({1}) if self.flow.has_bulk else frozenset(),
            debounce=self.flow.debounce,
            rate=self.flow.rate,
            refetch=self.refetch if self.has_suspects else None,
            journal_store=self.blackout.disk.journal_store(process) if self.blackout.is_write_anyway else None,
            clock=lambda: self.loop.time() + skew_s,
            wall=self.store_now,
            rng=random.Random(self.rng.random()),
        )

    # The workload and its handler.

    async def _send_all(self) -> None:
        faults = self.faults
        for sent in list(self.changes):
            await asyncio.sleep(max(0.0, sent.at - self.now()))
            delay_s = self._delay_s() if faults.happens("delay", faults.rates.delay) else sent.delay_s
            await self.send(sent, delay_s)

    async def send(self, sent: workload.Sent, delay_s: float) -> None:
        copies = 2 if self.faults.happens("duplicate", self.faults.rates.duplicate) else 1
        self.sent_now(sent)
        source = self.bulk if self.flow.has_bulk and self.rng.random() < 0.4 else self.source
        await source.send([sent.body] * copies, delay_s=delay_s)
        self.sent_now(sent)  # Its key may have been reset before it was in the queue.
        self.bodies.update((number, message.body) for number, message in self.messages().items())
        self.auditor.look()
        self.auditor.sent(sent.key, sent.rank)

    def sent_again(self, body: bytes) -> None:
        """A dead letter is in the queue once more: it has to end once more."""
        sent = self.sent_by_body[body]
        self.sent_now(sent)
        self.bodies.update((number, message.body) for number, message in self.messages().items())
        self.auditor.letters.sent_again(sent)

    def _delay_s(self) -> float:
        """Some stragglers arrive when their key is forgotten."""
        lowest, highest = self.rng.choice(((1.0, 20.0), (1.0, 20.0), (20.0, 29.0), (60.0, 100.0)))
        return self.rng.uniform(lowest, highest)

    def sent_now(self, sent: workload.Sent) -> None:
        sent.era = self.flow.era(sent.key)
        newest = self.sent.get(sent.key)
        is_good = not (sent.malformed or sent.poison or sent.killer or sent.flaky > 10 or sent.key == workload.MEETING)
        if is_good and (newest is None or sent.rank > newest.rank):
            self.sent[sent.key] = sent

    def refetch(self, key: str) -> bytes | None:
        sent = self.sent.get(key)
        return sent.body if sent is not None else None

    async def meet_killers(self, process: Process, changes: Sequence[Change[Any]]) -> None:
        """A killer takes its process with it."""
        for change in changes:
            sent = self.sent_of(change)
            if sent is not None and sent.killer:
                self.auditor.kills[change.key, change.order] += 1
                if self.auditor.kills[change.key, change.order] > self.final_checks.kills_max(sent):
                    self.auditor.violate(f"{change.key} v{sent.version} kills one worker after another")
                await self.die(process)

    async def meet_deadly_repairs(self, process: Process, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.order is None and claim.key in self._deadly:
                self.faults.injected["deadly repair"] += 1
                self.auditor.repair_kills(claim.key)
                await self.die(process)

    def write(self, sink: MemorySink, change: Change[Any], token: int) -> SinkResult:
        accepted = len(sink.writes)
        result = sink.write(change, token)
        if result is APPLIED and len(sink.writes) > accepted:
            self.auditor.write(change.key, self._rank(change), change.deleted)
        self.blackout.applied(change.key, self._rank(change))
        return result

    def _rank(self, change: Change[Any]) -> Order:
        sent = self.sent_of(change)
        return change.order if sent is None else (sent.era, *change.order[1:])

    def transaction_committed(self) -> None:
        """Judge the writes of a transaction once they are there to stay."""
        writes = list(self.table.writes.values())
        for write in writes[self._table_writes :]:
            entry = self.entries().get(write.key)
            era = entry.mark[0] if entry is not None and entry.mark is not None else 0
            self.auditor.write(write.key, (era, *write.order[1:]), write.deleted)
            if not self.runs_user_code:
                self.flow.committed(self, write.key)
        self._table_writes = len(writes)


def _settings(rng: random.Random, faults: Faults) -> Settings:
    """Small, so that limits are met."""
    return Settings(
        batch_max=rng.choice((2, 8)),
        prefetch=12,
        concurrency=3,
        lease_s=10.0,
        margin_s=1.0,
        runtime_max_s=40.0,
        redelivery_s=30.0,
        retention_s=30.0 if faults.rates.prune else None,
        horizon_s=8.0 if faults.rates.zombies else 60.0,
        attempts_max=5,
        crashes_max=3,
        backoff_s=0.2,
        backoff_max_s=5.0,
        poll_s=2.0,
        drain_s=15.0,
        repair_s=5.0,
        evict_delay_s=0.5,
        evict_delay_max_s=10.0,
        maintenance_s=20.0,
    )


def _read(body: dict[str, Any]) -> Put | Delete:
    kind = Delete if body["state"] == "gone" else Put
    return kind(body["id"], body["v"])
