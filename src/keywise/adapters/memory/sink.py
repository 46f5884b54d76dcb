"""A store in the memory of one process that plays all three grades and records every accepted write."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.change import Change, Order, is_unversioned
from keywise.core.clock import Clock, boot_time
from keywise.core.entry import Claim
from keywise.core.errors import AddressError
from keywise.core.settings import seconds
from keywise.core.sink import APPLIED, SUPERSEDED, AtomicSink, Content, Grade, Sink, SinkResult
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class Stored(msgspec.Struct, frozen=True):
    """What the store holds of one key."""

    order: Order
    deleted: bool
    body: bytes
    written_at: float


class Write(msgspec.Struct, frozen=True):
    """One accepted write, in the order of acceptance."""

    key: str
    order: Order
    deleted: bool
    token: int


class MemorySink:
    """A plain or conditional store; the conditional one forgets deletions after a while if told so."""

    batch_max = 100

    def __init__(self, grade: Grade, *, forget_deletions_s: float | None = None, clock: Clock = boot_time) -> None:
        self.grade = grade
        self.forgets_deletions = forget_deletions_s is not None
        self.stored: dict[str, Stored] = {}
        self.writes: list[Write] = []
        self._forget_deletions_s = forget_deletions_s
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        return [self.write(change, claim.token) for change, claim in zip(changes, claims, strict=True)]

    def write(self, change: Change[Any], token: int) -> SinkResult:
        """Accept one write, or refuse it if the store holds something newer."""
        held = self._held(change.key)
        if self.grade is Grade.CONDITIONAL and held is not None and held.order >= change.order:
            # Equal: an earlier try arrived though its answer was lost.
            return APPLIED if held.order == change.order else SUPERSEDED
        self.stored[change.key] = Stored(change.order, change.deleted, change.body, self._clock())
        self.writes.append(Write(change.key, change.order, change.deleted, token))
        return APPLIED

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        return _contents(self.stored, keys)

    def _held(self, key: str) -> Stored | None:
        held = self.stored.get(key)
        if held is None or not held.deleted or self._forget_deletions_s is None:
            return held
        return held if self._clock() - held.written_at <= self._forget_deletions_s else None


class MemoryTable:
    """An atomic store: a table of the memory database that holds the ledger too."""

    grade = Grade.ATOMIC
    runs_user_code = False
    batch_max = 1000

    def __init__(self, database: MemoryDatabase, name: str) -> None:
        self.database = database
        self.stored: dict[str, Stored] = database.table(name)
        self.writes: dict[int, Write] = database.table(f"{name} writes")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        for change in changes:
            stored = Stored(change.order, change.deleted, change.body, self.database.clock())
            self.database.set(self.stored, change.key, stored)
            write = Write(change.key, change.order, change.deleted, 0)
            self.database.set(self.writes, self.database.number(), write)

    async def read(self, keys: Sequence[str]) -> dict[str, Content]:
        return _contents(self.stored, keys)


def _contents(stored: Mapping[str, Stored], keys: Sequence[str]) -> dict[str, Content]:
    held = [(key, stored[key]) for key in keys if key in stored]
    return {
        key: Content(one.body, None if is_unversioned(one.order) else one.order[1])
        for key, one in held
        if not one.deleted
    }


def connect(address: Address) -> Sink | AtomicSink:
    """`memory://?grade=plain`, `conditional` or `atomic` (the default): lives and dies with the process."""
    options = address.take("grade", "table", "forget_deletions")
    grade = options.get("grade", "atomic")
    if grade == Grade.ATOMIC:
        return MemoryTable(address.shared(MemoryDatabase), options.get("table", address.name))
    if grade not in (Grade.PLAIN, Grade.CONDITIONAL):
        raise AddressError(f"grade={grade} is unknown; write atomic, conditional or plain")
    forget_s = seconds(options["forget_deletions"]) if "forget_deletions" in options else None
    return MemorySink(Grade(grade), forget_deletions_s=forget_s)
