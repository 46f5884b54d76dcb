"""The connections of a simulated worker to its queue, ledger and scratch database, on which calls get lost."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import ChangeHeader, Delivery
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Claim, LeaseTerms, Level, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.ledger import ClaimResults
from keywise.core.transaction import Transaction
from keywise.testing.simulator.links import Session
from keywise.testing.virtual_loop import outside

if TYPE_CHECKING:
    from keywise.testing.handlers.call_log import SimulatedWorker
    from keywise.testing.handlers.world import HandlerWorld

T = TypeVar("T")

ENDINGS = ("commit", "fail", "release", "dead_letter")
"""After one of these calls, a worker runs no change alone any more."""


class Wire:
    """The connections of one worker."""

    def __init__(self, world: "HandlerWorld", worker: "SimulatedWorker") -> None:
        self.world = world
        self.worker = worker

    async def call(self, act: Callable[[], Awaitable[T]], lost: Callable[[], None] | None = None) -> T:
        """Run `act` on a server. It may not run, or run without an answer, or run after the caller has died."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outside(asyncio.get_running_loop(), self._serve(act, answer, lost or (lambda: None)))
        self.world.faults.meanwhile(self.worker)
        return await answer

    async def _serve(
        self, act: Callable[[], Awaitable[T]], answer: asyncio.Future[T], lost: Callable[[], None]
    ) -> None:
        faults = self.world.faults
        await asyncio.sleep(faults.latency_s())
        if faults.happens("lost before"):
            lost()
            return await _stay_silent(answer, faults.latency_s())
        try:
            result = await act()
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
            return
        if faults.happens("lost after"):
            return await _stay_silent(answer, faults.latency_s())
        await asyncio.sleep(faults.latency_s())
        if not answer.done():
            answer.set_result(result)


class WiredSource:
    """The queue, as one worker sees it."""

    def __init__(self, wire: Wire, source: MemorySource) -> None:
        self._wire = wire
        self._source = source
        self.visibility_s: float | None = source.visibility_s
        self.database = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._wire.call(lambda: self._receive(limit, wait_s))
        self._wire.world.report_handed(self._wire.worker, deliveries)
        return deliveries

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        await self._wire.call(lambda: self._source.extend(deliveries, visibility_s))

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        def lost() -> None:
            self._wire.world.report_deliveries(self._wire.worker, deliveries, "the ack of {label} is lost")

        await self._wire.call(lambda: self._source.ack(deliveries), lost)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        self._wire.world.given_back(self._wire.worker, deliveries)
        await self._wire.call(lambda: self._source.release(deliveries, delay_s))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self._wire.world.given_back(self._wire.worker, deliveries)
        await self._wire.call(lambda: self._source.park(deliveries, keys, delays_s))

    async def recall(self, keys: Sequence[str] | None) -> None:
        await self._wire.call(lambda: self._source.recall(keys))

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        raise AssertionError("simulated workers do not send")

    async def depth(self) -> int:
        return await self._source.depth()

    async def _receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        limit = min(limit, self._wire.world.handed_max())
        deliveries = list(await self._source.receive(limit, wait_s))
        again = [one for one in deliveries if self._wire.world.faults.happens("handed over twice")]
        await self._source.release(again, 0.0)
        return deliveries


class WiredLedger:
    """The ledger, its admin, control store and history store, as one worker sees them."""

    def __init__(self, wire: Wire, ledger: MemoryLedger) -> None:
        self._wire = wire
        self._ledger = ledger
        self.database = ledger.database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        results = await self._wire.call(lambda: self._ledger.claim(headers, terms))
        for claim in results.granted:
            if claim.level is Level.ALONE:
                self._wire.worker.alone_with = claim.key
        return results

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Forward every other method."""
        method = getattr(self._ledger, name)

        async def call(*arguments: Any) -> Any:
            result = await self._wire.call(lambda: method(*arguments))
            if name in ENDINGS:
                self._wire.worker.alone_with = None
            return result

        return call

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        world, worker = self._wire.world, self._wire.worker
        session = Session(self._ledger.database)

        async def begin() -> None:
            await self._ledger.database.begin()
            session.is_open = True
            if worker.process.is_dead:
                session.end()

        async def commit() -> None:
            if not session.is_open:
                raise UnavailableError("the connection was lost")
            session.commit()
            world.watch.committed(worker)

        worker.sessions.append(session)
        worker.effects.clear()
        try:
            await self._wire.call(begin)
            yield WiredTransaction(MemoryTransaction(self._ledger), session)
            await self._wire.call(commit)
        finally:
            session.give_up()


class ScratchDatabase(MemoryDatabase):
    """The ledger's database in memory, with a scratch SQLite connection that commits and rolls back with it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.set_authorizer(self._authorize)
        self.runs_user_code = False

    async def begin(self) -> None:
        await super().begin()
        self.connection.execute("begin -- keywise")

    def commit(self) -> None:
        self.connection.execute("commit -- keywise")
        super().commit()

    def rollback(self) -> None:
        self.runs_user_code = False
        self.connection.execute("rollback -- keywise")
        self.rollback_to(0)
        super().commit()

    def _authorize(self, action: int, *_: object) -> int:
        """Refuse a commit or rollback by the handler, as real transactions do: it is left to keywise."""
        ends = action == sqlite3.SQLITE_TRANSACTION and self.runs_user_code
        return sqlite3.SQLITE_DENY if ends else sqlite3.SQLITE_OK


class WiredTransaction:
    """A transaction of the scratch database; handlers write with its SQLite connection."""

    def __init__(self, transaction: MemoryTransaction, session: Session) -> None:
        database = transaction.connection
        assert isinstance(database, ScratchDatabase), "handlers with a transaction need the scratch database"
        self._transaction = transaction
        self._database = database
        self._session = session
        self.connection = database.connection

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        return await self._transaction.decide(headers)

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        await self._transaction.mark(headers)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        return await self._transaction.commit(claims)

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        return await self._transaction.fail(headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        await self._transaction.dead_letter(letters)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        self._check_open()
        before = self._database.savepoint()
        self.connection.execute("savepoint keywise")
        try:
            self._database.runs_user_code = True
            yield
        except BaseException:
            # A killed worker is cleaned up long after its session has ended: then there is nothing to roll back.
            if self._session.is_open:
                self._database.runs_user_code = False
                self.connection.execute("rollback to keywise")
                self.connection.execute("release keywise")
                self._database.rollback_to(before)
            raise
        self._database.runs_user_code = False
        self._check_open()
        self.connection.execute("release keywise")

    def _check_open(self) -> None:
        if not self._session.is_open:
            raise UnavailableError("the connection was lost")


async def _stay_silent(answer: "asyncio.Future[Any]", wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    if not answer.done():
        answer.set_exception(UnavailableError("no answer"))
