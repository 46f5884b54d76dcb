"""A store in the memory of one process that plays all three grades and records every accepted write."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.targets import MemoryStore, MemoryTables, MemoryTarget, Stored, Write, writes_of
from keywise.core.change import VERSION_MIN, Change, is_unversioned
from keywise.core.clock import Clock, boot_time
from keywise.core.entry import Claim
from keywise.core.errors import AddressError
from keywise.core.settings import seconds
from keywise.core.sink import APPLIED, SUPERSEDED, AtomicSink, Content, Grade, Sink, SinkResult
from keywise.core.target import TargetNote
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class MemorySink:
    """A plain or conditional store; the conditional one forgets deletions after a while if told so.

    Its name can move to another target of the same store. Sinks of one process that are given one store share it.
    """

    batch_max = 100

    def __init__(
        self,
        grade: Grade,
        *,
        forget_deletions_s: float | None = None,
        clock: Clock = boot_time,
        store: MemoryStore | None = None,
        target: str = "",
    ) -> None:
        self.grade = grade
        self.forgets_deletions = forget_deletions_s is not None
        self.store = store or MemoryStore()
        self._forget_deletions_s = forget_deletions_s
        self._clock = clock
        self._target = target
        """The target that the sink writes to; empty: the one that the name stands for."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    @property
    def stored(self) -> dict[str, Stored]:
        return self._place().stored

    @property
    def writes(self) -> list[Write]:
        return self._place().writes

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        return [
            self.write(change, claim.token, repairs=claim.order is None)
            for change, claim in zip(changes, claims, strict=True)
        ]

    def write(self, change: Change[Any], token: int, *, repairs: bool = False) -> SinkResult:
        """Accept one write, or refuse it if the store holds something newer.

        A repair writes at the version that is there, also below a forced write that was never committed.
        """
        place, order = self._place(), change.order
        held = self._held(place.stored, change.key)
        if self.grade is Grade.CONDITIONAL and held is not None and _is_removal(change):
            order = held.order
        elif self.grade is Grade.CONDITIONAL and held is not None and held.order >= change.order:
            if held.order == change.order and not repairs:
                return APPLIED  # An earlier try arrived though its answer was lost.
            if not repairs or held.order[:2] > change.order[:2]:
                return SUPERSEDED
        place.stored[change.key] = Stored(order, change.deleted, change.body, self._clock())
        place.writes.append(Write(change.key, change.order, change.deleted, token))
        return APPLIED

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        return _contents(self.stored, keys)

    # The ability to move.

    async def current_target(self) -> str:
        return self.store.current

    def at_target(self, target: str) -> "MemorySink":
        return MemorySink(
            self.grade,
            forget_deletions_s=self._forget_deletions_s,
            clock=self._clock,
            store=self.store,
            target=target,
        )

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        self.store.create(target, note, epoch, definition)

    async def finish_target(self, target: str) -> list[str]:
        return [] if target in self.store.targets else [f"there is no target {target!r}"]

    async def count(self, target: str) -> int:
        return _count(self.at_target(target).stored)

    async def targets(self, pipeline: str) -> list[str]:
        return self.store.built(pipeline)

    async def drop_target(self, target: str) -> None:
        self.store.drop(target)

    async def move_name(self, before: str, after: str, epoch: int) -> None:
        self.store.move(before, after, epoch)

    def _place(self) -> MemoryTarget:
        return self.store.found(self._target or self.store.current)

    def _held(self, stored: Mapping[str, Stored], key: str) -> Stored | None:
        held = stored.get(key)
        if held is None or not held.deleted or self._forget_deletions_s is None:
            return held
        return held if self._clock() - held.written_at <= self._forget_deletions_s else None


class MemoryTable:
    """An atomic store: a table of the memory database that holds the ledger too."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 1000

    def __init__(self, database: MemoryDatabase, name: str, target: str = "") -> None:
        self.database = database
        self._targets = MemoryTables(database, name)
        self._name = name
        self._target = target
        """The target that the sink writes to; empty: the one that the name stands for."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    @property
    def stored(self) -> dict[str, Stored]:
        return self.database.table(self._table)

    @property
    def writes(self) -> dict[int, Write]:
        return self.database.table(writes_of(self._table))

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        stored, writes = self.stored, self.writes
        for change in changes:
            held = Stored(change.order, change.deleted, change.body, self.database.clock())
            self.database.set(stored, change.key, held)
            write = Write(change.key, change.order, change.deleted, 0)
            self.database.set(writes, self.database.number(), write)

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        return _contents(self.stored, keys)

    # The ability to move.

    async def current_target(self) -> str:
        return self._targets.current

    def at_target(self, target: str) -> "MemoryTable":
        return MemoryTable(self.database, self._name, target)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        async with self.database.exclusive():
            self._targets.create(target, note, definition)

    async def finish_target(self, target: str) -> list[str]:
        return [] if self._targets.exists(target) else [f"there is no table {target}"]

    async def count(self, target: str) -> int:
        return _count(self.at_target(target).stored)

    async def targets(self, pipeline: str) -> list[str]:
        return self._targets.built(pipeline)

    async def drop_target(self, target: str) -> None:
        async with self.database.exclusive():
            self._targets.drop(target)

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        assert connection is self.database, "a transaction reaches its own database only"
        self._targets.exchange(before, after)

    @property
    def _table(self) -> str:
        return self._targets.place_of(self._target) if self._target else self._name


def _is_removal(change: Change[Any]) -> bool:
    """Whether an operator or a repair removes a key whose version is unknown: it is deleted at the version it has."""
    return change.deleted and change.order[1] == VERSION_MIN


def _contents(stored: Mapping[str, Stored], keys: Sequence[str]) -> dict[str, Content]:
    held = [(key, stored[key]) for key in keys if key in stored]
    return {
        key: Content(one.body, None if is_unversioned(one.order) else one.order[1])
        for key, one in held
        if not one.deleted
    }


def _count(stored: Mapping[str, Stored]) -> int:
    return sum(not one.deleted for one in stored.values())


def connect(address: Address) -> Sink | AtomicSink:
    """`memory://?grade=plain`, `conditional` or `atomic` (the default): lives and dies with the process."""
    options = address.take("grade", "table", "forget_deletions")
    grade = options.get("grade", "atomic")
    if grade == Grade.ATOMIC:
        return MemoryTable(address.shared(MemoryDatabase), options.get("table", address.name))
    if grade not in (Grade.PLAIN, Grade.CONDITIONAL):
        raise AddressError(f"grade={grade} is unknown; write atomic, conditional or plain")
    forget_s = seconds(options["forget_deletions"]) if "forget_deletions" in options else None
    store = address.shared(MemoryStore, options.get("table", address.name))
    return MemorySink(Grade(grade), forget_deletions_s=forget_s, store=store)
