"""The ledger, the queue and the sinks of simulated object ingest, as one process sees them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, ChangeHeader, Outcome
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Advance, Certainty, Claim, Commit, LeaseTerms
from keywise.core.errors import PermanentError, TransientError, UnavailableError
from keywise.core.ledger import ClaimResults, Failure
from keywise.core.record import Record
from keywise.core.sink import APPLIED, SUPERSEDED, Grade, SinkResult
from keywise.core.transaction import Transaction
from keywise.ingest.object_note import ObjectNote
from keywise.testing.lossy_link import Linked, LossyLink, Session
from keywise.testing.virtual_loop import outside

if TYPE_CHECKING:
    from keywise.testing.simulator.objects.world import ObjectsWorld

IDLE_S = 5.0
"""The server ends a transaction in which nothing has happened for this long."""
SINK_BATCH_MAX = 7


class ObjectsQueue(Linked[MemorySource], over=MemorySource):
    """The queue of notifications."""

    database = None

    def __init__(self, link: LossyLink, source: MemorySource) -> None:
        super().__init__(link, source)
        self.visibility_s = source.visibility_s


class ObjectsLedger(Linked[MemoryLedger], over=MemoryLedger):
    """The ledger, watched by the auditor. A worker may be killed whenever it comes to a new position."""

    def __init__(self, link: LossyLink, world: "ObjectsWorld") -> None:
        super().__init__(link, MemoryLedger(world.database, "sim", world.policy))
        self.database = world.database
        self._world = world

    async def controls(self) -> Controls:
        return await self._server.controls()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async def act() -> ClaimResults:
            results = await self._server.claim(headers, terms)
            for claim in results.granted:
                self._world.auditor.granted(claim)
            for header in headers:
                if header.key in results.refused:
                    self._world.auditor.refused(header, results.refused[header.key])
            return results

        return await self._link.call(act)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._server.advance(advances)
            for one in advances:
                self._world.auditor.advanced(one, is_accepted=one.claim not in refused, is_once=False)
            return refused

        if self._world.faults.happens("late duplicate", self._world.late_rate):
            outside(self._world.loop, self._advance_late(advances))
        refused = await self._link.call(act)
        await self._perhaps_die(one for one in advances if one.claim not in refused)
        return refused

    async def _advance_late(self, advances: Sequence[Advance]) -> None:
        """A call that was given up and repeated arrives all the same, when its holder has gone on."""
        await asyncio.sleep(self._world.rng.uniform(0.0, 15.0))
        for one in advances:
            refused = await self._server.advance([one])
            self._world.auditor.advanced(one, is_accepted=not refused, is_once=False)

    async def _perhaps_die(self, advances: Iterable[Advance]) -> None:
        if self._world.faults.is_over:
            return
        for one in advances:
            before = one.claim.position.place if one.claim.position is not None else 0
            read = ObjectNote.decode(one.position.note).read
            content = self._world.store.contents.get(read.etag) if read is not None else None
            if content is not None and content.dies_at_each_part and one.position.place > before:
                await self._world.die(self._link.process)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._server.commit(commits)
            for one in commits:
                if one.claim not in refused:
                    self._world.auditor.committed(one)
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
                    self._world.auditor.dead_lettered(request.claim, request.letter)
                    self._world.heal(request.letter)
            return lost

        return await self._link.call(act)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        session = Session(database=self.database)
        transaction = ObjectsTransaction(self._server, self._world, session)
        session.on_commit = transaction.report
        async with self._link.transaction(session):
            self._world.loop.call_later(IDLE_S, session.end, context=self._world.outside)
            yield transaction
        await self._perhaps_die(transaction.advances)


class ObjectsTransaction(MemoryTransaction):
    """A transaction with the records of some portions. The auditor sees it when it is committed."""

    def __init__(self, ledger: MemoryLedger, world: "ObjectsWorld", session: Session) -> None:
        super().__init__(ledger)
        self._world = world
        self._session = session
        self.advances: list[Advance] = []
        self._commits: list[Commit] = []
        self.writes: list[Record[Any]] = []

    async def hop(self) -> None:
        """A moment in which the process can be stopped; meanwhile the server may have ended the transaction."""
        await asyncio.sleep(self._world.rng.uniform(0.0, 0.01))
        if not self._session.is_open:
            raise UnavailableError("the connection was lost")

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        await self.hop()
        refused = await super().advance(advances)
        self.advances += [one for one in advances if one.claim not in refused]
        return refused

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        await self.hop()
        refused = await super().commit(commits)
        self._commits += [one for one in commits if one.claim not in refused]
        return refused

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        await self.hop()
        await super().dead_letter(letters)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        await self.hop()
        kept = len(self.writes)
        try:
            async with super().savepoint():
                yield
        except UnavailableError:
            raise
        except BaseException:
            del self.writes[kept:]
            raise

    def report(self) -> None:
        """The transaction is committed."""
        auditor = self._world.auditor
        claims = [*(one.claim for one in self.advances), *(one.claim for one in self._commits)]
        tokens = {claim.key: claim.token for claim in claims}
        for record in self.writes:
            auditor.applied_once(tokens.get(record.object, 0), record)
        for advance in self.advances:
            auditor.advanced(advance, is_accepted=True, is_once=True)
        for commit in self._commits:
            auditor.committed(commit)


class TransactionSink:
    """An atomic sink that does not find the records of an object by itself, as a handler does not."""

    grade = Grade.ATOMIC
    runs_user_code = True
    batch_max = SINK_BATCH_MAX

    def __init__(self, world: "ObjectsWorld", link: LossyLink) -> None:
        self.database = world.database
        self._world = world
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        assert isinstance(transaction, ObjectsTransaction), "this world has no other transactions"
        world = self._world
        for record in changes:
            assert isinstance(record, Record), "objects consist of records"
            await transaction.hop()
            await world.meet_killer(self._link.process, record)
            if (fault := world.fault_of(record, counts=len(changes) == 1)) is not None:
                raise (PermanentError if fault.permanent else TransientError)(fault.cause)
            held = None if record.deleted else (record.order, record.deleted, record.body)
            world.database.set(world.records, (record.object, record.ordinal), held)
            transaction.writes.append(record)


class SimulatedTable(TransactionSink):
    """An atomic sink that finds the records of an object."""

    runs_user_code = False
    columns: Sequence[str] = ()

    async def delete_tails(self, transaction: Transaction, tails: Sequence[tuple[str, int]], limit: int) -> int:
        assert isinstance(transaction, ObjectsTransaction), "this world has no other transactions"
        await transaction.hop()
        firsts, records = dict(tails), self._world.records
        found = [place for place in records if place[0] in firsts and place[1] >= firsts[place[0]]]
        for place in found[:limit]:
            self._world.database.set(records, place, None)
        return len(found[:limit])


class CalledSink:
    """A plain or conditional sink behind a lossy link."""

    forgets_deletions = False
    batch_max = SINK_BATCH_MAX

    def __init__(self, world: "ObjectsWorld", link: LossyLink) -> None:
        self.grade = world.grade
        self._world = world
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        records = [change for change in changes if isinstance(change, Record)]
        assert len(records) == len(changes), "objects consist of records"
        for record in records:
            await self._world.meet_killer(self._link.process, record)
        self._world.auditor.issued(records, claims)
        return await self._link.call(lambda: self._serve(records))

    async def _serve(self, records: Sequence[Record[Any]]) -> list[SinkResult]:
        return [self._write(record) for record in records]

    def _write(self, record: Record[Any]) -> SinkResult:
        """Write one record; a conditional sink refuses a lower order."""
        world = self._world
        if (fault := world.fault_of(record, counts=True)) is not None:
            return fault
        place = (record.object, record.ordinal)
        held = world.records.get(place)
        if world.grade is Grade.CONDITIONAL and held is not None and held[0] >= record.order:
            return APPLIED if held[0] == record.order else SUPERSEDED
        world.records[place] = (record.order, record.deleted, record.body)
        return APPLIED


REFUSED = SinkResult(Outcome.FAILED, "a record that the sink never takes", permanent=True)
FLAKY = SinkResult(Outcome.FAILED, "a record that fails at first")
FLAKY_AT_END = SinkResult(Outcome.FAILED, "a record that fails at first", certainty=Certainty.ENDED)
POISONED = SinkResult(Outcome.FAILED, "a record that fails until it is healed")
