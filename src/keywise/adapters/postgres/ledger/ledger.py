"""The ledger in a Postgres database: the rules, applied to entries whose rows are locked.

An idle key is one small row of marks. Whatever is going on with a key is a second row, which holds the whole entry.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import asyncpg

from keywise.adapters.postgres.database import (
    OPTIONS,
    SLOW_S,
    PostgresDatabase,
    database_at,
    hex_codes,
    is_conflict,
    limit_each,
    numbers,
)
from keywise.adapters.postgres.ledger.dump import PostgresLedgerTransfer
from keywise.adapters.postgres.ledger.transaction import PostgresTransaction
from keywise.adapters.postgres.ledger.working_set import (
    ADD_RECORDS,
    CLAIM_NEWER,
    COMMIT_PLAIN,
    LOCK_CONTROLS,
    STORE_CONTROLS,
    PostgresScope,
    by_code,
    change_controls,
    entry_of,
    generation_of,
    letter_of,
    plain_commits,
    record_columns,
    record_of,
)
from keywise.adapters.postgres.schema.install import LOCKS
from keywise.core import ledger_steps
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls, Pause, controls_of, text_of
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, Entry, LeaseTerms, LedgerPolicy, Phase
from keywise.core.errors import DatabaseError, TransactionFailedError, UnavailableError
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import decoded, encoded
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.resource import opening
from keywise.core.statements import read_statements
from keywise.core.url import Address

PRUNE_AT_ONCE = 2_000
"""Nobody has to wait for longer than such a stretch takes."""

_SQL = read_statements(__name__)


class PostgresLedger:
    """The ledger of one pipeline in a Postgres database. It is its own operator, control store and history store."""

    def __init__(self, database: PostgresDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.scope = PostgresScope(database, scope, policy)
        self.admin = self.control_store = self.history_store = self
        self.transfer = PostgresLedgerTransfer(self.scope)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self.database.write(_SQL["register"], self.scope.name)
            [[self.scope.number]] = await self.database.write(_SQL["number"], self.scope.name)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        """Claim what is idle and plainly newer in one statement; the rules decide the rest."""
        granted = await self._claim_newer(headers, terms)
        if len(granted) == len(headers):
            return ClaimResults(granted)
        keys = {claim.key for claim in granted}
        headers = [header for header in headers if header.key not in keys]
        async with self.scope.working_set([header.key for header in headers]) as working_set:
            tokens = iter(await working_set.tokens(len(headers)))
            results = ledger_steps.claim(working_set, headers, terms, tokens)
        return ClaimResults([*granted, *results.granted], results.refused)

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        async with self.scope.working_set(_keys(claims)) as working_set:
            return ledger_steps.renew(working_set, claims, lease_s, phase)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        async with self.scope.working_set([advance.claim.key for advance in advances]) as working_set:
            return ledger_steps.advance(working_set, advances)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """If the answer is lost, the call is repeated: the mark shows what has arrived."""
        committed = await self._commit_plain(commits)
        commits = [commit for commit in commits if commit.claim.key not in committed]
        if not commits:
            return []
        async with self.scope.working_set([commit.claim.key for commit in commits]) as working_set:
            return ledger_steps.commit(working_set, commits)

    async def fail(self, failures: Sequence[Failure]) -> None:
        async with self.scope.working_set([failure.claim.key for failure in failures]) as working_set:
            ledger_steps.fail(working_set, failures)

    async def release(self, claims: Sequence[Claim]) -> None:
        async with self.scope.working_set(_keys(claims)) as working_set:
            ledger_steps.release(working_set, claims)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async with self.scope.working_set(
            [request.claim.key for request in requests if request.claim is not None]
        ) as working_set:
            return ledger_steps.dead_letter(working_set, requests)

    async def prune(self, retention_s: float) -> int:
        total, after = 0, b""
        oldest = math.ceil(await self.database.now() - retention_s)
        while rows := await self._read_slowly(_SQL["old_keys"], self.scope.number, after, oldest, PRUNE_AT_ONCE):
            async with self.scope.working_set([decoded(code) for (code,) in rows]) as working_set:
                total += await working_set.prune(retention_s)
            after = rows[-1][0]
        return total

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresTransaction]:
        """Handlers may run in it for long, so that it takes the lock of the controls only when it decides."""
        transaction: PostgresTransaction | None = None
        try:
            limit = limit_each(self.scope.policy.command_s)
            with _refused_commits():
                async with self.database.transaction(limit=limit, runs_user_code=True) as connection:
                    transaction = PostgresTransaction(self.scope, connection)
                    yield transaction
                    await transaction.tidy()
        except (UnavailableError, DatabaseError) as error:
            # What handlers have done may also be refused by the commit, as serializable transactions are.
            if transaction is not None and transaction.commits_claims and is_conflict(error.__cause__):
                raise TransactionFailedError(str(error)) from error.__cause__
            raise

    @asynccontextmanager
    async def marking_transaction(self) -> AsyncIterator[PostgresTransaction]:
        """As `transaction`, for sinks of keywise: no handler runs in it."""
        limit = limit_each(self.scope.policy.command_s)
        with _refused_commits():
            async with self.database.transaction(scope=self.scope.number, limit=limit) as connection:
                transaction = PostgresTransaction(self.scope, connection, has_controls=True)
                yield transaction
                await transaction.tidy()

    async def inspect(self, key: str) -> Entry | None:
        is_limited = self.scope.policy.rate is not None
        [row] = await self.database.read(_SQL["inspect"], self.scope.number, encoded(key), is_limited)
        return entry_of(row, *row[5:])

    async def counts(self) -> LedgerCounts:
        [row] = await self._read_slowly(_SQL["counts"], self.scope.number, await self.database.now())
        return LedgerCounts(*row)

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = await self.database.now() - quiet_s
        rows = await self._read_slowly(_SQL["suspects"], self.scope.number, since, limit)
        return [decoded(code) for (code,) in rows]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async with self.scope.working_set([claim.key]) as working_set:
            ledger_steps.finish_repair(working_set, claim, written)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async with self.scope.working_set([header.key for header in headers]) as working_set:
            ledger_steps.mark_suspect(working_set, headers)
        if resync_due is not None:
            now = await self.database.now()
            await self._change(lambda controls: controls.with_resync(resync_due, now))

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        cause = matching.cause.replace("\0", "\ufffd")
        rows = await self._read_slowly(
            _SQL["dead_letters"], self.scope.number, matching.since, matching.until, cause, limit
        )
        return [(number, buried_at, letter_of(letter)) for number, buried_at, *letter in rows]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        return len(await self.database.write(_SQL["delete_dead_letters"], self.scope.number, list(numbers)))

    async def now(self) -> float:
        return await self.database.now()

    # What an operator sets, and what the workers agree on.

    async def controls(self) -> Controls:
        [[text]] = await self.database.read(_SQL["load_controls"], self.scope.number)
        return controls_of(text)

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        async with self.scope.working_set([claim.key]) as working_set:
            return ledger_steps.reset(working_set, claim)

    async def raise_era(self) -> int | None:
        scope, now = self.scope.number, await self.database.now()
        async with self.scope.transaction(exclusive=True, limit_s=SLOW_S) as connection:
            text = await connection.fetchval(LOCK_CONTROLS, scope)
            [[held, highest]] = await connection.fetch(_SQL["eras"], scope, now)
            if held:
                return None
            raised = controls_of(text).with_era_above(highest)
            await connection.execute(STORE_CONTROLS, scope, text_of(raised))
        return raised.era

    async def fix_scale(self, scale: str) -> str:
        _, after = await self._change(lambda controls: controls.with_scale(scale))
        return after.scale

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        found, _ = await self._change(lambda controls: after if controls == before else controls)
        return found == before

    async def highest_generation(self) -> int:
        [[highest]] = await self._read_slowly(_SQL["highest_generation"], self.scope.number)
        return int(highest)

    async def keys(self, after: str, limit: int) -> list[str]:
        rows = await self._read_slowly(_SQL["keys"], self.scope.number, encoded(after), limit)
        return [decoded(code) for (code,) in rows]

    async def held(self, after: str, limit: int) -> list[str]:
        now = await self.database.now()
        rows = await self._read_slowly(_SQL["held_keys"], self.scope.number, encoded(after), now, limit)
        return [decoded(code) for (code,) in rows]

    async def acquire(self, task: str, every_s: float) -> bool:
        return bool(await self.database.write(_SQL["periodic_lock"], self.scope.number, task, every_s))

    # The history.

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        if records:
            await self.database.write(ADD_RECORDS, self.scope.number, *record_columns(records))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is None:
            rows = await self._read_slowly(_SQL["history"], self.scope.number, limit)
        else:
            rows = await self._read_slowly(_SQL["history_of_key"], self.scope.number, limit, encoded(key))
        return [record_of(row) for row in rows]

    async def trim(self, age_s: float, records_max: int) -> int:
        since = await self.database.now() - age_s
        [[trimmed]] = await self.database.write(
            _SQL["trim_history"], self.scope.number, since, records_max, limit_s=SLOW_S
        )
        return int(trimmed)

    async def _claim_newer(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> list[Claim]:
        """Claim keys that are idle, at changes that are plainly newer; return the claims."""
        policy, plain = self.scope.policy, by_code(headers)
        if plain is None or policy.rate is not None:
            return []
        good_until = math.inf
        if policy.retention_s is not None:
            good_until = min(header.sent_at for header in plain.values()) + policy.retention_s
        rows = await self.database.write(
            CLAIM_NEWER,
            self.scope.number,
            hex_codes(plain),
            numbers(header.order[1] for header in plain.values()),  # type: ignore[index]
            good_until,
            terms.owner,
            terms.lease_s,
            policy.redelivery_s if policy.intents else None,
            LOCKS,
            generation_of(plain),
            limit_s=policy.command_s,
        )
        granted = ((plain[code], token) for code, token in rows)
        return [Claim(header.key, header.order, header.deleted, token) for header, token in granted]

    async def _commit_plain(self, commits: Sequence[Commit]) -> set[str]:
        """Commit claims that nothing has happened to since they were granted; return their keys.

        The statement leaves a mark alone, so a commit that has more to store goes to the rules.
        """
        plain = by_code([commit.claim for commit in commits])
        if plain is None or not all(commit.is_plain for commit in commits):
            return set()
        arguments = plain_commits(self.scope.number, plain)
        rows = await self.database.write(COMMIT_PLAIN, *arguments, limit_s=self.scope.policy.command_s)
        return {plain[code].key for (code,) in rows}

    async def _read_slowly(self, statement: str, *arguments: object) -> Sequence[Any]:
        """Read what may take long in a large ledger; no claim waits for it."""
        return await self.database.read(statement, *arguments, limit_s=SLOW_S)

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """Change the controls while no transaction decides about a key; return them before and after."""
        async with self.scope.transaction(exclusive=True) as connection:
            return await change_controls(connection, self.scope.number, change)


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`postgresql://user@host/database`; the scope is the pipeline's name."""
    return PostgresLedger(database_at(address, address.take(*OPTIONS)), address.name, policy)


@contextmanager
def _refused_commits() -> Iterator[None]:
    """Turn the errors of deferred constraints and constraint triggers, which come with the commit, into ours."""
    try:
        yield
    except DatabaseError as error:
        if isinstance(error.__cause__, asyncpg.IntegrityConstraintViolationError | asyncpg.PLPGSQLError):
            raise TransactionFailedError(str(error)) from error.__cause__
        raise


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.key for claim in claims]
