"""The ledger scopes and the queue of a simulated reindex, as one process sees them, watched by the auditor."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from keywise.adapters.memory.dump import MemoryLedgerTransfer
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, ChangeHeader
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, LeaseTerms
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.ledger import ClaimResults
from keywise.core.transaction import Transaction
from keywise.core.transfer import TransferPage
from keywise.testing.lossy_link import Linked, LossyLink, Session
from keywise.testing.virtual_loop import outside

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld

T = TypeVar("T")

IDLE_S = 5.0
"""The server ends a transaction in which nothing has happened for this long."""


class ReindexLink(LossyLink):
    """The connections of one process to the servers of a reindex."""

    world: "ReindexWorld"

    async def late_call(self, act: Callable[[], Awaitable[T]], late_max_s: float, rate: float | None = None) -> T:
        """Make a call that may time out for the caller, and arrive later all the same."""
        faults = self.world.faults
        if faults.happens("late call", faults.late_rate if rate is None else rate):
            outside(self.world.loop, self._arrive_late(act, self.world.rng.uniform(0.0, late_max_s)))
            await asyncio.sleep(faults.silence_s())
            raise UnavailableError("no answer")
        return await self.call(act)

    async def _arrive_late(self, act: Callable[[], Awaitable[Any]], late_s: float) -> None:
        await asyncio.sleep(late_s)
        try:
            await act()
        except (AdminError, UnavailableError) as error:
            self.world.auditor.note(f"a late call is refused: {error!r}")
        finally:
            self.world.served()


class LinkedQueue(Linked[MemorySource], over=MemorySource):
    """The queue of live changes."""

    database = None

    def __init__(self, link: LossyLink, source: MemorySource) -> None:
        super().__init__(link, source)
        self.visibility_s = source.visibility_s


class LinkedTransfer:
    """The list of all entries of a scope."""

    def __init__(self, link: ReindexLink, server: MemoryLedgerTransfer) -> None:
        self._link = link
        self._server = server

    async def page(self, cursor: str, limit: int) -> TransferPage:
        return await self._link.call(lambda: self._server.page(cursor, limit))

    async def clear(self) -> None:
        await self._link.call(self._server.clear)


class LinkedScope(Linked[MemoryLedger], over=MemoryLedger):
    """One scope of the ledger. It is also its own admin, control store and history store."""

    _link: ReindexLink

    def __init__(self, link: ReindexLink, world: "ReindexWorld", scope: str) -> None:
        super().__init__(link, MemoryLedger(world.database, scope, world.policy_of(scope)))
        self.database = world.database
        self.admin = self.control_store = self.history_store = self
        self.transfer = LinkedTransfer(link, self._server.transfer)
        self._world = world
        self._scope = scope

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async def act() -> ClaimResults:
            results = await self._server.claim(headers, terms)
            for claim in results.granted:
                self._world.auditor.granted(self._scope, claim, terms)
            for header in headers:
                if header.key in results.refused:
                    self._world.auditor.refused(self._scope, header, results.refused[header.key])
            return results

        results = await self._link.call(act)
        await self._perhaps_die(results.granted)
        await self._world.strays.claimed(self._link.process, self._scope, results.granted)
        return results

    async def _perhaps_die(self, claims: Sequence[Claim]) -> None:
        """Perhaps kill a worker that has claimed a row which is gone before another worker can read it."""
        world = self._world
        is_last = any(claim.key in world.short for claim in claims) and self._scope in world.other_scopes()
        if is_last and world.faults.happens("crash with a last row", world.faults.crash_with_row_rate):
            await world.die(self._link.process)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._server.advance(advances)
            for one in advances:
                if one.claim not in refused:
                    self._world.auditor.advanced(self._scope, one.claim, one.position.note)
            return refused

        return await self._link.call(act)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        async def act() -> list[Claim]:
            refused = await self._server.commit(commits)
            for one in commits:
                if one.claim not in refused:
                    self._world.auditor.committed(self._scope, one)
            return refused

        return await self._link.call(act)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async def act() -> list[Claim]:
            lost = await self._server.dead_letter(requests)
            for request in requests:
                if request.claim not in lost:
                    self._world.auditor.dead_lettered(self._scope, request)
            return lost

        return await self._link.call(act)

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        is_replaced = await self._link.late_call(lambda: self._server.replace_controls(before, after), 60.0)
        if is_replaced and after.move is not None and after.move.is_called:
            await self._world.about_to_move(self._link.process)
        return is_replaced

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        await self._world.strays.writing(self._link.process, self._scope)
        session = Session(database=self.database)
        transaction = WatchedTransaction(self._server, self._world, session, self._scope)
        session.on_commit = transaction.report
        async with self._link.transaction(session):
            self._world.loop.call_later(IDLE_S, session.end, context=self._world.outside)
            yield transaction


class WatchedTransaction(MemoryTransaction):
    """A transaction that the auditor sees when it is committed."""

    def __init__(self, ledger: MemoryLedger, world: "ReindexWorld", session: Session, scope: str) -> None:
        super().__init__(ledger)
        self._world = world
        self._session = session
        self._scope = scope
        self._commits: list[Commit] = []
        self._marks: list[ChangeHeader] = []
        self.writes: list[tuple[str, Change[Any]]] = []
        """The target of each write, and what was written."""

    async def hop(self) -> None:
        """A moment in which the process can be stopped; meanwhile the server may have ended the transaction."""
        await asyncio.sleep(self._world.rng.uniform(0.0, 0.01))
        if not self._session.is_open:
            raise UnavailableError("the connection was lost")

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        await self.hop()
        await super().mark(headers)
        self._marks += headers

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        await self.hop()
        refused = await super().commit(commits)
        self._commits += [one for one in commits if one.claim not in refused]
        return refused

    async def dead_letter(self, letters: Sequence[Any]) -> None:
        await self.hop()
        await super().dead_letter(letters)

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        await self.hop()
        return await super().replace_controls(before, after)

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
        auditor, tokens = self._world.auditor, {one.claim.key: one.claim.token for one in self._commits}
        for header in self._marks:
            auditor.marked(self._scope, header)
        for target, change in self.writes:
            auditor.written(target, change, tokens.get(change.key, 0), self._scope)
        for one in self._commits:
            auditor.committed(self._scope, one)
