"""A transaction of a Postgres database, as the consumer sees it: decide, mark, commit, fail and dead-letter in it."""

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg

from keywise.adapters.postgres.database import (
    FOR_HANDLERS,
    SLOW_S,
    controls_lock,
    hex_codes,
    is_conflict,
    is_gone,
    is_trouble_of_server,
    limit_each,
    numbers,
    postgres_errors,
)
from keywise.adapters.postgres.ledger.working_set import (
    COMMIT_PLAIN,
    MARK,
    MARK_NEWER,
    PostgresScope,
    PostgresWorkingSet,
    by_code,
    change_controls,
    columns,
    generation_of,
    mark_of,
    mark_row,
    plain_commits,
)
from keywise.core import ledger_steps
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, Commit, CommitResult, Entry, Refusal
from keywise.core.errors import DatabaseError, TransactionFailedError, UnavailableError

# The rollback makes the constraints deferred again, and forgets that they were checked.
_CHECK_DEFERRED = (
    "savepoint keywise_check; set constraints all immediate; rollback to keywise_check; release keywise_check"
)


class PostgresTransaction:
    """A transaction of the database, seen by the consumer."""

    def __init__(self, scope: PostgresScope, connection: Any, *, has_controls: bool = False) -> None:
        self.connection = connection
        self._has_controls = has_controls
        """The transaction has the lock of the controls: nobody changes them before it ends."""
        self._scope = scope
        self._policy = scope.policy
        self._limit = limit_each(scope.policy.command_s)
        self._now = 0.0
        self._active: set[str] = set()
        """Of the keys that were decided: those with something going on."""
        self._careful: PostgresWorkingSet | None = None
        """The entries that were decided, if an operator or a rate has to be heeded."""
        self._marked: set[str] = set()
        """Keys that were marked when they were decided."""
        self._placed: set[str] = set()
        """Keys that nobody had seen before, and whose rows hold nothing yet."""
        self.commits_claims = False
        """The changes were claimed, and handlers have run in the transaction."""
        self._has_decided = False
        """The changes are not claimed: one that the commit would refuse has to be found in its savepoint."""
        self._begin_savepoint = f"{FOR_HANDLERS}; savepoint keywise"
        """The first one of a transaction may be a handler's."""

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        self._marked, self._has_decided = set(), True
        async with self._answered():
            await self._lock_controls()
            working_set = PostgresWorkingSet(self._scope, self.connection)
            rows = await working_set.lock(header.key for header in headers)
            self._placed |= working_set.placed
            self._now, self._careful = working_set.now, None
            self._active = {key for key, row in rows.items() if row[5]}
            is_plain = working_set.controls.is_plain and self._policy.rate is None
            if not is_plain or any(row[0] for row in rows.values()):
                await working_set.read(rows)
                self._careful = working_set
                return ledger_steps.refusals(working_set, headers, working_set.entry)
            if self._active:
                await working_set.read(rows)
                return ledger_steps.refusals(working_set, headers, working_set.entry)
        marks = {key: mark_of(row) for key, row in rows.items()}
        # Most changes are versioned and newer than an idle mark; only the others need a closer look.
        retention_s = self._policy.retention_s
        oldest = self._now - retention_s if retention_s is not None else -math.inf
        headers = [header for header in headers if not ledger_steps.is_plainly_newer(header, marks[header.key], oldest)]
        return ledger_steps.refusals(working_set, headers, lambda key: Entry(marks[key], bool(rows[key][3])))

    async def decide_and_mark(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        """Mark what is plainly newer in the step that locks it; only the others need a closer look."""
        self._marked = set()
        plain = by_code(headers) if self._policy.rate is None else None
        if plain is None or len(plain) < len(headers):
            return await self.decide(headers)
        asked = plain.values()
        good_until = math.inf
        if self._policy.retention_s is not None:
            good_until = min((header.sent_at for header in headers), default=math.inf) + self._policy.retention_s
        async with self._answered():
            await self._lock_controls()
            rows = await self.connection.fetch(
                MARK_NEWER,
                self._scope.number,
                hex_codes(plain),
                numbers(header.order[1] for header in asked),  # type: ignore[index]
                [header.deleted or None for header in asked] if any(header.deleted for header in asked) else [],
                good_until,
                generation_of(plain) or None,
            )
        others = [plain[code] for (code,) in rows]
        refusals = await self.decide(others) if others else {}
        self._marked = {header.key for header in headers}.difference(header.key for header in others)
        return refusals

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        if self._marked:
            headers = [header for header in headers if header.key not in self._marked]
        if not headers:
            return
        async with self._answered():
            if self._careful is not None:
                ledger_steps.mark(self._careful, headers)
                await self._careful.store()
                return
            idle = sorted((w for w in headers if w.key not in self._active), key=lambda header: header.key)
            if idle:
                rows = columns(mark_row(header.key, header.order, header.deleted, self._now) for header in idle)
                await self.connection.execute(MARK, self._scope.number, *rows)
                self._placed -= {header.key for header in idle}
            if self._active:
                active = [header for header in headers if header.key in self._active]
                async with self._working_set(header.key for header in active) as working_set:
                    ledger_steps.mark(working_set, active)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        """Without the lock of the controls, as `commit`."""
        self.commits_claims = True
        async with self._working_set([one.claim.key for one in advances], under_controls=False) as working_set:
            return ledger_steps.advance(working_set, advances, is_repeatable=False)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """Without the lock of the controls: what was claimed goes on, no matter what an operator does meanwhile."""
        self.commits_claims = True
        plain = by_code([commit.claim for commit in commits]) if all(one.is_plain for one in commits) else None
        if plain is not None:
            async with self._answered():
                rows = await self.connection.fetch(COMMIT_PLAIN, *plain_commits(self._scope.number, plain))
            committed = {plain[code].key for (code,) in rows}
            commits = [commit for commit in commits if commit.claim.key not in committed]
        if not commits:
            return []
        keys = (commit.claim.key for commit in commits)
        async with self._working_set(keys, under_controls=False) as working_set:
            return ledger_steps.commit(working_set, commits, (CommitResult.COMMITTED,))

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        async with self._working_set(header.key for header in headers) as working_set:
            return ledger_steps.fail_unclaimed(working_set, headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        async with self._working_set(header.key for header, _ in letters if header is not None) as working_set:
            ledger_steps.dead_letter_unclaimed(working_set, letters)

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        """Wait for the transactions that have decided under other controls; new ones wait for this one."""
        async with self._answered():
            await self.connection.execute(controls_lock(self._scope.number, exclusive=True))
            self._has_controls = True
            found, _ = await change_controls(
                self.connection, self._scope.number, lambda controls: after if controls == before else controls
            )
        return found == before

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        placed, had_controls = self._placed.copy(), self._has_controls
        async with self._answered():
            await self.connection.execute(self._begin_savepoint)
        self._begin_savepoint = "savepoint keywise"
        try:
            yield
            if self._has_decided:
                await self._check_deferred()
        except BaseException as error:
            self._placed |= placed
            self._has_controls = had_controls  # A lock that was taken inside goes with the savepoint.
            # If the connection is gone, this raises UnavailableError: only then is the error no fault of the handler.
            await self._end_savepoint("rollback to keywise; release keywise", error)
            if is_trouble_of_server(error):
                async with self._answered():
                    raise
            if is_conflict(error):
                raise TransactionFailedError(f"{self._scope.database.name}: {error}") from error
            raise
        try:
            await self._end_savepoint(f"release keywise; {self._scope.database.reset_search_path}")
        except DatabaseError as error:
            if isinstance(error.__cause__, asyncpg.InFailedSQLTransactionError):
                await self._end_savepoint("rollback to keywise; release keywise", error)
            raise

    async def tidy(self) -> None:
        """Leave no trace of keys that were only decided."""
        if self._placed:
            async with self._answered():
                await PostgresWorkingSet(self._scope, self.connection).remove_empty(self._placed)

    async def _check_deferred(self) -> None:
        """Raise what the commit would raise now because of deferred constraints; they are checked again by the commit.

        As an error of a handler: another change of the batch may bring what is missing, so it is tried again.
        """
        try:
            with postgres_errors(self._scope.database.name, of_handler=True):
                await self.connection.execute(_CHECK_DEFERRED, timeout=SLOW_S)
        except TimeoutError as error:
            raise UnavailableError(f"{self._scope.database.name}: no answer in time") from error

    async def _end_savepoint(self, statement: str, reason: BaseException | None = None) -> None:
        """End the savepoint; `reason` is the error for which it is rolled back."""
        try:
            async with self._answered():
                await self.connection.execute(statement)
        except UnavailableError as error:
            if isinstance(error.__cause__, asyncpg.InterfaceError) and not is_gone(self.connection):
                # A handler has left a statement running. Its transaction cannot be used any more, and is rolled back.
                raise TransactionFailedError(str(error)) from (reason or error.__cause__)
            raise
        except DatabaseError as error:
            if isinstance(
                error.__cause__, asyncpg.NoActiveSQLTransactionError | asyncpg.InvalidSavepointSpecificationError
            ):
                raise DatabaseError("a handler has to leave commit and rollback to keywise") from error
            raise

    @asynccontextmanager
    async def _working_set(
        self, keys: Iterable[str], *, under_controls: bool = True
    ) -> AsyncIterator[PostgresWorkingSet]:
        async with self._answered():
            if under_controls:
                await self._lock_controls()
            async with self._scope.working_set_in(self.connection, keys) as working_set:
                yield working_set

    async def _lock_controls(self) -> None:
        if not self._has_controls:
            await self.connection.execute(controls_lock(self._scope.number))
            self._has_controls = True

    def _answered(self) -> AbstractAsyncContextManager[None]:
        """Around statements of keywise's own; those of a handler have no limit."""
        return self._scope.database.answered(self._limit)
