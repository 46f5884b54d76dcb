"""The ledger in a SQLite file: the rules, applied under the file's write lock.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

import math
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from operator import itemgetter
from typing import Any, Self, TypeVar

import msgspec

from keywise import rules
from keywise.address import Address
from keywise.change import Order, Want
from keywise.databases.sqlite import DISK, SqliteDatabase, opening, sqlite_errors
from keywise.databases.sqlite_archive import SqliteArchive
from keywise.databases.sqlite_book import MARK, SELECTED, Book, Scope, headers_of, load_active, load_standing
from keywise.databases.sqlite_governor import SqliteGovernor
from keywise.databases.sqlite_historian import SqliteHistorian
from keywise.entry import Claim, Entry, Policy, Refusal, Terms, Verdict
from keywise.errors import UnavailableError
from keywise.protocols import EVERY_LETTER, Answers, Burial, Census, Failure, Letter, Sought, Transaction
from keywise.standing import PLAIN

T = TypeVar("T")

SCHEMES = ("sqlite",)


class SqliteLedger:
    """The ledger of one pipeline in a SQLite database. It is also its own operator."""

    def __init__(self, database: SqliteDatabase, scope: str, policy: Policy) -> None:
        self.database = database
        self.scope = Scope(scope)
        self._policy = policy
        self.operator = self
        self.governor = SqliteGovernor(database, self.scope, policy)
        self.historian = SqliteHistorian(database, self.scope)
        self.archive = SqliteArchive(database, self.scope, policy)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            self.scope.number = await self.database.numbered(_SCOPE, _NEW_SCOPE, self.scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def claim(self, wants: Sequence[Want], terms: Terms) -> Answers:
        def act(book: Book) -> Answers:
            answers, now, standing = Answers(), self.database.now(), book.standing()
            book.load(want.key for want in wants)
            tokens = book.tokens(len(wants))
            for want, token in zip(sorted(wants, key=lambda want: want.key), tokens, strict=True):
                entry = book.entry(want.key)
                refusal = rules.decide_under(standing, entry, want, now, self._policy, terms)
                if refusal is not None:
                    answers.refused[want.key] = refusal
                    continue
                lifted = rules.in_era(want, entry, standing)
                after, claim = rules.grant(entry, lifted, token, now, terms, self._policy)
                book.set(want.key, after)
                answers.granted.append(claim)
            return answers

        return await self._write(act)

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        def act(book: Book) -> list[Claim]:
            lost = []
            book.load(claim.key for claim in claims)
            for claim in claims:
                entry = rules.renew(book.entry(claim.key), claim, self.database.now(), lease_s)
                if entry is None:
                    lost.append(claim)
                else:
                    book.set(claim.key, entry)
            return lost

        return await self._write(act)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        allowed = (Verdict.COMMITTED, Verdict.ALREADY)
        return await self._write(lambda book: self._commit(book, claims, allowed))

    async def fail(self, failures: Sequence[Failure]) -> None:
        def act(book: Book) -> None:
            now = self.database.now()
            book.load(failure.claim.key for failure in failures)
            for failure in failures:
                claim, retry_s = failure.claim, failure.retry_s
                entry = book.entry(claim.key)
                book.set(claim.key, rules.fail(entry, claim, failure.certainty, retry_s, now, self._policy))

        await self._write(act)

    async def release(self, claims: Sequence[Claim]) -> None:
        def act(book: Book) -> None:
            book.load(claim.key for claim in claims)
            for claim in claims:
                book.set(claim.key, rules.release(book.entry(claim.key), claim))

        await self._write(act)

    async def bury(self, burials: Sequence[Burial]) -> list[Claim]:
        def act(book: Book) -> list[Claim]:
            lost, now = [], self.database.now()
            book.load(burial.claim.key for burial in burials if burial.claim is not None)
            for burial in burials:
                if (claim := burial.claim) is not None:
                    entry = book.entry(claim.key)
                    if entry is None or entry.token != claim.token:
                        lost.append(claim)
                        continue
                    book.set(claim.key, rules.bury(entry, claim, burial.certainty, now, self._policy))
                book.keep(burial.letter, now)
            return lost

        return await self._write(act)

    async def prune(self, retention_s: float) -> int:
        def act(book: Book) -> tuple[int, str | None]:
            return book.prune(after or "", self.database.now(), retention_s)

        total = 0
        after: str | None = ""
        while after is not None:
            pruned, after = await self._write(act)
            total += pruned
        return total

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        with sqlite_errors(self.database.path):
            book = Book(self.database.reader, self.scope.number, self._policy)
            book.load([key])
            return book.entry(key)

    async def census(self) -> Census:
        now = self.database.now()
        scope = self.scope.number
        [row] = self.database.read(_CENSUS, (scope, scope, now, scope, scope, scope))
        return Census(*row)  # type: ignore[arg-type]

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = self.database.now() - quiet_s
        return [str(key) for (key,) in self.database.read(_SUSPECTS, (self.scope.number, since, limit))]

    async def mend(self, claim: Claim, written: Want | None) -> None:
        def act(book: Book) -> None:
            book.load([claim.key])
            book.set(claim.key, rules.mend(book.entry(claim.key), claim, written, self.database.now()))

        await self._write(act)

    async def doubt(self, wants: Sequence[Want], resync_due: bool | None = None) -> None:
        def act(book: Book) -> None:
            now, standing = self.database.now(), book.standing()
            book.load(want.key for want in wants)
            for want in wants:
                entry = book.entry(want.key)
                lifted = rules.in_era(want, entry, standing)
                book.set(want.key, rules.doubt(entry, lifted, now, self._policy))
            book.stand(standing.with_resync(resync_due, now))

        await self._write(act)

    async def letters(self, limit: int, sought: Sought = EVERY_LETTER) -> list[tuple[int, float, Letter]]:
        since, until = max(sought.since, -_FOREVER_S), min(sought.until, _FOREVER_S)
        rows: Any = self.database.read(_LETTERS, (self.scope.number, since, until, sought.cause, limit))
        return [
            (number, buried_at, Letter(cause, body, key, version, headers_of(headers), sent_at, source))
            for number, buried_at, cause, body, key, version, headers, sent_at, source in rows
        ]

    async def drop(self, numbers: Sequence[int]) -> int:
        def act(book: Book) -> int:
            return book.drop(numbers)

        return await self._write(act)

    async def now(self) -> float:
        return self.database.now()

    async def _write(self, act: Callable[[Book], T]) -> T:
        def transact(connection: sqlite3.Connection) -> T:
            book = Book(connection, self.scope.number, self._policy)
            result = act(book)
            book.store(self.database.now())
            return result

        return await self.database.write(transact)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction() as connection:
            yield SqliteTransaction(self, connection)

    def _commit(self, book: Book, claims: Sequence[Claim], allowed: tuple[Verdict, ...]) -> list[Claim]:
        refused, now = [], self.database.now()
        book.load(claim.key for claim in claims)
        for claim in claims:
            entry, verdict = rules.commit(book.entry(claim.key), claim, now, self._policy)
            book.set(claim.key, entry)
            if verdict not in allowed:
                refused.append(claim)
        return refused


class SqliteTransaction:
    """A transaction of the file, seen by the consumer."""

    def __init__(self, ledger: SqliteLedger, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._ledger = ledger
        self._scope = ledger.scope.number
        self._active: dict[str, Entry] = {}
        """Of the keys that were decided: those with something going on."""
        self._standing = PLAIN
        self._careful: Book | None = None
        """The entries that were decided, if an operator or a rate has to be heeded."""
        self._now = ledger.database.now()

    async def decide(self, wants: Sequence[Want]) -> dict[str, Refusal]:
        self._check_open()
        self._careful = None
        with self._errors():
            self._standing = load_standing(self.connection, self._scope)
            keys = msgspec.json.encode([want.key for want in wants]).decode()
            rows = self.connection.execute(_ORDERS, (self._scope, keys)).fetchall()
            is_plain = self._standing.is_plain and self._ledger._policy.rate is None
            if not is_plain or any(map(_ERA, rows)):
                self._careful = self._book(want.key for want in wants)
                return self._refusals(wants, self._careful.entry)
            self._active = load_active(self.connection, self._scope, keys)
        marks: dict[str, Order] = {key: (era, version, generation) for key, era, version, generation in rows}
        if not self._active:
            # Most changes are versioned and newer than an idle mark; only the others need a closer look.
            retention_s = self._ledger._policy.retention_s
            oldest = self._now - retention_s if retention_s is not None else -math.inf
            wants = [want for want in wants if not _is_plainly_newer(want, marks.get(want.key), oldest)]
        return self._refusals(wants, lambda key: self._active.get(key) or Entry(marks.get(key)))

    async def mark(self, wants: Sequence[Want]) -> None:
        self._check_open()
        with self._errors():
            if self._careful is not None:
                self._mark_in(self._careful, wants)
                return
            scope, at = self._scope, math.ceil(self._now)
            self.connection.executemany(MARK, [(scope, w.key, *w.order, w.deleted, at) for w in wants])  # type: ignore[misc]
            if self._active:
                active = [want for want in wants if want.key in self._active]
                self._mark_in(self._book(want.key for want in active), active)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        with self._errors():
            book = self._book(())
            refused = self._ledger._commit(book, claims, (Verdict.COMMITTED,))
            book.store(self._now)
        return refused

    async def fail(self, wants: Sequence[Want]) -> list[int]:
        counts = []
        with self._errors():
            book = self._book(want.key for want in wants)
            for want in wants:
                before = book.entry(want.key)
                entry = rules.fail_unclaimed(before, rules.in_era(want, before, self._standing), self._now)
                book.set(want.key, entry)
                counts.append(entry.attempts)
            book.store(self._now)
        return counts

    async def bury(self, letters: Sequence[tuple[Want | None, Letter]]) -> None:
        with self._errors():
            book = self._book(want.key for want, _ in letters if want is not None)
            for want, letter in letters:
                if want is not None:
                    book.set(want.key, rules.bury_unclaimed(book.entry(want.key)))
                book.keep(letter, self._now)
            book.store(self._now)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        connection, database = self.connection, self._ledger.database
        self._check_open()
        with self._errors():
            connection.execute("savepoint keywise")
        try:
            database.runs_user_code = True
            # Only the disk is everybody's trouble; whatever else a handler meets is a failure of its change.
            with sqlite_errors(database.path, DISK):
                yield
        except BaseException:
            self._check_open()
            connection.execute("rollback to keywise")
            connection.execute("release keywise")
            raise
        finally:
            database.runs_user_code = False
        with self._errors():
            connection.execute("release keywise")

    def _refusals(self, wants: Sequence[Want], entry: Callable[[str], Entry | None]) -> dict[str, Refusal]:
        policy, refusals = self._ledger._policy, {}
        for want in wants:
            refusal = rules.decide_under(self._standing, entry(want.key), want, self._now, policy)
            if refusal is not None:
                refusals[want.key] = refusal
        return refusals

    def _mark_in(self, book: Book, wants: Sequence[Want]) -> None:
        for want in wants:
            entry = book.entry(want.key)
            marked = rules.mark(entry, rules.in_era(want, entry, self._standing), self._now)
            book.set(want.key, rules.charged(marked, self._now, self._ledger._policy))
        book.store(self._now)

    def _check_open(self) -> None:
        """A full disk makes SQLite roll the whole transaction back: nothing of it may be marked after that."""
        if not self.connection.in_transaction:
            raise UnavailableError(f"{self._ledger.database.path}: the transaction was rolled back")

    def _book(self, keys: Iterable[str]) -> Book:
        self._check_open()
        book = Book(self.connection, self._scope, self._ledger._policy)
        book.load(keys)
        return book

    def _errors(self) -> sqlite_errors:
        return sqlite_errors(self._ledger.database.path)


def connect(address: Address, policy: Policy) -> SqliteLedger:
    """`sqlite:///file.db`; the scope is the pipeline's name."""
    address.take()
    return SqliteLedger(address.shared(SqliteDatabase, address.file()), address.name, policy)


