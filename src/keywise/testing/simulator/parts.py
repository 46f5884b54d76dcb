"""A simulated run in which objects are written in parts, and every worker may die, stop or be cut off between two."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, ChangeHeader, Order, Outcome, order_of
from keywise.core.controls import PLAIN, Controls
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import EMPTY, Advance, Certainty, Claim, Commit, Entry, LeaseTerms, LedgerPolicy, Position
from keywise.core.errors import UnavailableError
from keywise.core.ledger import ClaimResults, Failure
from keywise.core.settings import Settings
from keywise.core.sink import APPLIED, Grade, SinkResult
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.fault_injector import FaultInjector, draw_rate
from keywise.testing.lossy_link import Linked, LossyLink, Session
from keywise.testing.run_log import RunLog
from keywise.testing.simulated_world import ConsumerWorld
from keywise.testing.virtual_loop import Process, outside

FAULTS_S = 120.0
REST_MAX_S = 6000.0
DEATHS_MAX = 30
"""A change with which more workers died at one place should be a dead letter by then."""
IDLE_S = 5.0
"""The server ends a transaction in which nothing has happened for this long."""
SETTINGS = Settings(
    lease_s=10.0,
    margin_s=1.0,
    runtime_max_s=25.0,
    horizon_s=12.0,
    repair_s=4.0,
    concurrency=4,
    prefetch=40,
    batch_max=10,
    attempts_max=4,
    crashes_max=2,
    backoff_s=0.2,
    backoff_max_s=2.0,
    poll_s=1.0,
    drain_s=30.0,
    redelivery_s=300.0,
)


class ObjectPlan(msgspec.Struct):
    """One version of an object, and what happens to those who write it."""

    key: str
    version: int
    parts: int
    part_s: float
    dies_after_each: bool = False
    """The worker is killed after each part."""
    failures_left: dict[int, int] = {}
    """How often a part fails before it can be written: not so often that the change becomes a dead letter."""
    bad_part: int | None = None
    """This part fails until the change has become a dead letter."""
    bad_part_kills: bool = False
    is_healed: bool = False

    @property
    def order(self) -> Order:
        return order_of(self.version)


class PartsWorld(ConsumerWorld):
    """A few workers and objects of up to ten parts, each of which takes up to some seconds."""

    processes = (2, 3)
    restart_max_s = 2.0
    faults_s = FAULTS_S
    rest_max_s = REST_MAX_S
    auditor: "PartsAudit"

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"parts {grade.value} {seed}")
        rng = self.rng
        self.grade = grade
        self.faults = FaultInjector(rng)
        self.faults.lost_rate, self.faults.slow_rate = draw_rate(rng, 0.1), draw_rate(rng, 0.06)
        self.faults.pause_rate, self.faults.crash_rate = draw_rate(rng, 0.06), draw_rate(rng, 0.03)
        self._stop_rate = draw_rate(rng, 0.02)
        self.late_rate = draw_rate(rng, 0.2)
        self.database = MemoryDatabase(clock=self.store_now, rng=random.Random(rng.random()))
        self.source = MemorySource(MemoryDatabase(clock=self.now), "queue", visibility_s=20.0)
        self.queue = self.source.database.queue("queue")
        self.policy = LedgerPolicy(intents=grade is Grade.PLAIN, redelivery_s=SETTINGS.redelivery_s)
        self.records: dict[tuple[str, int], tuple[Order, bool]] = self.database.table("records")
        """By key and ordinal of the part, what the sink holds: the order, and whether it is a deletion."""
        self.plans: dict[tuple[str, Order], ObjectPlan] = {}
        self.auditor = PartsAudit(self)
        self._replays = 0
        """How many dead letters are about to be replayed."""

    def entry(self, key: str) -> Entry:
        return self.database.scope("sim").entries.get(key, EMPTY)

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._send_object(f"object-{number}") for number in range(self.rng.randint(2, 5))]

    def disturb(self) -> None:
        self.disturb_processes("stop", self._stop_rate, self.stop)

    def is_at_rest(self) -> bool:
        return not self.queue and not self._replays

    async def check_end(self) -> None:
        self.auditor.check_end()

    async def _send_object(self, key: str) -> None:
        """Send some versions of an object, and perhaps an older one again."""
        rng = self.rng
        for version in range(1, 1 + rng.randint(1, 3)):
            parts = rng.choice((1, 2, 5, rng.randint(3, 10)))
            plan = ObjectPlan(key, version, parts, rng.uniform(0.1, rng.choice((0.5, 4.0))))
            plan.dies_after_each = rng.random() < 0.25
            if rng.random() < 0.15:
                plan.failures_left = dict.fromkeys(range(min(parts, 3)), SETTINGS.attempts_max - 1)
            if rng.random() < 0.25:
                plan.bad_part, plan.bad_part_kills = rng.randrange(parts), rng.random() < 0.5
            self.plans[key, plan.order] = plan
            await self.send(plan)
            await asyncio.sleep(rng.uniform(0.0, rng.choice((2.0, 60.0))))
            if rng.random() < 0.3:
                await self.send(rng.choice([one for one in self.plans.values() if one.key == key]))

    async def send(self, plan: ObjectPlan) -> None:
        await self.source.send([json.dumps({"id": plan.key, "v": plan.version}).encode()])

    def heal(self, claim: Claim) -> None:
        """A change has become a dead letter: what made it fail is repaired, and the letter is replayed."""
        assert claim.order is not None, "only a change becomes a dead letter here"
        plan = self.plans[claim.key, claim.order]
        plan.is_healed = True
        self._replays += 1
        outside(self.loop, self._replay(plan))

    async def _replay(self, plan: ObjectPlan) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 20.0))
        await self.send(plan)
        self._replays -= 1

    # Processes.

    def pipeline(self, process: Process) -> OpenPipeline:
        link = LossyLink(self, process)
        ledger: Any = PartsLedger(link, self)
        return OpenPipeline(
            name="sim",
            sources=[("queue", self.source)],
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=PartsSink(self, link, ledger),
            reader=MessageReader(FieldRoute(Fields("id", "v", {})), body_max_bytes=1000),
            settings=SETTINGS,
            owner=process.name,
            clock=self.now,
            wall=self.store_now,
            rng=random.Random(self.rng.random()),
        )

    def advanced(self, process: Process, advance: Advance) -> Claim:
        """Note in a process what the ledger has accepted; return the claim as it goes on."""
        if (consumer := self.workers.get(process)) is not None:
            consumer._heartbeat.advanced([advance])
        return advance.claim_after


class PartsLedger(Linked[MemoryLedger], over=MemoryLedger):
    """The ledger as one process sees it, watched by the auditor."""

    def __init__(self, link: LossyLink, world: PartsWorld) -> None:
        super().__init__(link, MemoryLedger(world.database, "sim", world.policy))
        self.database = world.database
        self._world = world

    async def controls(self) -> Controls:
        return PLAIN

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async def act() -> ClaimResults:
            results = await self._server.claim(headers, terms)
            for claim in results.granted:
                self._world.auditor.granted(claim)
            return results

        return await self._link.call(act)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._server.advance(advances)
            for one in advances:
                self._world.auditor.advanced(one, is_accepted=one.claim not in refused, is_once=False)
            return refused

        return await self._link.call(act)

    async def advance_late(self, advance: Advance) -> None:
        """A call that was given up and repeated arrives all the same, when its holder has gone on."""
        await asyncio.sleep(self._world.rng.uniform(0.0, 15.0))
        refused = await self._server.advance([advance])
        self._world.auditor.advanced(advance, is_accepted=not refused, is_once=False)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """Outside of a transaction, a commit says how many parts the object has: those behind them are deleted."""
        if self._world.grade is not Grade.ATOMIC:
            commits = [replace(one, extent=self._world.auditor.plan(one.claim).parts) for one in commits]

        async def act() -> list[Claim]:
            refused = await self._server.commit(commits)
            for one in commits:
                if one.claim not in refused:
                    self._world.auditor.committed(one.claim)
            return refused

        return await self._link.call(act)

    async def fail(self, failures: Sequence[Failure]) -> None:
        async def act() -> None:
            await self._server.fail(failures)
            self._world.auditor.failed(failures)

        await self._link.call(act)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async def act() -> list[Claim]:
            lost = await self._server.dead_letter(requests)
            for request in requests:
                if request.claim is not None and request.claim not in lost:
                    self._world.auditor.dead_lettered(request.claim, request.letter.cause)
                    self._world.heal(request.claim)
            return lost

        return await self._link.call(act)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator["PartTransaction"]:
        session = Session(database=self.database)
        transaction = PartTransaction(self._server, self._world, session)
        session.on_commit = transaction.report
        async with self._link.transaction(session):
            self._world.loop.call_later(IDLE_S, session.end, context=self._world.outside)
            yield transaction


class PartTransaction(MemoryTransaction):
    """A transaction with the effect of one part. The auditor sees it when it is committed."""

    def __init__(self, ledger: MemoryLedger, world: PartsWorld, session: Session) -> None:
        super().__init__(ledger)
        self._world = world
        self._session = session
        self._advances: list[Advance] = []
        self._commits: list[Claim] = []
        self._writes: list[tuple[Claim, int]] = []

    async def write(self, claim: Claim, part: int) -> None:
        await self._hop()
        assert claim.order is not None, "only a change is written"
        self._world.database.set(self._world.records, (claim.key, part), (claim.order, False))
        self._writes.append((claim, part))

    async def delete_behind(self, claim: Claim, parts: int) -> None:
        await self._hop()
        for key, part in [*self._world.records]:
            if key == claim.key and part >= parts:
                self._world.database.set(self._world.records, (key, part), None)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        await self._hop()
        refused = await super().advance(advances)
        self._advances += [one for one in advances if one.claim not in refused]
        return refused

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        await self._hop()
        refused = await super().commit(commits)
        self._commits += [commit.claim for commit in commits if commit.claim not in refused]
        return refused

    def report(self) -> None:
        """The transaction is committed."""
        auditor = self._world.auditor
        for claim, part in self._writes:
            auditor.applied_once(claim, part)
        for one in self._advances:
            auditor.advanced(one, is_accepted=True, is_once=True)
        for claim in self._commits:
            auditor.committed(claim)

    async def _hop(self) -> None:
        """A moment in which the process can be stopped; meanwhile the server may have ended the transaction."""
        await asyncio.sleep(self._world.rng.uniform(0.0, 0.01))
        if not self._session.is_open:
            raise UnavailableError("the connection was lost")


class PartsSink:
    """Writes an object part by part, and keeps the position between two, as one process does."""

    forgets_deletions = False
    batch_max = 1

    def __init__(self, world: PartsWorld, link: LossyLink, ledger: PartsLedger) -> None:
        self._world = world
        self._link = link
        self._ledger = ledger
        # Parts that are written in transactions of the ledger need a claim, but no transaction around all of them.
        self.grade = Grade.PLAIN if world.grade is Grade.PLAIN else Grade.CONDITIONAL

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        [claim] = claims
        try:
            return [await (self._in_transactions if self._world.grade is Grade.ATOMIC else self._in_calls)(claim)]
        except _PartRefusedError:
            return [SinkResult(Outcome.FAILED, "the claim is lost, or the part is done", certainty=Certainty.UNKNOWN)]
        except UnavailableError as error:
            return [SinkResult(Outcome.FAILED, str(error), certainty=Certainty.UNKNOWN)]

    async def _in_calls(self, claim: Claim) -> SinkResult:
        """Reserve each part, write it, and keep the position; delete what lies behind the last part."""
        plan, start = self._world.auditor.plan(claim), _place(claim)
        claim = await self._advance(Advance(claim, Position(start), start + 1))
        for part in range(start, plan.parts):
            if (result := await self._meet_fate(plan, part, start)) is not None:
                return result
            self._world.auditor.issued(claim, part)
            await self._link.call(lambda: self._write(claim, part, deleted=False))  # noqa: B023 - it is awaited here
            if part + 1 < plan.parts:
                claim = await self._advance(Advance(claim, Position(part + 1, _note(part)), part + 2))
                await self._perhaps_die(plan)
        for part in range(plan.parts, claim.extent):
            await self._link.call(lambda: self._write(claim, part, deleted=True))  # noqa: B023 - it is awaited here
        return APPLIED

    async def _in_transactions(self, claim: Claim) -> SinkResult:
        """Write each part together with the position, and the last one together with the mark."""
        plan, start = self._world.auditor.plan(claim), _place(claim)
        for part in range(start, plan.parts):
            if (result := await self._meet_fate(plan, part, start)) is not None:
                return result
            one = Advance(claim, Position(part + 1, _note(part))) if part + 1 < plan.parts else None
            try:
                await self._transact(claim, part, plan, one)
            except UnavailableError:
                # The transaction may have been committed. If so, the repetition is refused.
                await self._transact(claim, part, plan, one)
            if one is not None:
                claim = self._world.advanced(self._link.process, one)
                await self._perhaps_die(plan)
        return APPLIED

    async def _transact(self, claim: Claim, part: int, plan: ObjectPlan, one: Advance | None) -> None:
        async with self._ledger.transaction() as transaction:
            await transaction.write(claim, part)
            if one is None:
                await transaction.delete_behind(claim, plan.parts)
            if await (transaction.commit([Commit(claim)]) if one is None else transaction.advance([one])):
                raise _PartRefusedError

    async def _advance(self, one: Advance) -> Claim:
        """Keep a position; after a lost answer, do it again."""
        while True:
            if self._world.faults.happens("late duplicate", self._world.late_rate):
                outside(self._world.loop, self._ledger.advance_late(one))
            try:
                refused = await self._ledger.advance([one])
            except UnavailableError:
                continue
            if refused:
                raise _PartRefusedError
            return self._world.advanced(self._link.process, one)

    async def _write(self, claim: Claim, part: int, *, deleted: bool) -> None:
        """The sink's side of a write: a conditional sink refuses a lower order."""
        world = self._world
        assert claim.order is not None, "only a change is written"
        held = world.records.get((claim.key, part))
        if world.grade is Grade.PLAIN or held is None or claim.order >= held[0]:
            world.database.set(world.records, (claim.key, part), (claim.order, deleted))

    async def _meet_fate(self, plan: ObjectPlan, part: int, start: int) -> SinkResult | None:
        """Read a part; it may fail, or kill the process. A process that drains stops before the next part."""
        world, process = self._world, self._link.process
        if part > start and process in world.stopped_at:
            return SinkResult(Outcome.BUSY, "draining")
        await asyncio.sleep(plan.part_s)
        if plan.failures_left.get(part):
            plan.failures_left[part] -= 1
            return SinkResult(Outcome.FAILED, "a part that fails at first")
        if part == plan.bad_part and not plan.is_healed:
            if plan.bad_part_kills:
                await world.die(process)
            return SinkResult(Outcome.FAILED, "a bad part")
        return None

    async def _perhaps_die(self, plan: ObjectPlan) -> None:
        if plan.dies_after_each:
            await self._world.die(self._link.process)


