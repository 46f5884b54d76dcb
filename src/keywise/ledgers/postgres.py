"""The ledger in a Postgres database: the rules, applied to entries whose rows are locked.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self, TypeVar

import asyncpg
import msgspec

from keywise import rules
from keywise.address import Address
from keywise.change import Order, Want
from keywise.databases.postgres import OPTIONS, PostgresDatabase, database_at, numbers, opening, postgres_errors
from keywise.databases.postgres_book import (
    MARK,
    MARK_NEWER,
    Book,
    Scope,
    are_plain,
    decoded,
    encoded,
    entry_of,
    mark_of,
    marks_of_wants,
)
from keywise.databases.postgres_governor import PostgresGovernor
from keywise.databases.postgres_historian import PostgresHistorian
from keywise.entry import Claim, Entry, Policy, Refusal, Terms, Verdict
from keywise.errors import DatabaseError
from keywise.protocols import EVERY_LETTER, Answers, Burial, Census, Failure, Letter, Sought, Transaction
from keywise.standing import PLAIN

T = TypeVar("T")

SCHEMES = ("postgresql", "postgres")

PRUNE_AT_ONCE = 2_000
"""Nobody has to wait for longer than such a stretch takes."""


class PostgresLedger:
    """The ledger of one pipeline in a Postgres database. It is also its own operator."""

    def __init__(self, database: PostgresDatabase, scope: str, policy: Policy) -> None:
        self.database = database
        self.scope = Scope(scope)
        self._policy = policy
        self.operator = self
        self.governor = PostgresGovernor(database, self.scope, policy)
        self.historian = PostgresHistorian(database, self.scope)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self.database.write(_REGISTER, self.scope.name)
            [[self.scope.number]] = await self.database.write(_NUMBER, self.scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def claim(self, wants: Sequence[Want], terms: Terms) -> Answers:
        async with self._book([want.key for want in wants]) as book:
            answers, tokens = Answers(), await book.tokens(len(wants))
            for want, token in zip(sorted(wants, key=lambda want: want.key), tokens, strict=True):
                entry = book.entry(want.key)
                refusal = rules.decide_under(book.standing, entry, want, book.now, self._policy, terms)
                if refusal is not None:
                    answers.refused[want.key] = refusal
                    continue
                lifted = rules.in_era(want, entry, book.standing)
                after, claim = rules.grant(entry, lifted, token, book.now, terms, self._policy)
                book.set(want.key, after)
                answers.granted.append(claim)
        return answers

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        lost = []
        async with self._book([claim.key for claim in claims]) as book:
            for claim in claims:
                entry = rules.renew(book.entry(claim.key), claim, book.now, lease_s)
                if entry is None:
                    lost.append(claim)
                else:
                    book.set(claim.key, entry)
        return lost

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """If the answer is lost, it is repeated: what arrived is told by the mark."""
        async with self._book([claim.key for claim in claims]) as book:
            return self._commit(book, claims, (Verdict.COMMITTED, Verdict.ALREADY))

    async def fail(self, failures: Sequence[Failure]) -> None:
        async with self._book([failure.claim.key for failure in failures]) as book:
            for failure in failures:
                claim, sure = failure.claim, failure.certainty
                entry = book.entry(claim.key)
                book.set(claim.key, rules.fail(entry, claim, sure, failure.retry_s, book.now, self._policy))

    async def release(self, claims: Sequence[Claim]) -> None:
        async with self._book([claim.key for claim in claims]) as book:
            for claim in claims:
                book.set(claim.key, rules.release(book.entry(claim.key), claim))

    async def bury(self, burials: Sequence[Burial]) -> list[Claim]:
        lost = []
        async with self._book([burial.claim.key for burial in burials if burial.claim is not None]) as book:
            for burial in burials:
                if (claim := burial.claim) is not None:
                    entry = book.entry(claim.key)
                    if entry is None or entry.token != claim.token:
                        lost.append(claim)
                        continue
                    book.set(claim.key, rules.bury(entry, claim, burial.certainty, book.now, self._policy))
                book.keep(burial.letter)
        return lost

    async def prune(self, retention_s: float) -> int:
        total, after = 0, b""
        oldest = math.ceil(await self.database.now() - retention_s)
        while rows := await self.database.read(_OLD, self.scope.number, after, oldest, PRUNE_AT_ONCE):
            async with self._book([]) as book:
                total += await book.prune([decoded(code) for (code,) in rows], retention_s)
            after = rows[-1][0]
        return total

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        rows = await self.database.read(_INSPECT, self.scope.number, encoded(key))
        entry = entry_of(rows[0], rows[0][5]) if rows else None
        if self._policy.rate is not None:
            for (at,) in await self.database.read(_RATE_AT, self.scope.number, encoded(key)):
                entry = msgspec.structs.replace(entry or Entry(), rate_at=at)
        return entry

    async def census(self) -> Census:
        [row] = await self.database.read(_CENSUS, self.scope.number, await self.database.now())
        return Census(*row)

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = await self.database.now() - quiet_s
        rows = await self.database.read(_SUSPECTS, self.scope.number, since, limit)
        return [decoded(code) for (code,) in rows]

    async def mend(self, claim: Claim, written: Want | None) -> None:
        async with self._book([claim.key]) as book:
            book.set(claim.key, rules.mend(book.entry(claim.key), claim, written, book.now))

    async def letters(self, limit: int, sought: Sought = EVERY_LETTER) -> list[tuple[int, float, Letter]]:
        cause = sought.cause.replace("\0", "\ufffd")
        rows = await self.database.read(_LETTERS, self.scope.number, sought.since, sought.until, cause, limit)
        return [
            (number, buried_at, Letter(cause, body, decoded(code), version, _headers(headers), sent_at, source))
            for number, buried_at, cause, body, code, version, headers, sent_at, source in rows
        ]

    async def drop(self, numbers: Sequence[int]) -> int:
        return len(await self.database.write(_DROP, self.scope.number, list(numbers)))

    async def now(self) -> float:
        return await self.database.now()

    @asynccontextmanager
    async def _book(self, keys: Sequence[str]) -> AsyncIterator[Book]:
        """Keys that are locked and read, and written back with a commit."""
        async with self.database.transaction(scope=self.scope.number) as connection:
            with postgres_errors(self.database.name):
                book = Book(connection, self.scope.number, self._policy, self.database.ahead_s)
                await book.load(keys)
                yield book
                await book.store()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction(scope=self.scope.number) as connection:
            transaction = PostgresTransaction(self, connection)
            yield transaction
            await transaction.tidy()

    def _commit(self, book: Book, claims: Sequence[Claim], allowed: tuple[Verdict, ...]) -> list[Claim]:
        refused = []
        for claim in claims:
            entry, verdict = rules.commit(book.entry(claim.key), claim, book.now, self._policy)
            book.set(claim.key, entry)
            if verdict not in allowed:
                refused.append(claim)
        return refused


class PostgresTransaction:
    """A transaction of the database, seen by the consumer."""

    def __init__(self, ledger: PostgresLedger, connection: Any) -> None:
        self.connection = connection
        self._ledger = ledger
        self._scope = ledger.scope.number
        self._policy = ledger._policy
        self._standing = PLAIN
        self._now = 0.0
        self._active: set[str] = set()
        """Of the keys that were decided: those with something going on."""
        self._careful: Book | None = None
        """The entries that were decided, if an operator or a rate has to be heeded."""
        self._marked: set[str] = set()
        """Keys that were marked when they were decided."""
        self._placed: set[str] = set()
        """Keys that nobody had seen before, and whose rows hold nothing yet."""

    async def decide(self, wants: Sequence[Want]) -> dict[str, Refusal]:
        self._marked = set()
        with self._errors():
            book = self._new_book()
            rows = await book.lock(want.key for want in wants)
            self._placed |= book.placed
            self._now, self._standing, self._careful = book.now, book.standing, None
            self._active = {key for key, row in rows.items() if row[5]}
            is_plain = self._standing.is_plain and self._policy.rate is None
            if not is_plain or any(row[0] for row in rows.values()):
                await book.read(rows)
                self._careful = book
                return self._refusals(wants, book.entry)
            if self._active:
                await book.read(rows)
                return self._refusals(wants, book.entry)
        marks = {key: mark_of(row) for key, row in rows.items()}
        # Most changes are versioned and newer than an idle mark; only the others need a closer look.
        retention_s = self._policy.retention_s
        oldest = self._now - retention_s if retention_s is not None else -math.inf
        wants = [want for want in wants if not _is_plainly_newer(want, marks[want.key], oldest)]
        return self._refusals(wants, lambda key: Entry(marks[key]))

    async def decide_at_once(self, wants: Sequence[Want]) -> dict[str, Refusal]:
        """Mark what is plainly newer in the step that locks it; only the others need a closer look."""
        self._marked = set()
        if self._policy.rate is not None or not are_plain(wants):
            return await self.decide(wants)
        keys = {encoded(want.key): want for want in wants}
        codes = sorted(keys)
        asked = [keys[code] for code in codes]
        good_until = math.inf
        if self._policy.retention_s is not None:
            good_until = min((want.sent_at for want in wants), default=math.inf) + self._policy.retention_s
        with self._errors():
            rows = await self.connection.fetch(
                MARK_NEWER,
                self._scope,
                codes,
                numbers(want.order[1] for want in asked),  # type: ignore[index]
                [want.deleted or None for want in asked] if any(want.deleted for want in asked) else [],
                self._ledger.database.ahead_s,
                good_until,
            )
        marked = {keys[code].key for (code,) in rows}
        others = [want for want in wants if want.key not in marked]
        refusals = await self.decide(others) if others else {}
        self._marked = marked
        return refusals

    async def mark(self, wants: Sequence[Want]) -> None:
        if self._marked:
            wants = [want for want in wants if want.key not in self._marked]
        if not wants:
            return
        with self._errors():
            if self._careful is not None:
                await self._mark_in(self._careful, wants)
                return
            idle = sorted((w for w in wants if w.key not in self._active), key=lambda want: want.key)
            if idle:
                await self.connection.execute(MARK, self._scope, *marks_of_wants(idle, self._now))
                self._placed -= {want.key for want in idle}
            if self._active:
                active = [want for want in wants if want.key in self._active]
                book = self._new_book()
                await book.load(want.key for want in active)
                await self._mark_in(book, active)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        async with self._book(claim.key for claim in claims) as book:
            return self._ledger._commit(book, claims, (Verdict.COMMITTED,))

    async def fail(self, wants: Sequence[Want]) -> list[int]:
        counts = []
        async with self._book(want.key for want in wants) as book:
            for want in wants:
                before = book.entry(want.key)
                entry = rules.fail_unclaimed(before, rules.in_era(want, before, book.standing), book.now)
                book.set(want.key, entry)
                counts.append(entry.attempts)
        return counts

    async def bury(self, letters: Sequence[tuple[Want | None, Letter]]) -> None:
        async with self._book(want.key for want, _ in letters if want is not None) as book:
            for want, letter in letters:
                if want is not None:
                    book.set(want.key, rules.bury_unclaimed(book.entry(want.key)))
                book.keep(letter)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        with self._errors():
            await self.connection.execute("savepoint keywise")
        placed = self._placed.copy()
        try:
            with postgres_errors(self._ledger.database.name, of_handler=True):
                yield
        except BaseException:
            await self._end("rollback to keywise; release keywise")
            self._placed |= placed
            raise
        await self._end("release keywise")

    async def tidy(self) -> None:
        """Leave no trace of keys that were only decided."""
        if self._placed:
            with self._errors():
                await self._new_book().forget(self._placed)

    async def _end(self, statement: str) -> None:
        try:
            with self._errors():
                await self.connection.execute(statement)
        except DatabaseError as error:
            if isinstance(
                error.__cause__, asyncpg.NoActiveSQLTransactionError | asyncpg.InvalidSavepointSpecificationError
            ):
                raise DatabaseError("a handler has to leave commit and rollback to keywise") from error
            raise

    def _refusals(self, wants: Sequence[Want], entry: Callable[[str], Entry | None]) -> dict[str, Refusal]:
        refusals = {}
        for want in wants:
            refusal = rules.decide_under(self._standing, entry(want.key), want, self._now, self._policy)
            if refusal is not None:
                refusals[want.key] = refusal
        return refusals

    async def _mark_in(self, book: Book, wants: Sequence[Want]) -> None:
        for want in wants:
            entry = book.entry(want.key)
            marked = rules.mark(entry, rules.in_era(want, entry, self._standing), self._now)
            book.set(want.key, rules.charged(marked, self._now, self._policy))
        await book.store()

    @asynccontextmanager
    async def _book(self, keys: Iterable[str]) -> AsyncIterator[Book]:
        with self._errors():
            book = self._new_book()
            await book.load(keys)
            yield book
            await book.store()

    def _new_book(self) -> Book:
        return Book(self.connection, self._scope, self._policy, self._ledger.database.ahead_s)

    def _errors(self) -> postgres_errors:
        return postgres_errors(self._ledger.database.name)


def connect(address: Address, policy: Policy) -> PostgresLedger:
    """`postgresql://user@host/database`; the scope is the pipeline's name."""
    return PostgresLedger(database_at(address, address.take(*OPTIONS)), address.name, policy)