def _is_plainly_newer(want: Want, mark: Order | None, oldest: float) -> bool:
    order = want.order
    if mark is None or order is None:
        return want.sent_at >= oldest
    return order > mark and mark[2] >= 0 and order[2] >= 0


_ERA = itemgetter(1)
_FOREVER_S = 1e15
_LETTERS = (
    "select id, buried_at, cause, body, key, version, headers, sent_at, source from keywise_letters "
    "where scope = ? and buried_at >= ? and buried_at < ? and instr(cause, ?) order by buried_at desc, id desc limit ?"
)
_SCOPE = "select id from keywise_scopes where name = ?"
_NEW_SCOPE = "insert or ignore into keywise_scopes (name) values (?)"
_SUSPECTS = "select key from keywise_active where scope = ? and doubtful_since <= ? order by doubtful_since limit ?"
_CENSUS = (
    "select (select count(*) from keywise_marks where scope = ?), "
    "(select count(*) from keywise_marks where scope = ? and deleted), "
    "(select count(*) from keywise_active where token != 0 and lease_until > ? and scope = ?), "
    "(select count(*) from keywise_active where scope = ? and suspect > 0), "
    "(select count(*) from keywise_letters where scope = ?)"
)
_ORDERS = f"select key, era, version, generation from keywise_marks where {SELECTED}"  # noqa: S608
