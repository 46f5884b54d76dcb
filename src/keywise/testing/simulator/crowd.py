"""A simulated run in which workers die with hundreds of claims, and no other key may wait for that.

Its servers always answer, so its limits are narrow: what takes long here is the fault of the worker.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Self

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.sink import MemorySink
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, ChangeHeader
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import EMPTY, Claim, Commit, Entry, LeaseTerms, LedgerPolicy, Level, Phase
from keywise.core.ledger import ClaimResults
from keywise.core.settings import Settings
from keywise.core.sink import Grade, SinkResult
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from keywise.flow.lanes import Lanes
from keywise.flow.leased.probation import ON_PROBATION
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.fault_injector import FaultInjector
from keywise.testing.run_log import RunLog
from keywise.testing.simulated_world import ConsumerWorld
from keywise.testing.virtual_loop import Process

TICK_S = 0.25
FAULTS_S = 150.0
REST_MAX_S = 4000.0
PATIENCE_S = 5.0
"""No key that no dead worker held waits longer than this, besides its own call and the time alone of another."""
LEASE_S = 10.0
LATE_DEATHS_MAX = 4
"""So many deaths double the time alone up to `runtime_max_s`."""
SETTINGS = Settings(
    lease_s=LEASE_S,
    margin_s=1.0,
    runtime_max_s=80.0,
    horizon_s=12.0,
    repair_s=4.0,
    concurrency=8,
    prefetch=600,
    batch_max=200,
    attempts_max=5,
    crashes_max=3,
    backoff_s=0.2,
    backoff_max_s=2.0,
    poll_s=1.0,
    drain_s=30.0,
    redelivery_s=600.0,
)


class SentPlan(msgspec.Struct):
    """What the handler does with one change."""

    key: str
    version: int
    call_s: float
    kills: bool = False


class CrowdCall(msgspec.Struct, eq=False):
    """A handler that runs."""

    process: Process
    claim: Claim
    started_at: float


class Probe(msgspec.Struct):
    """A change that has to be written soon."""

    key: str
    waited_s: float = 0.0
    is_excused: bool = False
    """A worker that died had received it."""


class CrowdWorld(ConsumerWorld):
    """A few workers, hundreds of keys, killers, and probes that arrive once a second."""

    processes = (1, 3)
    restart_max_s = 2.0
    faults_s = FAULTS_S
    rest_max_s = REST_MAX_S
    tick_s = TICK_S
    auditor: "CrowdAudit"

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"crowd {grade.value} {seed}")
        self.faults = FaultInjector(self.rng)
        self.grade = grade
        self.database = MemoryDatabase(clock=self.now, rng=random.Random(self.rng.random()))
        self.source = MemorySource(MemoryDatabase(clock=self.now), "queue", visibility_s=20.0)
        self.queue = self.source.database.queue("queue")
        self.policy = LedgerPolicy(intents=grade is Grade.PLAIN, redelivery_s=SETTINGS.redelivery_s)
        self.sink = MemorySink(grade, clock=self.now)
        self.auditor = CrowdAudit(self)
        self.plans: dict[tuple[str, int], SentPlan] = {}
        self._refetch_s = self.rng.uniform(0.1, 9.0)
        self._kills_max_s = self.rng.choice((0.05, 0.05, 30.0))

    def entry(self, key: str) -> Entry:
        return self.database.scope("sim").entries.get(key, EMPTY)

    def held_by(self, process: Process) -> list[tuple[str, Entry]]:
        entries = self.database.scope("sim").entries
        mine = [(key, entry) for key, entry in entries.items() if entry.token and entry.owner == process.name]
        return [(key, entry) for key, entry in mine if not entry.abandoned]

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._send_crowd(), self._send_probes(), self._kill_some()]

    def tick(self) -> None:
        self.auditor.tick()

    def is_at_rest(self) -> bool:
        return not self.queue

    async def check_end(self) -> None:
        self.auditor.check_end()

    def fell(self, process: Process) -> None:
        self.auditor.process_fell(process)

    async def _send_crowd(self) -> None:
        rng = self.rng
        plans = [SentPlan(f"crowd-{number}", 1, rng.uniform(0.01, 0.1)) for number in range(rng.choice((60, 150, 300)))]
        plans += [SentPlan(f"long-{number}", 1, rng.uniform(10.0, 30.0)) for number in range(rng.choice((0, 0, 1, 3)))]
        killers = [f"killer-{number}" for number in range(rng.choice((0, 1, 1, 2)))]
        plans += [SentPlan(key, 1, rng.uniform(0.0, self._kills_max_s), kills=True) for key in killers]
        rng.shuffle(plans)
        await self._send(plans)
        for version in range(2, 2 + rng.choice((0, 0, 3))):
            await asyncio.sleep(rng.uniform(5.0, 30.0))
            await self._send(
                [SentPlan(key, version, rng.uniform(0.0, self._kills_max_s), kills=True) for key in killers]
            )

    async def _send_probes(self) -> None:
        number = 0
        while self.now() < FAULTS_S:
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            number += 1
            self.auditor.probes[f"probe-{number}"] = Probe(f"probe-{number}")
            await self._send([SentPlan(f"probe-{number}", 1, self.rng.uniform(0.0, 0.05))])

    async def _send(self, plans: Sequence[SentPlan]) -> None:
        self.plans |= {(plan.key, plan.version): plan for plan in plans}
        await self.source.send([json.dumps({"id": plan.key, "v": plan.version}).encode() for plan in plans])

    async def _kill_some(self) -> None:
        """Kill workers, the first while it holds many claims; drain some."""
        rng = self.rng
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        for _ in range(rng.randint(1, 3)):
            if busiest := max(self.workers, key=lambda process: len(self.held_by(process)), default=None):
                self.kill(busiest)
            await asyncio.sleep(rng.uniform(1.0, 40.0))
            if self.workers and rng.random() < 0.3:
                self.stop(rng.choice(list(self.workers)))

    # Processes.

    def pipeline(self, process: Process) -> OpenPipeline:
        ledger = CrowdLedger(self, process)
        return OpenPipeline(
            name="sim",
            sources=[("queue", self.source)],
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=CrowdSink(self, process),
            reader=MessageReader(FieldRoute(Fields("id", "v", {})), body_max_bytes=1000),
            settings=SETTINGS,
            owner=process.name,
            refetch=self._refetch if self.policy.intents else None,
            clock=self.now,
            wall=self.now,
            rng=random.Random(self.rng.random()),
        )

    async def _refetch(self, key: str) -> dict[str, Any]:
        """A slow source of truth."""
        await asyncio.sleep(0.0 if self.faults.is_over else self._refetch_s)
        return {"id": key, "v": max(version for one, version in self.plans if one == key)}


class CrowdLedger(MemoryLedger):
    """The ledger as one process sees it."""

    def __init__(self, world: CrowdWorld, process: Process) -> None:
        super().__init__(world.database, "sim", world.policy)
        self._auditor = world.auditor
        self._process = process

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        self._auditor.asked(self._process, terms)
        results = await super().claim(headers, terms)
        for claim in results.granted:
            self._auditor.granted(self._process, claim, terms)
        self._auditor.check_window(self._process, results.granted)
        return results

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        refused = await super().commit(commits)
        self._auditor.ended(commit.claim.key for commit in commits)
        return refused

    async def release(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._auditor.released(self._process, claim)
        await super().release(claims)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        lost = await super().dead_letter(requests)
        for request in requests:
            if request.claim is not None and request.claim not in lost:
                self._auditor.dead(request.claim, request.letter.cause)
        self._auditor.ended(request.letter.key for request in requests)
        return lost

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        await super().finish_repair(claim, written)
        self._auditor.ended([claim.key])


class CrowdSink:
    """The handler as one process runs it."""

    forgets_deletions = False
    batch_max = 1

    def __init__(self, world: CrowdWorld, process: Process) -> None:
        self._world = world
        self._process = process
        self.grade = world.grade

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        world, [change], [claim] = self._world, changes, claims
        plan = world.plans[change.key, change.version or 0]
        call = world.auditor.call_started(self._process, claim)
        try:
            await asyncio.sleep(plan.call_s)
            if plan.kills:
                world.auditor.kills(plan, is_repair=claim.order is None)
                await world.die(self._process)
            return [world.sink.write(change, claim.token)]
        finally:
            world.auditor.call_ended(call)


class CrowdAudit(RunLog):
    """Judges every step of a `CrowdWorld`."""

    def __init__(self, world: CrowdWorld) -> None:
        super().__init__(world.now)
        self._world = world
        self.probes: dict[str, Probe] = {}
        """Probes that are not written yet."""
        self._calls: list[CrowdCall] = []
        self._levels: dict[str, Level] = {}
        """The level at which each key was granted last, unless that ended."""
        self._granted_at: dict[int, float] = {}
        """When each claim was granted, by its token."""
        self._hits: Counter[str] = Counter()
        """Deaths of workers that held a key."""
        self._alone_deaths: Counter[str] = Counter()
        """Deaths of workers that ran nothing but this key, since its last commit."""
        self._kills: dict[str, Counter[tuple[int, bool]]] = defaultdict(Counter)
        """How often each version of a key, or its repair, has killed, since a version of it became a dead letter."""
        self._windows: dict[str, Window] = {}
        self._begun: set[str] = set()
        """Processes in which something has begun since they last drained."""
        self._drained_since: dict[str, float] = {}
        self._drained_for: dict[str, int] = {}
        """The token of the claim for which each process drained last."""
        self._works_until: dict[str, float] = {}
        """Until when each process has to work that could not run a change alone."""

    # The ledger.

    def asked(self, process: Process, terms: LeaseTerms) -> None:
        """Asked to run alone: what waits in the process must have had a chance since it drained last."""
        if terms.level is Level.ALONE and self._world.now() < self._works_until.get(process.name, 0.0):
            self.violate(f"{process.name} drains once more, and has not worked for as long as it drained")
        is_again = process.name in self._drained_since and process.name not in self._begun
        lanes = self._lanes(process) if terms.level is Level.ALONE and is_again else None
        if lanes is not None and lanes.has_waiting(self._world.now()):
            self.violate(f"{process.name} drains once more, and nothing has begun in between")

    def granted(self, process: Process, claim: Claim, terms: LeaseTerms) -> None:
        key, window = claim.key, self._window(process)
        if claim.level > terms.level:
            self.violate(f"{key} is granted at level {claim.level}, but {process.name} asked for {terms.level}")
        if claim.level < self._levels.get(key, Level.USUAL):
            self.violate(f"{key} fell from level {self._levels[key]} to {claim.level}")
        if claim.crashes > self._alone_deaths[key]:
            self.violate(f"{key} is blamed for {claim.crashes} crashes, and killed {self._alone_deaths[key]} alone")
        self._levels[key] = claim.level
        self._granted_at[claim.token] = self._world.now()
        if claim.took_over and claim.level > Level.PROBATION:
            window.limit, window.clean = 1, 0
        if claim.level is Level.ALONE and _drains(claim):
            self._drained_since[process.name] = self._world.now()
            self._drained_for[process.name] = claim.token
            self._begun.discard(process.name)

    def released(self, process: Process, claim: Claim) -> None:
        """Released at the highest level before it began, beside calls that run: other keys have waited for nothing."""
        entry, now = self._world.entry(claim.key), self._world.now()
        is_unused = entry.token == claim.token and entry.phase is Phase.CLAIMED
        is_drained_for = self._drained_for.get(process.name) == claim.token
        if claim.level is Level.ALONE and not is_drained_for and now > self._granted_at[claim.token]:
            self.violate(f"{process.name} lets everything wait for {claim.key}, which may not run")
        if is_drained_for and is_unused and any(call.process is process for call in self._calls):
            self._works_until[process.name] = now + (now - self._drained_since.get(process.name, now)) - TICK_S

    def check_window(self, process: Process, granted: Sequence[Claim]) -> None:
        """After a claim: as many changes on probation as the last deaths allow, besides those that run for long."""
        outlasted = {call.claim.key for call in self._calls if call.process is process and self._is_long(call)}
        held = [
            key for key, entry in self._world.held_by(process) if entry.deaths in ON_PROBATION and key not in outlasted
        ]
        limit = self._window(process).limit
        if len(held) > limit and any(claim.level in ON_PROBATION for claim in granted):
            self.violate(f"{process.name} has {len(held)} changes on probation, and {limit} are allowed after a death")

    def ended(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._world.entry(key).deaths is Level.USUAL:
                self._levels.pop(key, None)
                self._alone_deaths.pop(key, None)
            if self._world.entry(key).mark is not None:
                self.probes.pop(key, None)

    def dead(self, claim: Claim, cause: str) -> None:
        """A change becomes a dead letter: only one that kills, or that was hit again and again."""
        is_killer = claim.key.startswith("killer")
        self._kills.pop(claim.key, None)
        if not is_killer and self._hits[claim.key] < 1 + SETTINGS.crashes_max:
            self.violate(f"{claim.key} is a dead letter after {self._hits[claim.key]} deaths: {cause}")

    # The handler.

    def call_started(self, process: Process, claim: Claim) -> CrowdCall:
        entry = self._world.entry(claim.key)
        if claim.level is not Level.USUAL and entry.token == claim.token and entry.phase is Phase.CLAIMED:
            self.violate(f"{claim.key} runs on probation, and its beginning is not noted")
        beside = [call for call in self._calls if call.process is process]
        if claim.level is Level.ALONE and beside:
            self.violate(f"{claim.key} does not run alone")
        for call in beside:
            other = self._world.entry(call.claim.key)
            if call.claim.level is Level.ALONE and other.token == call.claim.token and other.phase is Phase.BEGUN:
                self.violate(f"{claim.key} begins beside {call.claim.key}, which has to run alone")
        on_probation = [
            call.claim.level for call in beside if call.claim.level in ON_PROBATION and not self._is_long(call)
        ]
        if claim.level in ON_PROBATION and on_probation and Level.SOLE in (claim.level, *on_probation):
            self.violate(f"{claim.key} is not the only one on probation")
        if claim.level is not Level.ALONE:
            self._begun.add(process.name)
        call = CrowdCall(process, claim, self._world.now())
        self._calls.append(call)
        return call

    def _is_long(self, call: CrowdCall) -> bool:
        """Whether a call has run for a lease, so that others on probation need not wait for it any more."""
        return self._world.now() - call.started_at > LEASE_S - TICK_S

    def call_ended(self, call: CrowdCall) -> None:
        if call in self._calls:
            self._calls.remove(call)
        if call.claim.level in ON_PROBATION and not call.process.is_dead:
            self._window(call.process).ended()

    def kills(self, plan: SentPlan, *, is_repair: bool) -> None:
        times = self._kills[plan.key]
        times[plan.version, is_repair] += 1
        if times[plan.version, is_repair] > Level.ALONE + SETTINGS.crashes_max + LATE_DEATHS_MAX:
            what = "the repair of " if is_repair else ""
            self.violate(f"{what}{plan.key} v{plan.version} kills one worker after another")

    def process_fell(self, process: Process) -> None:
        running = [call for call in self._calls if call.process is process]
        self._calls = [call for call in self._calls if call.process is not process]
        for key, _ in self._world.held_by(process):
            self._hits[key] += 1
        if len(running) == 1:
            self._alone_deaths[running[0].claim.key] += 1
        lanes = self._lanes(process)
        for ticket in lanes.tickets() if lanes is not None else ():
            if ticket.change.key in self.probes:
                self.probes[ticket.change.key].is_excused = True

    # Time.

    def tick(self) -> None:
        """Only a process that holds a change at the highest level may let other keys wait, and only for so long."""
        draining = set[Process]()
        for process in self._world.workers:
            for key, entry in self._world.held_by(process):
                is_drained_for = self._drained_for.get(process.name) == entry.token
                if is_drained_for and entry.phase is not Phase.ACCOMPANIED:
                    draining.add(process)
                    self._check_time_alone(process, key, entry)
        draining |= self._world.stopped_at.keys()  # It gives back what waits when its last call has ended.
        excused = {ticket.change.key for process in draining for ticket in self._tickets(process)}
        has_worker = any(process not in draining for process in self._world.workers)
        received = {ticket.change.key for process in self._world.workers for ticket in self._tickets(process)}
        for probe in list(self.probes.values()):
            is_waited_for = probe.key in received - excused or (probe.key not in received and has_worker)
            probe.waited_s += TICK_S if is_waited_for else 0.0
            if probe.waited_s > PATIENCE_S and not probe.is_excused:
                self.violate(f"{probe.key} waits for {probe.waited_s} s, and no worker that held it has died")
                probe.is_excused = True

    def _check_time_alone(self, process: Process, key: str, entry: Entry) -> None:
        alone_s = min(LEASE_S * 2**entry.late_deaths, SETTINGS.runtime_max_s)
        held_s = self._world.now() - self._drained_since.get(process.name, self._world.now())
        if held_s > LEASE_S + alone_s + 2.0 and not process.is_dead and process not in self._world.stopped_at:
            self.violate(f"{process.name} lets everything wait for {key} for {held_s} s")

    def check_end(self) -> None:
        world = self._world
        if world.queue:
            self.violate(f"not drained: {len(world.queue)} messages")
        newest = {key: max(version for one, version in world.plans if one == key) for key, _ in world.plans}
        stored = {key: held.order[1] for key, held in world.sink.stored.items()}
        letters = {letter.key for _, letter in world.database.scope("sim").letters.values()}
        for key, version in newest.items():
            if stored.get(key) != version and key not in letters:
                self.violate(f"{key} ends as {stored.get(key)}, the truth is {version}")

    def _window(self, process: Process) -> "Window":
        return self._windows.setdefault(process.name, Window())

    def _lanes(self, process: Process) -> Lanes | None:
        consumer = self._world.workers.get(process)
        return consumer._lanes if consumer is not None else None

    def _tickets(self, process: Process) -> Sequence[Any]:
        lanes = self._lanes(process)
        return lanes.tickets() if lanes is not None else ()


def _drains(claim: Claim) -> bool:
    """Whether user code will run under this claim. A change or repair that may not run only ends its claim."""
    is_repair = claim.order is None
    return claim.crashes < SETTINGS.crashes_max and not (is_repair and (claim.took_over or claim.suspicions == 0))


class Window(msgspec.Struct):
    """How many changes on probation a process may run, counted without asking it."""

    limit: int = 1
    clean: int = 0

    def ended(self) -> None:
        self.clean += 1
        if self.clean >= self.limit:
            self.limit, self.clean = min(2 * self.limit, SETTINGS.concurrency), 0
