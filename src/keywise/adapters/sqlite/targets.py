"""Targets of a table in SQLite: tables beside the live one, which exchange their names with it in one transaction.

The live table always has the name of the sink. As a target it has a label, which becomes its name when it stops being
live. When a table is renamed, SQLite rewrites every mention of it, so its indexes and triggers stay with it. Views, and
triggers and foreign keys of other tables, would stay with the old table too, so keywise does not move the name of such
a table.
"""

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar

from keywise.adapters.sqlite.database import BUSY_S, SqliteDatabase, sqlite_errors
from keywise.core.errors import AdminError, SettingsError
from keywise.core.statements import quoted, read_statements
from keywise.core.table_targets import (
    FoundTable,
    check_definition,
    check_found,
    check_label,
    column_difference,
    columns_fault,
    creation_advice,
    dependents_fault,
    first_label,
    label_taken_error,
)
from keywise.core.target import TargetNote

T = TypeVar("T")

_SQL = read_statements(__name__)


class _Object(NamedTuple):
    """A table, index, trigger or view of the file."""

    kind: str
    name: str
    table: str
    """The table that it belongs to."""
    sql: str | None


class SqliteTargets:
    """The targets of one table. The methods that take a connection run in a transaction of the caller's."""

    def __init__(self, database: SqliteDatabase, name: str) -> None:
        self._database = database
        self._name = name

    async def current(self) -> str:
        with sqlite_errors(self._database.path):
            return self._label(self._database.reader)

    async def create(
        self,
        target: str,
        note: TargetNote,
        definition: bytes | None,
        fit: Callable[[sqlite3.Connection], None],
    ) -> None:
        """Create a target like the live table, or take over one that is empty; `fit` raises if it cannot be used."""
        check_definition(self._name, target, definition)

        def act(connection: sqlite3.Connection) -> None:
            label = self._check_not_live(connection, target)
            if _found(connection, label) is not None:
                raise label_taken_error(self._name, label)
            self._check_mentions(connection, label)
            if _found(connection, target) is None:
                connection.execute(_SQL["forget"], (self._name, target))
                self._create_like(connection, target, label)
            else:
                check_found(self._name, target, note, self._look_at(connection, target))
            try:
                fit(connection)
            except SettingsError as error:
                raise AdminError(str(error)) from error
            connection.execute(_SQL["note"], (self._name, target, note.pipeline, note.generation))

        await self._write(act)

    async def finish(self, target: str) -> list[str]:
        """Return why a target cannot go live."""

        def act(connection: sqlite3.Connection) -> list[str]:
            label = self._label(connection)
            if _found(connection, target) is None:
                return [f"there is no table {target}"]
            faults = []
            if difference := self._difference(connection, target):
                faults.append(columns_fault(self._name, target, difference))
            with _undone(connection):
                if mentions := _renamed(connection, self._name, label):
                    faults.append(dependents_fault(self._name, mentions))
            return faults

        return await self._write(act)

    async def count(self, target: str) -> int:
        check_label(target, "sqlite_")
        place = self._name if target.lower() == (await self.current()).lower() else target

        def counted() -> int:
            with sqlite_errors(self._database.path), self._explained():  # noqa: SIM117
                with closing(sqlite3.connect(self._database.path, timeout=BUSY_S)) as connection:
                    [[count]] = connection.execute(f"select count(*) from {quoted(place)}")  # noqa: S608
                    return int(count)

        # Counting may take long, so it blocks neither writers nor the event loop.
        return await asyncio.to_thread(counted)

    async def built(self, pipeline: str) -> list[str]:
        rows: Any = self._database.read(_SQL["built"], (self._name, pipeline))
        return [target for (target,) in rows]

    async def drop(self, target: str) -> None:
        def act(connection: sqlite3.Connection) -> None:
            self._check_not_live(connection, target)
            if _found(connection, target) is not None:
                if connection.execute(_SQL["noted"], (self._name, target)).fetchone() is None:
                    raise AdminError(f"no reindex has built the table {target}, so it is not dropped")
                connection.execute(f"drop table {quoted(target)}")
            connection.execute(_SQL["forget"], (self._name, target))

        await self._write(act)

    def exchange(self, connection: sqlite3.Connection, before: str, after: str) -> None:
        with sqlite_errors(self._database.path), self._explained():
            self._label(connection)
            for label in (before, after):
                check_label(label, "sqlite_")
            if _found(connection, before) is not None:
                raise AdminError(f"{self._name} cannot become {before}, because there is such a table already")
            if _found(connection, after) is None:
                raise AdminError(f"there is no table {after}")
            if difference := self._difference(connection, after):
                raise AdminError(columns_fault(self._name, after, difference))
            self._check_mentions(connection, before)
            _renamed(connection, self._name, before)
            _renamed(connection, after, self._name)
            connection.execute(_SQL["set_live"], (self._name, before, False))
            connection.execute(_SQL["set_live"], (self._name, after, True))

    def _label(self, connection: sqlite3.Connection) -> str:
        """Return what the live table is called as a target; raise `AdminError` if its name cannot move."""
        live = _found(connection, self._name)
        if live is None:
            raise AdminError(f"there is no table {self._name}")
        if live.kind == "view" or (live.sql or "").lower().startswith("create virtual"):
            raise AdminError(f"the name {self._name} cannot move to another table: it is no plain table")
        row = connection.execute(_SQL["live"], (self._name,)).fetchone()
        label = str(row[0]) if row is not None else first_label(self._name)
        check_label(label, "sqlite_")
        return label

    def _check_not_live(self, connection: sqlite3.Connection, target: str) -> str:
        """Return the label of the live table; raise `AdminError` if the target is that one."""
        check_label(target, "sqlite_")
        label = self._label(connection)
        if target.lower() in (self._name.lower(), label.lower()):
            raise AdminError(f"{target} is the live target of {self._name}")
        return label

    def _look_at(self, connection: sqlite3.Connection, target: str) -> FoundTable:
        """Describe a table that has the name of a new target already."""
        [is_empty] = connection.execute(f"select not exists (select 1 from {quoted(target)})").fetchone()  # noqa: S608
        noted = connection.execute(_SQL["noted"], (self._name, target)).fetchone()
        built_by = TargetNote(*noted) if noted is not None and noted[0] is not None else None
        return FoundTable(built_by, bool(is_empty), self._difference(connection, target))

    def _difference(self, connection: sqlite3.Connection, target: str) -> str:
        """Describe how the columns of a table differ from those of the live one; empty if they are the same."""
        mine, theirs = [_columns(connection, table) for table in (self._name, target)]
        return column_difference(
            mine, theirs, lambda one, wanted: f"{one[0] or 'without a type'}, and not {wanted[0] or 'without one'}"
        )

    def _check_mentions(self, connection: sqlite3.Connection, label: str) -> None:
        """Raise `AdminError` if renaming the live table rewrites more than its own parts, by trying it out."""
        with _undone(connection):
            mentions = _renamed(connection, self._name, label)
        if mentions:
            raise AdminError(dependents_fault(self._name, mentions))

    def _create_like(self, connection: sqlite3.Connection, target: str, label: str) -> None:
        """Create a table like the live one.

        The live table is renamed for a moment, so that SQLite itself puts the new name into the statements to run.
        """
        with _undone(connection):
            _renamed(connection, self._name, target)
            parts = [one for one in _objects(connection).values() if one.table.lower() == target.lower()]
        if triggers := [one.name for one in parts if one.kind == "trigger"]:
            raise AdminError(
                f"{self._name} has triggers, which a copy of it would not have: {', '.join(triggers)}; "
                f"{creation_advice(self._name, target)}"
            )
        [table] = (one.sql for one in parts if one.kind == "table")
        assert table is not None, "only indexes of constraints have no statement of their own"
        connection.execute(table)
        for one in parts:
            if one.kind == "index" and one.sql is not None:
                connection.execute(_renamed_index(one.name, one.sql, self._name, target, label))

    async def _write(self, act: Callable[[sqlite3.Connection], T]) -> T:
        def explained(connection: sqlite3.Connection) -> T:
            with self._explained():
                return act(connection)

        return await self._database.write(explained)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the error of a statement that SQLite refuses into `AdminError`: the name cannot move."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            raise AdminError(f"the name {self._name} cannot move to another table: {error}") from error


