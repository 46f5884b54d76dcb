"""The simulated network between processes and servers: calls are slow, get lost, or take effect without an answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader, Delivery
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim, Entry, LeaseTerms, Phase, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.ledger import ClaimResults, Commit, Failure
from keywise.core.source import TransactionalQueue
from keywise.core.transaction import Transaction
from keywise.testing.virtual_loop import Process, outside

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

T = TypeVar("T")


class WatchedDatabase(MemoryDatabase):
    """Remembers how the entries looked before the current step, and tells committed from uncommitted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: dict[str, Entry] = {}

    @property
    def is_dirty(self) -> bool:
        return self._undo is not None

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with super().exclusive():
            self.before = dict(self.scope("sim").entries)
            yield


class Link:
    """The connections of one process."""

    def __init__(self, world: "World", process: Process) -> None:
        self.world = world
        self.process = process

    async def call(self, act: Callable[[], Awaitable[T]], lost: str = "") -> T:
        """Run `act` on a server. It may not run, or run without an answer, or long after the caller has gone."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outside(asyncio.get_running_loop(), self._serve(act, answer, lost))
        self.world.disturbances.meanwhile(self.process)
        return await answer

    async def hop(self) -> None:
        """A moment in which the process can be stopped."""
        await asyncio.sleep(self.world.rng.uniform(0.0, 0.002))

    async def _serve(self, act: Callable[[], Awaitable[T]], answer: asyncio.Future[T], lost: str) -> None:
        faults = self.world.faults
        await asyncio.sleep(faults.latency_s())
        if self.is_cut() or faults.happens(lost or "lost before", faults.rates.lost / 2):
            return await self._stay_silent(answer)
        try:
            result = await act()
        except Exception as error:
            _fail(answer, error)
            return
        finally:
            self.world.auditor.look()
        if faults.happens(lost or "lost after", faults.rates.lost / 2):
            return await self._stay_silent(answer)
        await asyncio.sleep(faults.latency_s())
        if self.is_cut():
            return await self._stay_silent(answer)
        if not answer.done():
            answer.set_result(result)

    def is_cut(self) -> bool:
        """Whether nothing comes through now."""
        return False

    async def _stay_silent(self, answer: "asyncio.Future[Any]") -> None:
        await asyncio.sleep(self.world.rng.uniform(0.05, 3.0))
        _fail(answer, UnavailableError("no answer"))


class LedgerLink(Link):
    """The connections of one process to the ledger, which may be down."""

    def is_cut(self) -> bool:
        return self.world.blackout.cuts(self.process)


class LinkedSource:
    """A source behind a link."""

    def __init__(self, link: Link, source: MemorySource) -> None:
        self._link = link
        self._source = source
        self.visibility_s = source.visibility_s
        self.database = source.database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._link.call(lambda: self._receive(limit, wait_s))
        self._link.world.delivery_audit.received(self._link.process, list(deliveries))
        return deliveries

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        audit, process = self._link.world.delivery_audit, self._link.process
        audit.extending(process, list(deliveries))
        try:
            await self._link.call(lambda: self._source.extend(deliveries, visibility_s))
        finally:
            audit.extended(process)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._link.world.delivery_audit.acking(self._link.process, list(deliveries))
        await self._link.call(lambda: self._source.ack(deliveries), lost="lost ack")

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        self._link.world.delivery_audit.giving_back(self._link.process, list(deliveries))
        await self._link.call(lambda: self._source.release(deliveries, delay_s))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self._link.world.delivery_audit.parking(self._link.process, keys)
        self._link.world.delivery_audit.giving_back(self._link.process, list(deliveries))
        await self._link.call(lambda: self._source.park(deliveries, keys, delays_s))

    async def recall(self, keys: Sequence[str] | None) -> None:
        await self._link.call(lambda: self._source.recall(keys))

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        async def act() -> None:
            await self._source.send(bodies, delay_s=delay_s)
            for body in bodies:
                self._link.world.sent_again(body)

        await self._link.call(act)

    async def depth(self) -> int:
        return await self._source.depth()

    async def arrived(self, wait_s: float) -> bool:
        return await self._link.call(lambda: self._source.arrived(wait_s))

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        return await self._link.call(lambda: self._source.peek(limit, after))

    def queue_in(self, connection: MemoryDatabase) -> TransactionalQueue:
        return self._source.queue_in(connection)

    async def _receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = list(await self._source.receive(limit, wait_s))
        self._link.world.delivery_audit.shared(limit, deliveries, self._source)
        faults = self._link.world.faults
        again = [d for d in deliveries if faults.happens("duplicate", faults.rates.duplicate * 0.3)]
        await self._source.release(again, 0.0)
        self._link.world.delivery_audit.handed(self._link.process, deliveries)
        faults.rng.shuffle(deliveries)
        return deliveries


class LinkedLedger:
    """A ledger behind a link, watched by the auditor."""

    def __init__(self, link: Link, ledger: MemoryLedger) -> None:
        self._link = link
        self._ledger = ledger
        self.database = ledger.database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async def act() -> ClaimResults:
            results = await self._ledger.claim(headers, terms)
            world = self._link.world
            before = world.database.before
            for claim in results.granted:
                self._auditor.granted(self._link.process, claim, before.get(claim.key), terms.lease_s)
                world.flow.dispatched(world, claim.key, world.store_now())
            if not terms.despite_pause:
                world.flow.started(world, [claim.key for claim in results.granted])
            granted.extend(results.granted)
            return results

        granted: list[Claim] = []
        self._auditor.asked([header.key for header in headers])
        try:
            return await self._link.call(act)
        except UnavailableError:
            self._auditor.claims_lost(granted)
            raise

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        async def act() -> list[Claim]:
            lost = await self._ledger.renew(claims, lease_s, phase)
            self._auditor.renewed([claim for claim in claims if claim not in lost], lease_s)
            return lost

        world, process = self._link.world, self._link.process
        world.blackout.renewing(process)
        if world.disturbances.loses_renewal(process):
            raise UnavailableError("the heartbeat's connection was lost")
        lost = await self._link.call(act)
        world.blackout.renewed(process)
        return lost

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._ledger.commit(commits)
            done = [commit.claim for commit in commits if commit.claim not in refused]
            world = self._link.world
            self._auditor.committed_by(self._link.process, done, world.database.before)
            self._auditor.refused(refused, world.database.before, world.entries())
            return refused

        return await self._link.call(act)

    async def fail(self, failures: Sequence[Failure]) -> None:
        self._link.world.blackout.failed(failures)
        await self._link.call(lambda: self._ledger.fail(failures))

    async def release(self, claims: Sequence[Claim]) -> None:
        async def act() -> None:
            await self._ledger.release(claims)
            world = self._link.world
            self._auditor.released(list(claims), world.database.before, world.entries())

        await self._link.call(act)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        return await self._link.call(lambda: self._ledger.dead_letter(requests))

    async def prune(self, retention_s: float) -> int:
        async def act() -> int:
            pruned = await self._ledger.prune(retention_s)
            world = self._link.world
            self._auditor.pruned(world.database.before, world.entries(), retention_s)
            return pruned

        return await self._link.call(act)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        return await self._link.call(lambda: self._ledger.inspect(key))

    async def counts(self) -> LedgerCounts:
        return await self._ledger.counts()

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        return await self._link.call(lambda: self._ledger.suspects(limit, quiet_s))

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async def act() -> None:
            await self._ledger.finish_repair(claim, written)
            world = self._link.world
            self._auditor.repair_finished(claim, world.database.before.get(claim.key), world.entries().get(claim.key))

        await self._link.call(act)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async def act() -> None:
            await self._ledger.mark_suspect(headers, resync_due)
            self._link.world.blackout.marked_suspect(headers)

        await self._link.call(act)

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        return await self._ledger.dead_letters(limit, matching)

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        return await self._link.call(lambda: self._ledger.delete_dead_letters(numbers))

    async def now(self) -> float:
        return await self._link.call(self._ledger.now)

    @property
    def _auditor(self) -> Any:
        return self._link.world.auditor

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        world, process, database = self._link.world, self._link.process, self._ledger.database
        session = Session(database)

        async def begin() -> None:
            await asyncio.sleep(world.disturbances.begin_late_s(process))
            await database.begin()
            session.is_open = True
            if process.is_dead:
                session.end()

        async def commit() -> None:
            if not session.is_open:
                raise UnavailableError("the connection was lost")
            session.commit()
            world.transaction_committed()

        world.sessions.setdefault(process.name, []).append(session)
        try:
            await self._link.call(begin)
            yield LinkedTransaction(self._link, MemoryTransaction(self._ledger))
            await self._link.call(commit)
        except asyncio.CancelledError:
            world.auditor.transaction_cut(process)
            raise
        finally:
            session.give_up()


class Session:
    """A server's side of a transaction: it ends with the connection."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.is_open = False
        self._given_up = False
        self._database = database

    def commit(self) -> None:
        self.is_open = False
        self._database.commit()

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            self._database.rollback()

    def give_up(self) -> None:
        """The client has left; a begin that is still on its way must not stay open."""
        self._given_up = True
        self.end()

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "is_open" and value and getattr(self, "_given_up", False):
            self.end()


class LinkedTransaction:
    """A transaction whose process can be stopped between any two of its statements."""

    def __init__(self, link: Link, transaction: MemoryTransaction) -> None:
        self._link = link
        self._transaction = transaction
        self.connection = transaction.connection

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        world = self._link.world
        world.auditor.asked([header.key for header in headers])
        await self._link.hop()
        refusals = await self._transaction.decide(headers)
        world.flow.started(world, [header.key for header in headers if header.key not in refusals])
        return refusals

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        await self._link.hop()
        await self._transaction.mark(headers)
        self._link.world.flow.marked(self._link.world, [header.key for header in headers])

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        await self._link.hop()
        before = dict(self._link.world.entries())
        refused = await self._transaction.commit(claims)
        done = [claim for claim in claims if claim not in refused]
        self._link.world.auditor.committed_by(self._link.process, done, before)
        return refused

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        return await self._transaction.fail(headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        await self._transaction.dead_letter(letters)

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        return self._transaction.savepoint()


def _fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Whoever was killed meanwhile does not look at it, and that is no surprise.
