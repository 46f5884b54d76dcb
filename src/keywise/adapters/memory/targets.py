"""Targets in memory: in a store with a name that stands for one of them, and as tables of a memory database."""

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.change import Order
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.table_targets import FoundTable, check_definition, check_found, first_label
from keywise.core.target import TargetNote


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


class MemoryTarget(msgspec.Struct, eq=False):
    """One target of a store: what it holds, and what it has accepted."""

    stored: dict[str, Stored] = {}
    writes: list[Write] = []
    note: TargetNote | None = None
    guards: set[int] = set()
    """The epochs of the moves that may bring the name here; each move uses its guard up."""


class MemoryStore:
    """Targets, and a name that stands for one of them; the sinks of one process share it."""

    def __init__(self, name: str = "store") -> None:
        self.name = name
        self.current = f"{name}-0"
        self.targets = {self.current: MemoryTarget()}

    def create(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        _check_object(definition)
        found = self.targets.get(target)
        if target == self.current or (found is not None and found.note != note):
            raise AdminError(f"there is a target {target!r} of another run, or the live one; name another")
        if found is None:
            self.targets[target] = MemoryTarget(note=note, guards={epoch})

    def move(self, before: str, after: str, epoch: int) -> None:
        """Move the name in one step, if its guard is there; a late copy of the call finds none, and changes nothing."""
        if after not in self.targets:
            raise AdminError(f"there is no target {after!r}")
        guards = self.targets[after].guards
        if epoch in guards and self.current == before:
            guards.remove(epoch)
            self.targets[before].guards.add(epoch + 1)
            self.current = after
        elif self.current != after:
            raise AdminError(f"{self.name} stands for {self.current!r}: it cannot move from {before!r} to {after!r}")

    def found(self, target: str) -> MemoryTarget:
        """Return a target; raise `UnavailableError` if there is none, which is no fault of a change."""
        if target not in self.targets:
            raise UnavailableError(f"there is no target {target!r}")
        return self.targets[target]

    def built(self, pipeline: str) -> list[str]:
        """Return the targets that runs of a pipeline have built, the oldest first."""
        return [name for name, one in self.targets.items() if one.note is not None and one.note.pipeline == pipeline]

    def drop(self, target: str) -> None:
        if target == self.current:
            raise AdminError(f"{target!r} is the live target of {self.name}")
        found = self.targets.get(target)
        if found is not None and found.note is None and not found.guards:
            raise AdminError(f"no reindex has built {target!r}, and {self.name} has never left it")
        self.targets.pop(target, None)


class MemoryTables:
    """The targets of a table of a memory database, with the notes that other databases keep in a table."""

    def __init__(self, database: MemoryDatabase, name: str) -> None:
        self._database = database
        self._name = name

    @property
    def current(self) -> str:
        """What the live table is called as a target."""
        live = (target for (name, target), (_, is_live) in self._notes.items() if name == self._name and is_live)
        return next(live, first_label(self._name))

    def place_of(self, target: str) -> str:
        """Return the name of the table that holds a target; the live one has the name of the sink."""
        return self._name if target == self.current else target

    def exists(self, target: str) -> bool:
        return target == self.current or target in self._database.tables

    def create(self, target: str, note: TargetNote, definition: bytes | None) -> None:
        check_definition(self._name, target, definition)
        if target in (self._name, self.current):
            raise AdminError(f"{target} is the live target of {self._name}")
        if self.current in self._database.tables:
            raise AdminError(f"there is a table {self.current}, which is the live table's name after the swap")
        if target in self._database.tables:
            built_by, _ = self._notes.get((self._name, target), (None, False))
            check_found(self._name, target, note, FoundTable(built_by, not self._database.table(target)))
        self._database.table(target)
        self._set_note(target, note)

    def built(self, pipeline: str) -> list[str]:
        """Return the targets that runs of a pipeline have built, the oldest first."""
        notes = [(target, note) for (name, target), (note, _) in self._notes.items() if name == self._name]
        return [target for target, note in notes if note is not None and note.pipeline == pipeline]

    def drop(self, target: str) -> None:
        if target in (self._name, self.current):
            raise AdminError(f"{target} is the live target of {self._name}")
        if (self._name, target) in self._notes:
            for table in (target, writes_of(target)):
                self._database.set(self._database.tables, table, None)
            self._database.set(self._notes, (self._name, target), None)
        elif target in self._database.tables:
            raise AdminError(f"no reindex has built the table {target}")

    def exchange(self, before: str, after: str) -> None:
        """Rename the live table to `before`, and the table `after` to the name of the sink."""
        tables = self._database.tables
        if before in tables or after not in tables:
            raise AdminError(f"there is a table {before} already, or no table {after}")
        # Each target is two tables: one of its name, and one that lists the writes to it.
        for name_of in (str, writes_of):
            self._database.set(tables, name_of(before), self._database.table(name_of(self._name)))
            self._database.set(tables, name_of(self._name), self._database.table(name_of(after)))
            self._database.set(tables, name_of(after), None)
        self._set_note(before, self._notes.get((self._name, before), (None, False))[0])
        self._set_note(after, self._notes.get((self._name, after), (None, False))[0], is_live=True)

    @property
    def _notes(self) -> dict[tuple[str, str], tuple[TargetNote | None, bool]]:
        return self._database.targets

    def _set_note(self, target: str, note: TargetNote | None, *, is_live: bool = False) -> None:
        self._database.set(self._notes, (self._name, target), (note, is_live))


def writes_of(table: str) -> str:
    """Return the name of the table that lists the writes to another one."""
    return f"{table} writes"


def _check_object(definition: bytes | None) -> None:
    """Raise `AdminError` if a definition is no JSON object; a store in memory uses nothing else of it."""
    if definition is None:
        return
    try:
        msgspec.json.decode(definition, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise AdminError(f"the definition of a target is a JSON object: {error}") from None
