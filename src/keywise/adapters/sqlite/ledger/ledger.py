"""The ledger in a SQLite file: the rules, applied under the file's write lock.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from msgspec.structs import astuple

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.adapters.sqlite.ledger.dump import SqliteLedgerTransfer
from keywise.adapters.sqlite.ledger.transaction import SqliteTransaction
from keywise.adapters.sqlite.ledger.working_set import (
    ADD_RECORD,
    SqliteScope,
    SqliteWorkingSet,
    letter_of,
    load_controls,
)
from keywise.core import ledger_steps
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls, Pause
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, Entry, LeaseTerms, LedgerPolicy, Phase
from keywise.core.history import HistoryRecord
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.resource import opening
from keywise.core.statements import read_statements
from keywise.core.transaction import Transaction
from keywise.core.url import Address

PRUNE_AT_ONCE = 10_000
"""Nobody has to wait for longer than such a stretch takes."""

_SQL = read_statements(__name__)


class SqliteLedger:
    """The ledger of one pipeline in a SQLite database. It is also its own operator, control store and history store."""

    def __init__(self, database: SqliteDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.scope = SqliteScope(database, scope, policy)
        self.admin = self.control_store = self.history_store = self
        self.transfer = SqliteLedgerTransfer(self.scope)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            self.scope.number = await self.database.numbered(_SQL["number"], _SQL["register"], self.scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        def act(working_set: SqliteWorkingSet) -> ClaimResults:
            return ledger_steps.claim(working_set, headers, terms, iter(working_set.tokens(len(headers))))

        return await self.scope.run([header.key for header in headers], act)

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        return await self.scope.run(
            _keys(claims), lambda working_set: ledger_steps.renew(working_set, claims, lease_s, phase)
        )

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        keys = [advance.claim.key for advance in advances]
        return await self.scope.run(keys, lambda working_set: ledger_steps.advance(working_set, advances))

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        keys = [commit.claim.key for commit in commits]
        return await self.scope.run(keys, lambda working_set: ledger_steps.commit(working_set, commits))

    async def fail(self, failures: Sequence[Failure]) -> None:
        keys = [failure.claim.key for failure in failures]
        await self.scope.run(keys, lambda working_set: ledger_steps.fail(working_set, failures))

    async def release(self, claims: Sequence[Claim]) -> None:
        await self.scope.run(_keys(claims), lambda working_set: ledger_steps.release(working_set, claims))

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        keys = [request.claim.key for request in requests if request.claim is not None]
        return await self.scope.run(keys, lambda working_set: ledger_steps.dead_letter(working_set, requests))

    async def prune(self, retention_s: float) -> int:
        total, after = 0, ""
        while keys := await self.keys(after, PRUNE_AT_ONCE):
            total += await self.scope.run(keys, lambda working_set: working_set.prune(retention_s))
            after = keys[-1]
        return total

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction() as connection:
            yield SqliteTransaction(self.scope, connection)

    async def inspect(self, key: str) -> Entry | None:
        with sqlite_errors(self.database.path):
            working_set = SqliteWorkingSet(self.scope, self.database.reader)
            working_set.load([key])
            return working_set.entry(key)

    async def counts(self) -> LedgerCounts:
        now = self.database.now()
        scope = self.scope.number
        [row] = self.database.read(_SQL["counts"], (scope, scope, now, scope, scope, scope))
        return LedgerCounts(*row)  # type: ignore[arg-type]

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = self.database.now() - quiet_s
        return [str(key) for (key,) in self.database.read(_SQL["suspects"], (self.scope.number, since, limit))]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        await self.scope.run([claim.key], lambda working_set: ledger_steps.finish_repair(working_set, claim, written))

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        def act(working_set: SqliteWorkingSet) -> None:
            ledger_steps.mark_suspect(working_set, headers)
            working_set.set_controls(working_set.controls.with_resync(resync_due, working_set.now))

        await self.scope.run([header.key for header in headers], act)

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        since, until = max(matching.since, -_FOREVER_S), min(matching.until, _FOREVER_S)
        rows: Any = self.database.read(_SQL["dead_letters"], (self.scope.number, since, until, matching.cause, limit))
        return [(number, buried_at, letter_of(letter)) for number, buried_at, *letter in rows]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        rows = [(self.scope.number, number) for number in numbers]
        delete = _SQL["delete_dead_letter"]
        return await self.database.write(lambda connection: connection.executemany(delete, rows).rowcount)

    async def now(self) -> float:
        return self.database.now()

    # What an operator sets, and what the workers agree on.

    async def controls(self) -> Controls:
        with sqlite_errors(self.database.path):
            return load_controls(self.database.reader, self.scope.number)

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        return await self.scope.run([claim.key], lambda working_set: ledger_steps.reset(working_set, claim))

    async def raise_era(self) -> int | None:
        def step(working_set: SqliteWorkingSet) -> int | None:
            is_held, highest = working_set.eras()
            if is_held:
                return None
            raised = working_set.controls.with_era_above(highest)
            working_set.set_controls(raised)
            return raised.era

        return await self.scope.run([], step)

    async def fix_scale(self, scale: str) -> str:
        _, after = await self._change(lambda controls: controls.with_scale(scale))
        return after.scale

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        found, _ = await self._change(lambda controls: after if controls == before else controls)
        return found == before

    async def highest_generation(self) -> int:
        [[highest]] = self.database.read(_SQL["highest_generation"], (self.scope.number,))
        return int(highest)  # type: ignore[call-overload, no-any-return]

    async def keys(self, after: str, limit: int) -> list[str]:
        scope = self.scope.number
        return [str(key) for (key,) in self.database.read(_SQL["keys"], (scope, after, scope, after, limit))]

    async def held(self, after: str, limit: int) -> list[str]:
        wanted = (self.scope.number, after, self.database.now(), limit)
        return [str(key) for (key,) in self.database.read(_SQL["held_keys"], wanted)]

    async def acquire(self, task: str, every_s: float) -> bool:
        return await self.scope.run([], lambda working_set: working_set.acquire_lock(task, every_s))

    # The history.

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        scope = self.scope.number
        rows = [(scope, *astuple(record)) for record in records]
        await self.database.write(lambda connection: connection.executemany(ADD_RECORD, rows))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is None:
            rows: Any = self.database.read(_SQL["history"], (self.scope.number, limit))
        else:
            rows = self.database.read(_SQL["history_of_key"], (self.scope.number, key, limit))
        return [HistoryRecord(*row) for row in rows]

    async def trim(self, age_s: float, records_max: int) -> int:
        scope, oldest = self.scope.number, self.database.now() - age_s
        return await self.database.execute(_SQL["trim_history"], (scope, oldest, scope, records_max))

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """Change the controls in one atomic step; return them before and after."""

        def step(working_set: SqliteWorkingSet) -> tuple[Controls, Controls]:
            after = change(working_set.controls)
            working_set.set_controls(after)
            return working_set.controls, after

        return await self.scope.run([], step)


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`sqlite:///file.db`; the scope is the pipeline's name."""
    address.take()
    return SqliteLedger(address.shared(SqliteDatabase, address.file()), address.name, policy)


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.key for claim in claims]


_FOREVER_S = 1e15
