"""The ledger in a SQLite file: the rules, applied under the file's write lock.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

from keywise.adapters.sqlite.database import SqliteDatabase, sqlite_errors
from keywise.adapters.sqlite.ledger.controls import SqliteControlStore
from keywise.adapters.sqlite.ledger.dump import SqliteLedgerTransfer
from keywise.adapters.sqlite.ledger.history import SqliteHistoryStore
from keywise.adapters.sqlite.ledger.transaction import SqliteTransaction
from keywise.adapters.sqlite.ledger.working_set import SqliteScope, SqliteWorkingSet, letter_of
from keywise.core import ledger_steps
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim, Entry, LeaseTerms, LedgerPolicy
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.resource import opening
from keywise.core.statements import read_statements
from keywise.core.transaction import Transaction
from keywise.core.url import Address

_SQL = read_statements(__name__)


class SqliteLedger:
    """The ledger of one pipeline in a SQLite database. It is also its own operator."""

    def __init__(self, database: SqliteDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.scope = SqliteScope(database, scope, policy)
        self.admin = self
        self.control_store = SqliteControlStore(self.scope)
        self.history_store = SqliteHistoryStore(self.scope)
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

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        return await self.scope.run(_keys(claims), lambda working_set: ledger_steps.renew(working_set, claims, lease_s))

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        return await self.scope.run(_keys(claims), lambda working_set: ledger_steps.commit(working_set, claims))

    async def fail(self, failures: Sequence[Failure]) -> None:
        keys = [failure.claim.key for failure in failures]
        await self.scope.run(keys, lambda working_set: ledger_steps.fail(working_set, failures))

    async def release(self, claims: Sequence[Claim]) -> None:
        await self.scope.run(_keys(claims), lambda working_set: ledger_steps.release(working_set, claims))

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        keys = [request.claim.key for request in requests if request.claim is not None]
        return await self.scope.run(keys, lambda working_set: ledger_steps.dead_letter(working_set, requests))

    async def prune(self, retention_s: float) -> int:
        def act(working_set: SqliteWorkingSet) -> tuple[int, str | None]:
            return working_set.prune(after or "", retention_s)

        total = 0
        after: str | None = ""
        while after is not None:
            pruned, after = await self.scope.run([], act)
            total += pruned
        return total

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        with sqlite_errors(self.database.path):
            working_set = SqliteWorkingSet(
                self.database.reader, self.scope.number, self.scope.policy, self.database.now()
            )
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
        return await self.scope.run([], lambda working_set: working_set.delete_dead_letters(numbers))

    async def now(self) -> float:
        return self.database.now()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction() as connection:
            yield SqliteTransaction(self.scope, connection)


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`sqlite:///file.db`; the scope is the pipeline's name."""
    address.take()
    return SqliteLedger(address.shared(SqliteDatabase, address.file()), address.name, policy)


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.key for claim in claims]


_FOREVER_S = 1e15
