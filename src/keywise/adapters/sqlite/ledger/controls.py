"""What an operator sets in a SQLite file, and what the workers on it agree on."""

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.adapters.sqlite.ledger.working_set import (
    KEYS,
    SqliteScope,
    SqliteWorkingSet,
    load_controls,
    store_controls,
)
from keywise.core import ledger_steps
from keywise.core.controls import Controls, Pause
from keywise.core.entry import Claim, LedgerPolicy
from keywise.core.statements import read_statements

T = TypeVar("T")

_SQL = read_statements(__name__)


class SqliteControlStore:
    """The control store of one scope of a SQLite database."""

    def __init__(self, database: SqliteDatabase, scope: SqliteScope, policy: LedgerPolicy) -> None:
        self._database = database
        self._scope = scope
        self._policy = policy

    async def controls(self) -> Controls:
        with sqlite_errors(self._database.path):
            return load_controls(self._database.reader, self._scope.number)

    async def pause(self, pause: Pause) -> None:
        def act(connection: sqlite3.Connection, controls: Controls) -> None:
            others = controls.without(pause.keys, pause.is_pattern)
            store_controls(connection, self._scope.number, replace(others, pauses=(*others.pauses, pause)))

        await self._change(act)

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        def act(connection: sqlite3.Connection, controls: Controls) -> bool:
            others = controls.without(keys, is_pattern)
            store_controls(connection, self._scope.number, others)
            return others != controls

        return await self._change(act)

    async def reset(self, claim: Claim) -> int | None:
        def act(connection: sqlite3.Connection) -> int | None:
            working_set = SqliteWorkingSet(connection, self._scope.number, self._policy, self._database.now())
            working_set.load([claim.key])
            era = ledger_steps.reset(working_set, claim)
            working_set.store()
            return era

        return await self._database.write(act)

    async def raise_era(self) -> int | None:
        def act(connection: sqlite3.Connection, controls: Controls) -> int | None:
            scope, now = self._scope.number, self._database.now()
            if connection.execute(_SQL["held"], (scope, now)).fetchone() is not None:
                return None
            [highest] = connection.execute(_SQL["highest_era"], (scope, scope)).fetchone()
            era = 1 + max(controls.era, highest or 0)
            store_controls(connection, self._scope.number, replace(controls, era=era))
            return era

        return await self._change(act)

    async def keys(self, after: str, limit: int) -> list[str]:
        scope = self._scope.number
        return [str(key) for (key,) in self._database.read(KEYS, (scope, after, scope, after, limit))]

    async def held(self, after: str, limit: int) -> list[str]:
        wanted = (self._scope.number, after, self._database.now(), limit)
        return [str(key) for (key,) in self._database.read(_SQL["held_keys"], wanted)]

    async def acquire(self, task: str, every_s: float) -> bool:
        def act(connection: sqlite3.Connection) -> bool:
            now = self._database.now()
            return (
                connection.execute(_SQL["periodic_lock"], (self._scope.number, task, now, now - every_s)).rowcount > 0
            )

        return await self._database.write(act)

    async def _change(self, act: Callable[[sqlite3.Connection, Controls], T]) -> T:
        return await self._database.write(
            lambda connection: act(connection, load_controls(connection, self._scope.number))
        )
