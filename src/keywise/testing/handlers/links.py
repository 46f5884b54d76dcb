"""The queue, the ledger and the scratch database of a simulated worker, behind a lossy link."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import ChangeHeader, Delivery
from keywise.core.entry import LeaseTerms, Level
from keywise.core.errors import UnavailableError
from keywise.core.ledger import ClaimResults
from keywise.core.transaction import Transaction
from keywise.testing.lossy_link import Linked, LossyLink, Session

if TYPE_CHECKING:
    from keywise.testing.handlers.call_log import SimulatedWorker
    from keywise.testing.handlers.world import HandlerWorld

ENDINGS = {"commit", "fail", "release", "dead_letter"}
"""After one of these calls, a worker runs no change alone any more."""


class WiredSource(Linked[MemorySource], over=MemorySource):
    """The queue, as one worker sees it."""

    def __init__(self, world: "HandlerWorld", worker: "SimulatedWorker") -> None:
        super().__init__(LossyLink(world, worker.process), world.source)
        self.visibility_s: float | None = world.source.visibility_s
        self.database = None
        self._world = world
        self._worker = worker

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._link.call(lambda: self._receive(limit, wait_s))
        self._world.report_handed(self._worker, deliveries)
        return deliveries

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        has_arrived = False

        async def act() -> None:
            nonlocal has_arrived
            has_arrived = True
            await self._server.ack(deliveries)

        try:
            await self._link.call(act)
        except UnavailableError:
            if not has_arrived:
                self._world.report_deliveries(self._worker, deliveries, "the ack of {label} is lost")
            raise

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        self._world.given_back(self._worker, deliveries)
        await self._link.call(lambda: self._server.release(deliveries, delay_s))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self._world.given_back(self._worker, deliveries)
        await self._link.call(lambda: self._server.park(deliveries, keys, delays_s))

    async def _receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        limit = min(limit, self._world.handed_max())
        deliveries = list(await self._server.receive(limit, wait_s))
        again = [one for one in deliveries if self._world.faults.occurs("handed over twice")]
        await self._server.release(again, 0.0)
        return deliveries


class WiredLedger(Linked[MemoryLedger], over=MemoryLedger):
    """The ledger, its admin, control store and history store, as one worker sees them."""

    def __init__(self, world: "HandlerWorld", worker: "SimulatedWorker") -> None:
        super().__init__(LossyLink(world, worker.process), world.ledger)
        self.database = world.ledger.database
        self._watch = world.watch
        self._worker = worker

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        results = await self._link.call(lambda: self._server.claim(headers, terms))
        for claim in results.granted:
            if claim.level is Level.ALONE:
                self._worker.alone_with = claim.key
        return results

    async def forward(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        result = await super().forward(name, act)
        if name in ENDINGS:
            self._worker.alone_with = None
        return result

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        self._worker.effects.clear()
        session = Session(database=self.database, on_commit=lambda: self._watch.committed(self._worker))
        async with self._link.transaction(session):
            yield WiredTransaction(self._server, session)


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


class WiredTransaction(MemoryTransaction):
    """A transaction of the scratch database; handlers write with its SQLite connection."""

    connection: Any

    def __init__(self, ledger: MemoryLedger, session: Session) -> None:
        super().__init__(ledger)
        assert isinstance(ledger.database, ScratchDatabase), "handlers with a transaction need the scratch database"
        self._database = ledger.database
        self._session = session
        self.connection = self._database.connection

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
