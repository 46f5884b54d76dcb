"""The source and the ledger of a simulated flow behind a lossy link, with what the auditors look at."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import ChangeHeader, Delivery
from keywise.core.controls import Controls
from keywise.core.entry import Claim, Commit, Entry, LeaseTerms, Phase, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.ledger import ClaimResults, Failure
from keywise.core.source import TransactionalQueue
from keywise.core.transaction import Transaction
from keywise.testing.lossy_link import Linked, LossyLink, Session

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

READS = {"dead_letters", "keys"}
"""Not over the link: only operators read them, and a lost answer changes nothing."""


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


class FlowLink(LossyLink):
    """The connections of one process to the servers of a flow."""

    world: "World"

    async def hop(self) -> None:
        """A moment in which the process can be stopped."""
        await asyncio.sleep(self.world.rng.uniform(0.0, 0.002))


class LinkedSource(Linked[MemorySource], over=MemorySource):
    """A source behind a link."""

    _link: FlowLink

    def __init__(self, link: FlowLink, source: MemorySource) -> None:
        super().__init__(link, source)
        self.visibility_s = source.visibility_s
        self.database = source.database

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._link.call(lambda: self._receive(limit, wait_s))
        self._link.world.delivery_audit.received(self._link.process, list(deliveries))
        return deliveries

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        audit, process = self._link.world.delivery_audit, self._link.process
        audit.extending(process, list(deliveries))
        try:
            return await self._link.call(lambda: self._server.extend(deliveries, visibility_s))
        finally:
            audit.extended(process)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._link.world.delivery_audit.acking(self._link.process, list(deliveries))
        await self._link.call(lambda: self._server.ack(deliveries), lost="lost ack")

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        self._link.world.delivery_audit.giving_back(self._link.process, list(deliveries))
        await self._link.call(lambda: self._server.release(deliveries, delay_s))

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self._link.world.delivery_audit.parking(self._link.process, deliveries, keys)
        self._link.world.delivery_audit.giving_back(self._link.process, list(deliveries))
        await self._link.call(lambda: self._server.park(deliveries, keys, delays_s))

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        async def act() -> None:
            await self._server.send(bodies, delay_s=delay_s)
            for body in bodies:
                self._link.world.sent_again(body)

        await self._link.call(act)

    def queue_in(self, connection: MemoryDatabase) -> TransactionalQueue:
        return self._server.queue_in(connection)

    async def _receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = list(await self._server.receive(limit, wait_s))
        self._link.world.delivery_audit.shared(limit, deliveries, self._server)
        faults = self._link.world.faults
        again = [d for d in deliveries if faults.happens("duplicate", faults.rates.duplicate * 0.3)]
        await self._server.release(again, 0.0)
        self._link.world.delivery_audit.handed(self._link.process, deliveries)
        faults.rng.shuffle(deliveries)
        return deliveries


class LinkedLedger(Linked[MemoryLedger], over=MemoryLedger):
    """A ledger with its control store and history store behind a link, watched by the auditor."""

    _link: FlowLink

    def __init__(self, link: FlowLink, ledger: MemoryLedger) -> None:
        super().__init__(link, ledger)
        self.database = ledger.database

    async def forward(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        return await (act() if name in READS else super().forward(name, act))

    async def controls(self) -> Controls:
        if self._link.is_cut():
            raise UnavailableError("the ledger is down")
        return await self._server.controls()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async def act() -> ClaimResults:
            results = await self._server.claim(headers, terms)
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
            lost = await self._server.renew(claims, lease_s, phase)
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
            refused = await self._server.commit(commits)
            done = [commit.claim for commit in commits if commit.claim not in refused]
            world = self._link.world
            self._auditor.committed_by(self._link.process, done, world.database.before)
            self._auditor.refused(refused, world.database.before, world.entries())
            return refused

        return await self._link.call(act)

    async def fail(self, failures: Sequence[Failure]) -> None:
        self._link.world.blackout.failed(failures)
        await self._link.call(lambda: self._server.fail(failures))

    async def release(self, claims: Sequence[Claim]) -> None:
        async def act() -> None:
            await self._server.release(claims)
            world = self._link.world
            self._auditor.released(list(claims), world.database.before, world.entries())

        await self._link.call(act)

    async def prune(self, retention_s: float) -> int:
        async def act() -> int:
            pruned = await self._server.prune(retention_s)
            world = self._link.world
            self._auditor.pruned(world.database.before, world.entries(), retention_s)
            return pruned

        return await self._link.call(act)

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async def act() -> None:
            await self._server.finish_repair(claim, written)
            world = self._link.world
            self._auditor.repair_finished(claim, world.database.before.get(claim.key), world.entries().get(claim.key))

        await self._link.call(act)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async def act() -> None:
            await self._server.mark_suspect(headers, resync_due)
            self._link.world.blackout.marked_suspect(headers)

        await self._link.call(act)

    @property
    def _auditor(self) -> Any:
        return self._link.world.auditor

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        world, process = self._link.world, self._link.process
        session = Session(
            database=self.database,
            wait_s=lambda: world.disturbances.begin_late_s(process),
            on_commit=world.transaction_committed,
            on_cancel=lambda: world.auditor.transaction_cut(process),
        )
        async with self._link.transaction(session):
            yield LinkedTransaction(self._link, self._server)


class LinkedTransaction(MemoryTransaction):
    """A transaction whose process can be stopped between any two of its statements."""

    def __init__(self, link: FlowLink, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self._link = link

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        world = self._link.world
        world.auditor.asked([header.key for header in headers])
        await self._link.hop()
        refusals = await super().decide(headers)
        world.flow.started(world, [header.key for header in headers if header.key not in refusals])
        return refusals

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        await self._link.hop()
        await super().mark(headers)
        self._link.world.flow.marked(self._link.world, [header.key for header in headers])

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        await self._link.hop()
        before = dict(self._link.world.entries())
        refused = await super().commit(commits)
        done = [commit.claim for commit in commits if commit.claim not in refused]
        self._link.world.auditor.committed_by(self._link.process, done, before)
        return refused