class _PartRefusedError(Exception):
    """The ledger has refused a position or a commit: the transaction is rolled back, and the holder stops."""


def _place(claim: Claim) -> int:
    return claim.position.place if claim.position is not None else 0


def _note(part: int) -> bytes:
    return f"after part {part}".encode()


class KnownProgress(msgspec.Struct):
    """What the auditor knows of one key."""

    reached: tuple[Order, int] | None = None
    """The order that was under way last, and the place that it must resume at."""
    token: int = 0
    """The token of the last grant."""
    deaths: int = 0
    """How many claims were taken over since the last progress or end."""
    failures: int = 0
    run: int = 0
    """How often an order started at the beginning."""
    was_suspect: bool = False


class PartsAudit(RunLog):
    """Judges every step of a `PartsWorld` by a book of its own."""

    def __init__(self, world: PartsWorld) -> None:
        super().__init__(world.now)
        self._world = world
        self._known: dict[str, KnownProgress] = {}
        self._run_of: dict[int, tuple[str, int]] = {}
        """By token, the key and the run that a claim belongs to."""
        self._claims: Counter[tuple[str, int]] = Counter()
        """How many claims each run had."""
        self._issued: dict[tuple[str, int], Counter[int]] = {}
        """How often each part was written in a run."""
        self._applied: Counter[tuple[str, int, int]] = Counter()

    def plan(self, claim: Claim) -> ObjectPlan:
        assert claim.order is not None, "only a change has a plan"
        return self._world.plans[claim.key, claim.order]

    def known(self, key: str) -> KnownProgress:
        return self._known.setdefault(key, KnownProgress())

    def granted(self, claim: Claim) -> None:
        known = self.known(claim.key)
        self.note(f"{claim.key} {claim.order} is granted at {claim.position}, extent {claim.extent}")
        if claim.order is None:
            return
        resumes = known.reached is not None and known.reached[0] == claim.order
        place = known.reached[1] if known.reached is not None and resumes else None
        if (claim.position.place if claim.position is not None else None) != place:
            self.violate(f"{claim.key} {claim.order} is granted at {claim.position}, and has come to {place}")
        if claim.token == known.token:
            self.violate(f"{claim.key} is granted under the token of the last holder")
        known.deaths += claim.took_over
        known.token = claim.token
        known.was_suspect |= self._world.entry(claim.key).suspicions > 0
        if claim.crashes > known.deaths or claim.level > known.deaths:
            self.violate(
                f"{claim.key} is blamed for {claim.crashes} crashes at level {claim.level}, not {known.deaths}"
            )
        if claim.attempts > known.failures:
            self.violate(f"{claim.key} is blamed for {claim.attempts} attempts, and {known.failures} have failed")
        if known.deaths > DEATHS_MAX:
            self.violate(f"{known.deaths} workers died with {claim.key}, and it is no dead letter")
        if not resumes:
            known.reached, known.run = None, known.run + 1
        self._run_of[claim.token] = (claim.key, known.run)
        self._claims[claim.key, known.run] += 1

    def advanced(self, advance: Advance, *, is_accepted: bool, is_once: bool) -> None:
        claim, place, known = advance.claim, advance.position.place, self.known(advance.claim.key)
        kept = known.reached[1] if known.reached is not None else -1
        self.note(f"{claim.key} {claim.order} comes to {place}: {'kept' if is_accepted else 'refused'}")
        if not is_accepted:
            entry = self._world.entry(claim.key)
            if entry.token == claim.token == known.token and not entry.abandoned and place > kept:
                self.violate(f"{claim.key} may not come to {place}, and nobody else holds it")
            return
        if claim.token != known.token:
            self.violate(f"an old token brings {claim.key} to {place}")
            return
        if place < kept or (is_once and place == kept):
            self.violate(f"{claim.key} comes from {kept} to {place}")
        assert claim.order is not None, "only a change has positions"
        known.reached = (claim.order, place)
        if place > max(kept, 0):
            known.deaths = known.failures = 0

    def committed(self, claim: Claim) -> None:
        known = self.known(claim.key)
        self.note(f"{claim.key} {claim.order} is committed")
        entry = self._world.entry(claim.key)
        if entry.advanced is not None and claim.order is not None and entry.advanced <= claim.order:
            self.violate(f"{claim.key} {claim.order} is committed, and keeps the position of {entry.advanced}")
        if claim.token == known.token:
            known.reached, known.deaths, known.failures = None, 0, 0

    def failed(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self.known(failure.claim.key).failures += failure.counts_attempt

    def dead_lettered(self, claim: Claim, cause: str) -> None:
        known, plan = self.known(claim.key), self.plan(claim)
        self.note(f"{claim.key} {claim.order} is a dead letter: {cause}")
        has_died, has_failed = known.deaths >= SETTINGS.crashes_max, known.failures >= SETTINGS.attempts_max - 1
        if plan.bad_part is None and not has_died and not has_failed:
            self.violate(
                f"{claim.key} is a dead letter ({cause}) after {known.deaths} deaths, {known.failures} failures"
            )
        known.deaths = known.failures = 0

    def issued(self, claim: Claim, part: int) -> None:
        """A part is about to be written outside of a transaction: at most one per claim was written before."""
        run = self._run_of[claim.token]
        written = self._issued.setdefault(run, Counter())
        written[part] += 1
        repeated = written.total() - len(written)
        if repeated > self._claims[run] - 1:
            self.violate(f"{claim.key}: {repeated} parts are repeated by {self._claims[run]} claims")

    def applied_once(self, claim: Claim, part: int) -> None:
        run = self._run_of[claim.token]
        self._applied[*run, part] += 1
        if self._applied[*run, part] > 1:
            self.violate(f"part {part} of {claim.key} {claim.order} is applied {self._applied[*run, part]} times")

    def check_end(self) -> None:
        world = self._world
        if world.queue:
            self.violate(f"not drained: {len(world.queue)} messages")
        for key in {key for key, _ in world.plans}:
            newest = max((plan for plan in world.plans.values() if plan.key == key), key=lambda plan: plan.version)
            entry = world.entry(key)
            if entry.mark != newest.order:
                self.violate(f"{key} ends at {entry.mark}, the truth is {newest.order}")
            held = {
                part: order for (one, part), (order, deleted) in world.records.items() if one == key and not deleted
            }
            is_excused = world.grade is Grade.PLAIN and (entry.suspicions > 0 or self.known(key).was_suspect)
            if held != dict.fromkeys(range(newest.parts), newest.order) and not is_excused:
                self.violate(f"{key} ends as {held}, the truth is {newest.parts} parts of {newest.order}")
