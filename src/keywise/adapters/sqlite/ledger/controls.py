"""What an operator sets in a SQLite file, and what the workers on it agree on."""

from collections.abc import Callable

from keywise.adapters.sqlite.database import sqlite_errors
from keywise.adapters.sqlite.ledger.working_set import KEYS, SqliteScope, SqliteWorkingSet, load_controls
from keywise.core import ledger_steps
from keywise.core.controls import Controls, Pause
from keywise.core.entry import Claim
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)


class SqliteControlStore:
    """The control store of one scope of a SQLite database."""

    def __init__(self, scope: SqliteScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def controls(self) -> Controls:
        with sqlite_errors(self._database.path):
            return load_controls(self._database.reader, self._scope.number)

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        return await self._scope.run([claim.key], lambda working_set: ledger_steps.reset(working_set, claim))

    async def raise_era(self) -> int | None:
        def step(working_set: SqliteWorkingSet) -> int | None:
            is_held, highest = working_set.eras()
            if is_held:
                return None
            raised = working_set.controls.with_era_above(highest)
            working_set.set_controls(raised)
            return raised.era

        return await self._scope.run([], step)

    async def keys(self, after: str, limit: int) -> list[str]:
        scope = self._scope.number
        return [str(key) for (key,) in self._database.read(KEYS, (scope, after, scope, after, limit))]

    async def held(self, after: str, limit: int) -> list[str]:
        wanted = (self._scope.number, after, self._database.now(), limit)
        return [str(key) for (key,) in self._database.read(_SQL["held_keys"], wanted)]

    async def acquire(self, task: str, every_s: float) -> bool:
        return await self._scope.run([], lambda working_set: working_set.acquire(task, every_s))

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """What is set before and after."""

        def step(working_set: SqliteWorkingSet) -> tuple[Controls, Controls]:
            after = change(working_set.controls)
            working_set.set_controls(after)
            return working_set.controls, after

        return await self._scope.run([], step)
