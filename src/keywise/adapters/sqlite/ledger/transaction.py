"""A transaction of a SQLite file, as the consumer sees it: decide, mark, commit, fail and dead-letter in it."""

import math
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from operator import itemgetter

import msgspec

from keywise.adapters.sqlite.database import DISK, sqlite_errors
from keywise.adapters.sqlite.ledger.working_set import MARK, ORDERS, SqliteScope, SqliteWorkingSet, load_active
from keywise.core import ledger_steps
from keywise.core.change import ChangeHeader, Order
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, CommitResult, Entry, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.ledger import Commit


class SqliteTransaction:
    """A transaction of the file, seen by the consumer."""

    def __init__(self, scope: SqliteScope, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._database = scope.database
        self._scope = scope
        self._policy = scope.policy
        self._active: dict[str, Entry] = {}
        """Of the keys that were decided: those with something going on."""
        self._careful: SqliteWorkingSet | None = None
        """The entries that were decided, if an operator or a rate has to be heeded."""
        self._now = scope.database.now()

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        self._check_open()
        self._careful = None
        with self._errors():
            working_set = SqliteWorkingSet(self._scope, self.connection, self._now)
            keys = msgspec.json.encode([header.key for header in headers]).decode()
            rows = self.connection.execute(ORDERS, (self._scope.number, keys)).fetchall()
            is_plain = working_set.controls.is_plain and self._policy.rate is None
            if not is_plain or any(map(_ERA, rows)):
                working_set.load(header.key for header in headers)
                self._careful = working_set
                return ledger_steps.refusals(working_set, headers, working_set.entry)
            self._active = load_active(self.connection, self._scope.number, keys)
        marks: dict[str, Order] = {key: (era, version, generation) for key, era, version, generation in rows}
        if not self._active:
            # Most changes are versioned and newer than an idle mark; only the others need a closer look.
            retention_s = self._policy.retention_s
            oldest = self._now - retention_s if retention_s is not None else -math.inf
            headers = [
                header for header in headers if not ledger_steps.is_plainly_newer(header, marks.get(header.key), oldest)
            ]
        return ledger_steps.refusals(working_set, headers, lambda key: self._active.get(key) or Entry(marks.get(key)))

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        self._check_open()
        with self._errors():
            if self._careful is not None:
                ledger_steps.mark(self._careful, headers)
                self._careful.store()
                return
            scope, at = self._scope.number, math.ceil(self._now)
            self.connection.executemany(MARK, [(scope, w.key, *w.order, w.deleted, at) for w in headers])  # type: ignore[misc]
            if self._active:
                active = [header for header in headers if header.key in self._active]
                with self._working_set(header.key for header in active) as working_set:
                    ledger_steps.mark(working_set, active)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        with self._working_set(advance.claim.key for advance in advances) as working_set:
            return ledger_steps.advance(working_set, advances, is_repeatable=False)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        with self._working_set(claim.key for claim in claims) as working_set:
            return ledger_steps.commit(working_set, [Commit(claim) for claim in claims], (CommitResult.COMMITTED,))

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        with self._working_set(header.key for header in headers) as working_set:
            return ledger_steps.fail_unclaimed(working_set, headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        with self._working_set(header.key for header, _ in letters if header is not None) as working_set:
            ledger_steps.dead_letter_unclaimed(working_set, letters)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        connection, database = self.connection, self._database
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

    def _check_open(self) -> None:
        """A full disk makes SQLite roll the whole transaction back: nothing of it may be marked after that."""
        if not self.connection.in_transaction:
            raise UnavailableError(f"{self._database.path}: the transaction was rolled back")

    @contextmanager
    def _working_set(self, keys: Iterable[str]) -> Iterator[SqliteWorkingSet]:
        self._check_open()
        with self._errors(), self._scope.working_set(self.connection, keys, self._now) as working_set:
            yield working_set

    def _errors(self) -> AbstractContextManager[None]:
        return sqlite_errors(self._database.path)


_ERA = itemgetter(1)
