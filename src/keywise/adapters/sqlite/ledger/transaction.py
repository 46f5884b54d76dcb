"""A transaction of a SQLite file, as the consumer sees it: decide, mark, commit, fail and dead-letter in it."""

import math
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

import msgspec

from keywise.adapters.sqlite.database import DISK, sqlite_errors
from keywise.adapters.sqlite.ledger.working_set import MARK, MARK_PLAIN, NOT_PLAIN, SqliteScope, SqliteWorkingSet
from keywise.core import ledger_steps
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, Commit, CommitResult, Refusal
from keywise.core.errors import UnavailableError


class SqliteTransaction:
    """A transaction of the file, seen by the consumer."""

    def __init__(self, scope: SqliteScope, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._database = scope.database
        self._scope = scope
        self._policy = scope.policy
        self._plain: dict[str, int] = {}
        """Of the keys that were decided: those that are idle with a lower mark, and their versions."""
        self._now = scope.database.now()

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        self._check_open()
        with self._errors():
            working_set = SqliteWorkingSet(self._scope, self.connection, self._now)
            self._plain = self._plainly_newer(headers, working_set.controls)
            # Most changes are plainly newer; only the others need a closer look.
            others = [header for header in headers if header.key not in self._plain]
            if others:
                working_set.load(header.key for header in others)
            return ledger_steps.refusals(working_set, others, working_set.entry)

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        self._check_open()
        plain = [header for header in headers if header.key in self._plain]
        versions = {header.key: header.order[1] for header in plain if not header.deleted}  # type: ignore[index]
        scope, at = self._scope.number, math.ceil(self._now)
        with self._errors():
            self.connection.execute(MARK_PLAIN, (scope, at, _json(versions)))
            if len(versions) < len(plain):
                gone = [(scope, one.key, *one.order, True, at) for one in plain if one.deleted]  # type: ignore[misc]
                self.connection.executemany(MARK, gone)
        if len(plain) < len(headers):
            others = [header for header in headers if header.key not in self._plain]
            with self._working_set(header.key for header in others) as working_set:
                ledger_steps.mark(working_set, others)

    def _plainly_newer(self, headers: Sequence[ChangeHeader], controls: Controls) -> dict[str, int]:
        """Return the versions of changes that all rules allow: SQLite compares the versions, and no entry is read."""
        if self._policy.rate is not None or not controls.is_plain:
            return {}
        retention_s = self._policy.retention_s
        oldest = self._now - retention_s if retention_s is not None else -math.inf
        versions = {
            header.key: order[1]
            for header in headers
            if (order := header.order) is not None and order[0] == 0 == order[2] and header.sent_at >= oldest
        }
        for (key,) in self.connection.execute(NOT_PLAIN, (self._scope.number, _json(versions))).fetchall():
            del versions[key]
        return versions

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        with self._working_set(advance.claim.key for advance in advances) as working_set:
            return ledger_steps.advance(working_set, advances, is_repeatable=False)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        with self._working_set(commit.claim.key for commit in commits) as working_set:
            return ledger_steps.commit(working_set, commits, (CommitResult.COMMITTED,))

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        with self._working_set(header.key for header in headers) as working_set:
            return ledger_steps.fail_unclaimed(working_set, headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        with self._working_set(header.key for header, _ in letters if header is not None) as working_set:
            ledger_steps.dead_letter_unclaimed(working_set, letters)

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        with self._working_set(()) as working_set:
            is_known = working_set.controls == before
            if is_known:
                working_set.set_controls(after)
        return is_known

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


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
