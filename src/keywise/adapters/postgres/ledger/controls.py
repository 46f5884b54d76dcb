"""What an operator sets in a Postgres database, and what the workers on it agree on."""

from collections.abc import Callable

from keywise.adapters.postgres.ledger.working_set import PostgresScope
from keywise.core import ledger_steps
from keywise.core.controls import Controls, Pause, controls_of, text_of
from keywise.core.entry import Claim
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import read_statements

_SQL = read_statements(__name__)
STORE = _SQL["store"]


class PostgresControlStore:
    """The control store of one scope of a Postgres database."""

    def __init__(self, scope: PostgresScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def controls(self) -> Controls:
        [[text]] = await self._database.read(_SQL["load"], self._scope.number)
        return controls_of(text)

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        async with self._scope.working_set([claim.key]) as working_set:
            return ledger_steps.reset(working_set, claim)

    async def raise_era(self) -> int | None:
        scope, now = self._scope.number, await self._database.now()
        async with self._scope.transaction(exclusive=True) as connection:
            [[held, highest, text]] = await connection.fetch(_SQL["eras"], scope, now)
            if held:
                return None
            raised = controls_of(text).with_era_above(highest)
            await connection.execute(STORE, scope, text_of(raised))
        return raised.era

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
        async with self._scope.transaction(exclusive=True) as connection:
            before = controls_of(await connection.fetchval(_SQL["load"], self._scope.number))
            after = change(before)
            await connection.execute(STORE, self._scope.number, text_of(after))
        return before, after
