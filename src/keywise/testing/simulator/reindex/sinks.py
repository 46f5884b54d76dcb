"""Simulated sinks whose name can move: an alias of a store that is called, and a table of the ledger's database."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.core.change import Change
from keywise.core.entry import Claim
from keywise.core.sink import Content, Grade, SinkResult
from keywise.core.target import TargetNote
from keywise.core.transaction import Transaction
from keywise.testing.simulator.reindex.links import ReindexLink, WatchedTransaction

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld

T = TypeVar("T")

BATCH_MAX = 3
WRITE_LATE_S = 15.0
"""So much later than its caller has given it up, a write may arrive: less than the horizon."""
MOVE_LATE_S = (5.0, 60.0, 300.0)
"""A call that moves the name may arrive when others have moved it there and back."""


class LinkedAlias:
    """A plain or conditional sink behind a link, whose name is moved by a call."""

    batch_max = BATCH_MAX

    def __init__(self, link: ReindexLink, world: "ReindexWorld", target: str = "") -> None:
        self._link = link
        self._world = world
        self._server = MemorySink(
            world.grade,
            forget_deletions_s=world.forget_deletions_s,
            clock=world.store_now,
            store=world.store,
            target=target,
        )
        self.grade = world.grade
        self.forgets_deletions = self._server.forgets_deletions

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        return await self._link.late_call(lambda: self._serve(changes, claims), WRITE_LATE_S)

    async def _serve(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> list[SinkResult]:
        return [self._write(change, claim) for change, claim in zip(changes, claims, strict=True)]

    def _write(self, change: Change[Any], claim: Claim) -> SinkResult:
        accepted = len(self._server.writes)
        result = self._server.write(change, claim.token, repairs=claim.order is None)
        if len(self._server.writes) > accepted:
            target = next(
                (name for name, one in self._world.store.targets.items() if one.writes is self._server.writes), ""
            )
            self._world.auditor.written(target, change, claim.token)
        return result

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        return await self._link.call(lambda: self._server.read(keys))

    # The ability to move.

    def at_target(self, target: str) -> "LinkedAlias":
        return LinkedAlias(self._link, self._world, target)

    async def current_target(self) -> str:
        return await self._link.call(self._server.current_target)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        async def act() -> None:
            before = self._world.content(target)
            await self._server.create_target(target, note, epoch, definition)
            self._world.auditor.created(target, note, before)

        await self._link.call(act)

    async def finish_target(self, target: str) -> list[str]:
        return await self._link.call(lambda: self._server.finish_target(target))

    async def count(self, target: str) -> int:
        return await self._link.call(lambda: self._server.count(target))

    async def targets(self, pipeline: str) -> list[str]:
        return await self._link.call(lambda: self._server.targets(pipeline))

    async def drop_target(self, target: str) -> None:
        async def act() -> None:
            await self._server.drop_target(target)
            self._world.auditor.dropped(target)

        await self._link.call(act)

    async def move_name(self, before: str, after: str, epoch: int) -> None:
        faults = self._world.faults
        if faults.happens("crash at the call", faults.crash_at_call_rate):
            await self._world.die(self._link.process)
        late_s = self._world.rng.choice(MOVE_LATE_S)
        await self._link.late_call(
            lambda: self._server.move_name(before, after, epoch), late_s, self._world.faults.late_move_rate
        )


class LinkedTable:
    """An atomic sink: a table that exchanges its name with another one, or a handler that writes into it."""

    grade = Grade.ATOMIC
    batch_max = BATCH_MAX

    def __init__(self, link: ReindexLink, world: "ReindexWorld", target: str = "") -> None:
        self._link = link
        self._world = world
        self._target = target
        self._server = MemoryTable(world.database, "sink", target)
        self.database = world.database
        self.runs_user_code = world.runs_user_code

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        assert isinstance(transaction, WatchedTransaction), "this world has no other transactions"
        for change in changes:
            await transaction.hop()
            await self._server.write(transaction, [change])
            transaction.writes.append((self._target or await self._server.current_target(), change))

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        return await self._look(lambda: self._server.read(keys))

    # The ability to move.

    def at_target(self, target: str) -> "LinkedTable":
        return LinkedTable(self._link, self._world, target)

    async def current_target(self) -> str:
        return await self._look(self._server.current_target)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        async def act() -> None:
            before = self._world.content(target)
            await self._server.create_target(target, note, epoch, definition)
            self._world.auditor.created(target, note, before)

        await self._link.call(act)

    async def finish_target(self, target: str) -> list[str]:
        return await self._look(lambda: self._server.finish_target(target))

    async def count(self, target: str) -> int:
        return await self._look(lambda: self._server.count(target))

    async def targets(self, pipeline: str) -> list[str]:
        return await self._look(lambda: self._server.targets(pipeline))

    async def drop_target(self, target: str) -> None:
        async def act() -> None:
            await self._server.drop_target(target)
            self._world.auditor.dropped(target)

        await self._link.call(act)

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        await self._server.exchange(connection, before, after)

    async def _look(self, act: Callable[[], Awaitable[T]]) -> T:
        """Read on the server, without what an open transaction has set."""

        async def look() -> T:
            async with self.database.exclusive():
                return await act()

        return await self._link.call(look)
