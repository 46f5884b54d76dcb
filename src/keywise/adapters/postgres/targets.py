"""Targets of a table in Postgres: tables beside the live one, which exchange their names with it in one transaction.

The live table always has the name of the sink. As a target it has a label, which becomes its name when it stops being
live. Indexes, sequences, triggers and privileges belong to a table and stay with it when it is renamed. Views and
foreign keys of other tables would stay with the old table too, so keywise does not move the name of such a table.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from keywise.adapters.postgres.columns import COLUMNS, columns_of
from keywise.adapters.postgres.database import SLOW_S, PostgresDatabase, limit_each
from keywise.adapters.postgres.schema.install import LOCKS
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

COUNT_S = 600.0
"""How long it may take to count the rows of a table."""
FREE_S = 2.0
"""How long an exchange waits for its locks on both tables. New readers queue behind it meanwhile."""
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "p": "a partitioned table"}

_SQL = read_statements(__name__)


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """A table as the server describes it."""

    oid: int
    schema: str
    name: str
    kind: str
    is_part_of_another: bool
    is_inherited: bool
    persistence: str
    is_owned: bool
    owner: str
    options: str | None

    @property
    def key(self) -> str:
        """The name under which the database keeps the notes on its targets."""
        return f"{self.schema}.{self.name}"

    @property
    def obstacle(self) -> str:
        """Why its name cannot move; empty if it can."""
        if self.kind in _KINDS:
            return f"it is {_KINDS[self.kind]}; only the name of a plain table moves"
        if self.is_part_of_another or self.is_inherited:
            return "it is a partition, or inherits; only the name of a plain table moves"
        if self.persistence == "t":
            return "it is temporary; only the name of a plain table moves"
        if not self.is_owned:
            return f"only its owner {self.owner} may rename it; grant that role to the user of keywise"
        return ""

    def beside(self, target: str) -> str:
        """Return the name of a table in the same schema, as SQL."""
        return f"{_quoted_any(self.schema)}.{quoted(target)}"


class PostgresTargets:
    """The targets of one table."""

    def __init__(self, database: PostgresDatabase, name: str, table: str) -> None:
        self._database = database
        self._name = name
        """As the user writes it."""
        self._table = table
        """As SQL."""

    async def current(self) -> str:
        async with self._transaction() as connection:
            return await self._label(connection, await self._live(connection))

    async def place_of(self, connection: Any, target: str) -> str:
        """Return the table of a target that is not live, as SQL; it need not exist."""
        check_label(target, "pg_")
        return (await self._live(connection)).beside(target)

    async def create(
        self,
        target: str,
        note: TargetNote,
        definition: bytes | None,
        fit: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Create a target like the live table, or take over one that is empty; `fit` raises if it cannot be used."""
        check_definition(self._name, target, definition)
        async with self._transaction(locks=True) as connection:
            live = await self._live(connection)
            label = await self._label(connection, live)
            await self._check_not_live(connection, target, live, label)
            if await self._found(connection, live.beside(label)) is not None:
                raise label_taken_error(self._name, label)
            found = await self._found(connection, live.beside(target))
            if found is None:
                await connection.execute(_SQL["forget"], live.key, target)
                await self._create_like(connection, live, target)
            else:
                check_found(self._name, target, note, await self._look_at(connection, live, found))
            await self._check_dependents(connection, live, target)
            try:
                await fit(connection)
            except SettingsError as error:
                raise AdminError(str(error)) from error
            await connection.execute(_SQL["note"], live.key, target, note.pipeline, note.generation)

    async def finish(self, target: str) -> list[str]:
        """Analyze a new target once, so that queries on it are planned well; return why the target cannot go live."""
        async with self._transaction() as connection:
            live = await self._live(connection)
            found = await self._found(connection, live.beside(target))
            if found is None:
                return [f"there is no table {target}"]
            if not await connection.fetchval(_SQL["is_analyzed"], found.oid):
                await connection.execute(f"analyze {live.beside(target)}")
            faults = [f"table {target}: {found.obstacle}"] if found.obstacle else []
            if difference := await self._difference(connection, live, found):
                faults.append(columns_fault(self._name, target, difference))
            faults += [
                f"{role} may {privilege} on {self._name}, and not on {target}; grant it"
                for role, privilege in await connection.fetch(_SQL["missing_grants"], live.oid, found.oid)
            ]
            if dependents := await self._dependents(connection, live):
                faults.append(dependents_fault(self._name, dependents))
            return faults

    async def count(self, target: str) -> int:
        async with self._transaction(COUNT_S) as connection:
            # The sessions of keywise avoid scans, for plans that are made while a table is small.
            await connection.execute("set local enable_seqscan = on")
            live = await self._live(connection)
            is_live = target == await self._label(connection, live)
            place = self._table if is_live else live.beside(target)
            [[count]] = await connection.fetch(f"select count(*) from {place}", timeout=COUNT_S)  # noqa: S608
        return int(count)

    async def built(self, pipeline: str) -> list[str]:
        async with self._transaction() as connection:
            live = await self._live(connection)
            rows = await connection.fetch(_SQL["built"], live.key, pipeline, live.schema)
        return [target for (target,) in rows]

    async def drop(self, target: str) -> None:
        check_label(target, "pg_")
        async with self._transaction(locks=True) as connection:
            live = await self._live(connection)
            await self._check_not_live(connection, target, live, await self._label(connection, live))
            if await self._found(connection, live.beside(target)) is not None:
                if await connection.fetchrow(_SQL["noted"], live.key, target) is None:
                    raise AdminError(f"no reindex has built the table {target}, so it is not dropped")
                try:
                    await connection.execute(f"drop table {live.beside(target)}", timeout=SLOW_S)
                except asyncpg.DependentObjectsStillExistError as error:
                    raise AdminError(f"{error}: {error.detail}") from error
            await connection.execute(_SQL["forget"], live.key, target)

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        for label in (before, after):
            check_label(label, "pg_")
        async with self._database.answered(limit_each(SLOW_S)):
            live = await self._live(connection)
            await self._lock(connection, live.beside(live.name), live.beside(after))
            if await self._found(connection, live.beside(before)) is not None:
                raise AdminError(f"{self._name} cannot become {before}, because there is such a table already")
            found = await self._found(connection, live.beside(after))
            assert found is not None, "it is locked"
            if found.obstacle:
                raise AdminError(f"table {after}: {found.obstacle}")
            if difference := await self._difference(connection, live, found):
                raise AdminError(columns_fault(self._name, after, difference))
            await self._check_dependents(connection, live, after)
            await connection.execute(f"alter table {live.beside(live.name)} rename to {quoted(before)}")
            await connection.execute(f"alter table {live.beside(after)} rename to {_quoted_any(live.name)}")
            await connection.execute(_SQL["set_live"], live.key, before, False)
            await connection.execute(_SQL["set_live"], live.key, after, True)

    async def _lock(self, connection: Any, *tables: str) -> None:
        """Lock the tables against readers and writers; raise `AdminError` if one of them is in use for too long."""
        limit_ms = await connection.fetchval("select current_setting('lock_timeout')")
        try:
            await connection.execute(f"select set_config('lock_timeout', '{round(FREE_S * 1000)}ms', true)")
            await connection.execute(f"lock table {', '.join(tables)} in access exclusive mode")
            await connection.execute("select set_config('lock_timeout', $1, true)", limit_ms)
        except asyncpg.LockNotAvailableError as error:
            raise AdminError(
                f"a transaction of another application uses {self._name} for longer than {FREE_S:g} s; end it, and "
                "the swap is tried again"
            ) from error
        except asyncpg.UndefinedTableError as error:
            raise AdminError(f"a table of the swap is missing: {error}") from error

    async def _live(self, connection: Any) -> _Table:
        """Return the live table; raise `AdminError` if its name cannot move."""
        live = await self._found(connection, self._table)
        if live is None:
            raise AdminError(f"there is no table {self._name}")
        if live.obstacle:
            raise AdminError(f"the name {self._name} cannot move to another table: {live.obstacle}")
        return live

    async def _label(self, connection: Any, live: _Table) -> str:
        label: str = await connection.fetchval(_SQL["live"], live.key) or first_label(live.name)
        check_label(label, "pg_")
        return label

    async def _check_not_live(self, connection: Any, target: str, live: _Table, label: str) -> None:
        check_label(target, "pg_")
        if target in (live.name, label):
            raise AdminError(f"{target} is the live target of {self._name}")

    async def _found(self, connection: Any, table: str) -> _Table | None:
        row = await connection.fetchrow(_SQL["table"], table)
        return None if row is None else msgspec.convert(list(row), _Table)

    async def _look_at(self, connection: Any, live: _Table, found: _Table) -> FoundTable:
        """Describe a table that has the name of a new target already."""
        if found.obstacle:
            raise AdminError(f"table {found.name} cannot go live: {found.obstacle}")
        noted = await connection.fetchrow(_SQL["noted"], live.key, found.name)
        is_empty = await connection.fetchval(f"select not exists (select 1 from {live.beside(found.name)})")  # noqa: S608
        built_by = TargetNote(*noted) if noted is not None and noted[0] is not None else None
        return FoundTable(built_by, is_empty, await self._difference(connection, live, found))

    async def _create_like(self, connection: Any, live: _Table, target: str) -> None:
        if left_behind := [name for (name,) in await connection.fetch(_SQL["not_copied"], live.oid)]:
            raise AdminError(
                f"{self._name} has what a table that is created like it has not: {', '.join(left_behind)}; "
                f"{creation_advice(self._name, target)}"
            )
        kind, options = "unlogged table" if live.persistence == "u" else "table", ""
        if live.options:
            options = f" with ({live.options})"
        place = live.beside(target)
        await connection.execute(f"create {kind} {place} (like {live.beside(live.name)} including all){options}")
        for (grant,) in await connection.fetch(_SQL["grants"], live.oid, place):
            await connection.execute(grant)
        if live.owner != await connection.fetchval("select current_user"):
            await connection.execute(f"alter table {place} owner to {_quoted_any(live.owner)}")

    async def _difference(self, connection: Any, live: _Table, found: _Table) -> str:
        """Describe how the columns of a table differ from those of the live one; empty if they are the same."""
        mine, theirs = [columns_of(await connection.fetch(COLUMNS, live.beside(table.name))) for table in (live, found)]
        return column_difference(
            mine, theirs, lambda one, wanted: f"{one.type}, and not {wanted.type} with the same collation"
        )

    async def _dependents(self, connection: Any, live: _Table) -> list[str]:
        return [name for (name,) in await connection.fetch(_SQL["dependents"], live.oid)]

    async def _check_dependents(self, connection: Any, live: _Table, target: str) -> None:
        if dependents := await self._dependents(connection, live):
            if any(target in one for one in dependents):
                raise AdminError(f"{dependents_fault(self._name, dependents)}; {creation_advice(self._name, target)}")
            raise AdminError(dependents_fault(self._name, dependents))

    @asynccontextmanager
    async def _transaction(self, limit_s: float = SLOW_S, *, locks: bool = False) -> AsyncIterator[Any]:
        """Open a transaction; with `locks`, take the advisory lock for creating and dropping tables."""
        limit = limit_each(limit_s)
        async with self._database.transaction(limit=limit) as connection, self._database.answered(limit):
            if locks:
                await connection.execute(f"select pg_advisory_xact_lock({LOCKS}, 0)")
            yield connection


def _quoted_any(name: str) -> str:
    """Return a name of the catalog in quotes; unlike those that `quoted` takes, it may have quotes itself."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
