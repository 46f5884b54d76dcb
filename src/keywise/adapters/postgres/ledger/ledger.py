"""The ledger in a Postgres database: the rules, applied to entries whose rows are locked.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, TypeVar

import msgspec

from keywise.adapters.postgres.database import OPTIONS, PostgresDatabase, database_at, opening, postgres_errors
from keywise.adapters.postgres.ledger.controls import PostgresControlStore
from keywise.adapters.postgres.ledger.dump import PostgresLedgerTransfer
from keywise.adapters.postgres.ledger.history import PostgresHistoryStore
from keywise.adapters.postgres.ledger.transaction import PostgresTransaction
from keywise.adapters.postgres.ledger.working_set import PostgresScope, PostgresWorkingSet, entry_of, headers_of
from keywise.core import ledger_steps as bookkeeping
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim, Entry, LeaseTerms, LedgerPolicy
from keywise.core.key_encoding import decoded, encoded
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.transaction import MarkingTransaction, Transaction
from keywise.core.url import Address

T = TypeVar("T")

PRUNE_AT_ONCE = 2_000
"""Nobody has to wait for longer than such a stretch takes."""


class PostgresLedger:
    """The ledger of one pipeline in a Postgres database. It is also its own operator."""

    def __init__(self, database: PostgresDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.scope = PostgresScope(scope)
        self._policy = policy
        self.admin = self
        self.control_store = PostgresControlStore(database, self.scope, policy)
        self.history_store = PostgresHistoryStore(database, self.scope)
        self.transfer = PostgresLedgerTransfer(database, self.scope, policy)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self.database.write(_REGISTER, self.scope.name)
            [[self.scope.number]] = await self.database.write(_NUMBER, self.scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async with self._working_set([header.key for header in headers]) as working_set:
            return bookkeeping.claim(working_set, headers, terms, await working_set.tokens(len(headers)))

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        async with self._working_set(_keys(claims)) as working_set:
            return bookkeeping.renew(working_set, claims, lease_s)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """If the answer is lost, it is repeated: what arrived is told by the mark."""
        async with self._working_set(_keys(claims)) as working_set:
            return bookkeeping.commit(working_set, claims)

    async def fail(self, failures: Sequence[Failure]) -> None:
        async with self._working_set([failure.claim.key for failure in failures]) as working_set:
            bookkeeping.fail(working_set, failures)

    async def release(self, claims: Sequence[Claim]) -> None:
        async with self._working_set(_keys(claims)) as working_set:
            bookkeeping.release(working_set, claims)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async with self._working_set(
            [request.claim.key for request in requests if request.claim is not None]
        ) as working_set:
            return bookkeeping.dead_letter(working_set, requests)

    async def prune(self, retention_s: float) -> int:
        total, after = 0, b""
        oldest = math.ceil(await self.database.now() - retention_s)
        while rows := await self.database.read(_OLD, self.scope.number, after, oldest, PRUNE_AT_ONCE):
            async with self._working_set([]) as working_set:
                total += await working_set.prune([decoded(code) for (code,) in rows], retention_s)
            after = rows[-1][0]
        return total

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    def marking_transaction(self) -> AbstractAsyncContextManager[MarkingTransaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        rows = await self.database.read(_INSPECT, self.scope.number, encoded(key))
        entry = entry_of(rows[0], rows[0][5]) if rows else None
        if self._policy.rate is not None:
            for (at,) in await self.database.read(_RATE_AT, self.scope.number, encoded(key)):
                entry = msgspec.structs.replace(entry or Entry(), rate_at=at)
        return entry

    async def counts(self) -> LedgerCounts:
        [row] = await self.database.read(_COUNTS, self.scope.number, await self.database.now())
        return LedgerCounts(*row)

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = await self.database.now() - quiet_s
        rows = await self.database.read(_SUSPECTS, self.scope.number, since, limit)
        return [decoded(code) for (code,) in rows]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async with self._working_set([claim.key]) as working_set:
            bookkeeping.finish_repair(working_set, claim, written)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async with self._working_set([header.key for header in headers]) as working_set:
            bookkeeping.mark_suspect(working_set, headers)
        if resync_due is not None:
            await self.control_store.note_resync(resync_due)

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        cause = matching.cause.replace("\0", "\ufffd")
        rows = await self.database.read(_LETTERS, self.scope.number, matching.since, matching.until, cause, limit)
        return [
            (number, buried_at, DeadLetter(cause, body, decoded(code), version, headers_of(headers), sent_at, source))
            for number, buried_at, cause, body, code, version, headers, sent_at, source in rows
        ]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        return len(await self.database.write(_DROP, self.scope.number, list(numbers)))

    async def now(self) -> float:
        return await self.database.now()

    @asynccontextmanager
    async def _working_set(self, keys: Sequence[str]) -> AsyncIterator[PostgresWorkingSet]:
        """Keys that are locked and read, and written back with a commit."""
        async with self.database.transaction(scope=self.scope.number) as connection:
            with postgres_errors(self.database.name):
                working_set = PostgresWorkingSet(connection, self.scope.number, self._policy, self.database.ahead_s)
                await working_set.load(keys)
                yield working_set
                await working_set.store()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[PostgresTransaction]:
        async with self.database.transaction(scope=self.scope.number) as connection:
            transaction = PostgresTransaction(self.database, self.scope.number, self._policy, connection)
            yield transaction
            await transaction.tidy()


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`postgresql://user@host/database`; the scope is the pipeline's name."""
    return PostgresLedger(database_at(address, address.take(*OPTIONS)), address.name, policy)


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.key for claim in claims]


_REGISTER = "insert into keywise_scopes (name) values ($1) on conflict (name) do nothing"
_NUMBER = "select id from keywise_scopes where name = $1"
_OLD = (
    "select key from keywise_marks where scope = $1 and key > $2 and (updated_at < $3 or active) order by key limit $4"
)
_INSPECT = (
    "select era, version, generation, deleted, updated_at, (select entry from keywise_active as active "
    "where active.scope = $1 and active.key = $2) from keywise_marks where scope = $1 and key = $2"
)
_RATE_AT = "select at from keywise_rates where scope = $1 and key = $2"
_COUNTS = (
    "select (select count(*) from keywise_marks where scope = $1 and version is not null), "
    "(select count(*) from keywise_marks where scope = $1 and deleted), "
    "(select count(*) from keywise_active where token != 0 and lease_until > $2 and scope = $1), "
    "(select count(*) from keywise_active where scope = $1 and suspicions > 0), "
    "(select count(*) from keywise_letters where scope = $1)"
)
_SUSPECTS = "select key from keywise_active where scope = $1 and suspect_since <= $2 order by suspect_since limit $3"
_LETTERS = (
    "select id, buried_at, cause, body, key, version, headers, sent_at, source from keywise_letters "
    "where scope = $1 and buried_at >= $2 and buried_at < $3 and position($4::text in cause) > 0 "
    "order by buried_at desc, id desc limit $5"
)
_DROP = "delete from keywise_letters where scope = $1 and id = any($2::bigint[]) returning 1"