def _found(connection: sqlite3.Connection, name: str) -> _Object | None:
    row = connection.execute(_SQL["table"], (name,)).fetchone()
    return None if row is None else _Object(row[1], row[0], row[0], row[2])


def _objects(connection: sqlite3.Connection) -> Mapping[tuple[str, str], _Object]:
    return {(row[0], row[1]): _Object(*row) for row in connection.execute(_SQL["objects"])}


def _columns(connection: sqlite3.Connection, table: str) -> dict[str, tuple[str, int]]:
    return {name: (kind, hidden) for name, kind, hidden in connection.execute(_SQL["columns"], (table,))}


def _renamed(connection: sqlite3.Connection, before: str, after: str) -> list[str]:
    """Rename a table; return the objects besides its own parts that SQLite has rewritten."""
    objects = _objects(connection)
    connection.execute(f"alter table {quoted(before)} rename to {quoted(after)}")
    rewritten = _objects(connection)
    others = (one for one in objects.values() if one.table.lower() != before.lower())
    return [f"{one.kind} {one.name}" for one in others if rewritten[one.kind, one.name].sql != one.sql]


@contextmanager
def _undone(connection: sqlite3.Connection) -> Iterator[None]:
    """Roll back what the block does."""
    connection.execute("savepoint keywise_undone")
    try:
        yield
    finally:
        connection.execute("rollback to keywise_undone")
        connection.execute("release keywise_undone")


def _renamed_index(index: str, sql: str, table: str, target: str, label: str) -> str:
    """Return the statement that creates an index of the live table for a target, under a name of its own.

    SQLite stores the statement from the name of the index on as the user has written it.
    """
    parts = _INDEX.match(sql)
    if parts is None or _unquoted(parts[2]) != index:
        raise AdminError(f"the statement of index {index} cannot be read; {creation_advice(table, target)}")
    # The index begins with the name of its table; without this, each swap would put one more name before it.
    own = next((index.removeprefix(f"{one}_") for one in (label, table) if index.startswith(f"{one}_")), index)
    name = f"{target}_{own}".replace('"', '""')
    return f'{parts[1]}"{name}"{parts[3]}'


def _unquoted(name: str) -> str:
    quote = name[0]
    if quote == "[":
        return name[1:-1]
    return name[1:-1].replace(2 * quote, quote) if quote in "\"'`" else name


_INDEX = re.compile(
    r"""(CREATE\ (?:UNIQUE\ )?INDEX\ ) ("(?:[^"]|"")*"|'(?:[^']|'')*'|`(?:[^`]|``)*`|\[[^\]]*\]|[^\s("'`\[]+) (.*)""",
    re.VERBOSE | re.DOTALL,
)