def _is_plainly_newer(want: Want, mark: Order | None, oldest: float) -> bool:
    order = want.order
    if mark is None or order is None:
        return want.sent_at >= oldest
    return order > mark and mark[2] >= 0 and order[2] >= 0


def _headers(text: str | None) -> dict[str, str] | None:
    return msgspec.json.decode(text, type=dict[str, str]) if text else None


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
_CENSUS = (
    "select (select count(*) from keywise_marks where scope = $1 and version is not null), "
    "(select count(*) from keywise_marks where scope = $1 and deleted), "
    "(select count(*) from keywise_active where token != 0 and lease_until > $2 and scope = $1), "
    "(select count(*) from keywise_active where scope = $1 and suspect > 0), "
    "(select count(*) from keywise_letters where scope = $1)"
)
_SUSPECTS = "select key from keywise_active where scope = $1 and doubtful_since <= $2 order by doubtful_since limit $3"
_LETTERS = (
    "select id, buried_at, cause, body, key, version, headers, sent_at, source from keywise_letters "
    "where scope = $1 and buried_at >= $2 and buried_at < $3 and position($4::text in cause) > 0 "
    "order by buried_at desc, id desc limit $5"
)
_DROP = "delete from keywise_letters where scope = $1 and id = any($2::bigint[]) returning 1"
