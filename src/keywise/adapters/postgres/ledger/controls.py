"""What an operator sets in a Postgres database, and what the workers on it agree on."""

from collections.abc import Callable

from msgspec.structs import replace

from keywise.adapters.postgres.database import PostgresDatabase, postgres_errors
from keywise.adapters.postgres.ledger.working_set import PostgresScope, PostgresWorkingSet
from keywise.core import ledger_steps
from keywise.core.controls import Controls, Pause, controls_of, text_of
from keywise.core.entry import Claim, LedgerPolicy
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)
STORE = _SQL["store"]


class PostgresControlStore:
    """The control store of one scope of a Postgres database."""

    def __init__(self, database: PostgresDatabase, scope: PostgresScope, policy: LedgerPolicy) -> None:
        self._database = database
        self._scope = scope
        self._policy = policy

    async def controls(self) -> Controls:
        [[text]] = await self._database.read(_SQL["load"], self._scope.number)
        return controls_of(text)

    async def pause(self, pause: Pause) -> None:
        def change(controls: Controls) -> Controls:
            others = controls.without(pause.keys, pause.is_pattern)
            return replace(others, pauses=(*others.pauses, pause))

        await self._change(change)

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        async with self._database.transaction(scope=self._scope.number) as connection:
            with postgres_errors(self._database.name):
                working_set = PostgresWorkingSet(connection, self._scope.number, self._policy)
                await working_set.load([claim.key])
                era = ledger_steps.reset(working_set, claim)
                await working_set.store()
        return era

    async def raise_era(self) -> int | None:
        scope, now = self._scope.number, await self._database.now()
        async with self._database.transaction(scope=scope, exclusive=True) as connection:
            with postgres_errors(self._database.name):
                [[held, highest, text]] = await connection.fetch(_SQL["eras"], scope, now)
                if held:
                    return None
                controls = controls_of(text)
                era = 1 + max(controls.era, highest)
                await connection.execute(STORE, scope, text_of(replace(controls, era=era)))
        return int(era)

    async def keys(self, after: str, limit: int) -> list[str]:
        rows = await self._database.read(_SQL["keys"], self._scope.number, encoded(after), limit)
        return [decoded(code) for (code,) in rows]

    async def held(self, after: str, limit: int) -> list[str]:
        now = await self._database.now()
        rows = await self._database.read(_SQL["held_keys"], self._scope.number, encoded(after), now, limit)
        return [decoded(code) for (code,) in rows]

    async def acquire(self, task: str, every_s: float) -> bool:
        return bool(await self._database.write(_SQL["periodic_lock"], self._scope.number, task, every_s))

    async def note_resync(self, is_due: bool) -> None:
        """Of the operator's `mark_suspect`: what is set is changed while nobody decides about a key."""
        now = await self._database.now()
        await self._change(lambda controls: controls.with_resync(is_due, now))

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """What is set before and after; nobody decides about a key meanwhile."""
        scope = self._scope.number
        async with self._database.transaction(scope=scope, exclusive=True) as connection:
            with postgres_errors(self._database.name):
                text = await connection.fetchval(_SQL["load"], scope)
                before = controls_of(text)
                after = change(before)
                await connection.execute(STORE, scope, text_of(after))
        return before, after
