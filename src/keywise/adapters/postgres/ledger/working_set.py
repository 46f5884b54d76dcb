"""Some entries of one ledger scope in a Postgres database, locked, read and written back inside one transaction.

A key is locked by its row of marks. That row exists, without a version, also for a key that is only worked on, and as
long as a transaction looks at a key that nobody has seen before. It tells besides whether there is a row of `active`.
Rows are read in a step of their own: in the one that waits for a lock, others are seen as they were before.
"""

import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from keywise.adapters.postgres.database import PostgresDatabase, hex_codes, limit_total, numbers
from keywise.core import rules
from keywise.core.change import ChangeHeader, Order
from keywise.core.controls import PLAIN, Controls, controls_of, text_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Claim, Entry, LedgerPolicy
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import read_statements

TOKEN_NONCE_BITS = 24

_One = TypeVar("_One", ChangeHeader, Claim)
_SQL = read_statements(__name__)
MARK, MARK_NEWER = _SQL["mark"], _SQL["mark_newer"]
CLAIM_NEWER, COMMIT_PLAIN = _SQL["claim_newer"], _SQL["commit_plain"]
ADD_RECORDS = _SQL["add_records"]
LOCK_CONTROLS, STORE_CONTROLS = _SQL["lock_controls"], _SQL["store_controls"]


class PostgresScope:
    """A pipeline's part of the database; the ledger looks its number up when it is opened."""

    def __init__(self, database: PostgresDatabase, name: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.name = name
        self.policy = policy
        self.number = 0

    @asynccontextmanager
    async def transaction(self, *, exclusive: bool = False, limit_s: float | None = None) -> AsyncIterator[Any]:
        """A transaction without a handler in it, in which the controls of the scope do not change.

        If all of it takes longer than a command may, or than `limit_s`, the database counts as unreachable.
        """
        limit, database = limit_total(limit_s or self.policy.command_s), self.database
        transaction = database.transaction(scope=self.number, exclusive=exclusive, limit=limit)
        async with transaction as connection, database.answered(limit):
            yield connection

    @asynccontextmanager
    async def working_set(self, keys: Iterable[str]) -> AsyncIterator["PostgresWorkingSet"]:
        """Keys that are locked and read, and written back with a commit."""
        async with self.transaction() as connection, self.working_set_in(connection, keys) as working_set:
            yield working_set

    @asynccontextmanager
    async def working_set_in(self, connection: Any, keys: Iterable[str]) -> AsyncIterator["PostgresWorkingSet"]:
        working_set = PostgresWorkingSet(self, connection)
        await working_set.load(keys)
        yield working_set
        await working_set.store()


class PostgresWorkingSet:
    """Some entries of one scope, read and written back inside one transaction."""

    def __init__(self, scope: PostgresScope, connection: Any) -> None:
        self._connection = connection
        self._scope = scope.number
        self.policy = scope.policy
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, Entry | None] = {}
        self._letters: list[tuple[Any, ...]] = []
        self.placed: set[str] = set()
        """Keys whose rows of marks hold nothing yet."""
        self.controls = PLAIN
        self.now = 0.0
        """The store's clock, read when all keys were locked."""

    async def lock(self, keys: Iterable[str]) -> dict[str, tuple[Any, ...]]:
        """Lock keys in their order, and tell the row of each."""
        wanted = sorted((encoded(key), key) for key in dict.fromkeys(keys))
        if not wanted:
            [[now, controls]] = await self._connection.fetch(_SQL["clock"], self._scope)
            self._set_controls(now, controls)
            return {}
        codes = [code for code, _ in wanted]
        # All in one step and in their order, those that nobody has seen too: else workers could wait for each other.
        placed = await self._connection.fetch(_SQL["place"], self._scope, codes)
        self.placed |= {decoded(code) for (code,) in placed}
        rows = await self._connection.fetch(_SQL["rows"], self._scope, codes)
        self._set_controls(rows[-1][6], rows[-1][7])
        return {key: row for (_, key), row in zip(wanted, rows, strict=True)}

    async def load(self, keys: Iterable[str]) -> None:
        """Lock and read keys."""
        await self.read(await self.lock(keys))

    async def read(self, rows: dict[str, tuple[Any, ...]]) -> None:
        """Entries of keys that are locked."""
        busy = []
        for key, row in rows.items():
            if (mark := mark_of(row)) is not None:
                self._entries[key] = Entry(mark, bool(row[3]), row[4])
            if row[5]:
                busy.append(encoded(key))
        if busy:
            for code, text in await self._connection.fetch(_SQL["active"], self._scope, busy):
                self._entries[decoded(code)] = _DECODE(text)
        if self.policy.rate is not None:
            for code, at in await self._connection.fetch(_SQL["rates"], self._scope, list(map(encoded, rows))):
                key = decoded(code)
                self._entries[key] = replace(self._entries.get(key, EMPTY), rate_at=at)

    def entry(self, key: str) -> Entry | None:
        return self._changed.get(key, self._entries.get(key))

    def set(self, key: str, entry: Entry | None) -> None:
        self._changed[key] = entry

    def keep(self, letter: DeadLetter, buried_at: float | None = None) -> None:
        headers = msgspec.json.encode(letter.headers).decode() if letter.headers else None
        at, cause = self.now if buried_at is None else buried_at, letter.cause.replace("\0", "\ufffd")
        row = (self._scope, at, encoded(letter.key), letter.version, cause, letter.body, headers, letter.sent_at)
        traceback = letter.traceback.replace("\0", "\ufffd")
        self._letters.append((*row, letter.source, traceback, letter.routing_key))

    async def tokens(self, count: int) -> list[int]:
        """Sequence numbers with nonces: not reused even if the sequence is set back by a restore."""
        rows = await self._connection.fetch(_SQL["tokens"], count)
        return [number << TOKEN_NONCE_BITS | secrets.randbits(TOKEN_NONCE_BITS) for (number,) in rows]

    async def store(self) -> None:
        """Write back what was set. A mark that is there is never taken away."""
        changed = {key: entry for key, entry in self._changed.items() if entry != self._entries.get(key)}
        changed = dict(sorted(changed.items()))
        kept = {key: entry for key, entry in changed.items() if entry is not None}
        active = {key: entry for key, entry in kept.items() if not entry.is_idle}
        remembered = [(key, entry) for key, entry in kept.items() if entry.mark is not None or key in active]
        if remembered:
            rows = [mark_row(key, one.mark, one.deleted, one.updated_at, key in active) for key, one in remembered]
            await self._connection.execute(MARK, self._scope, *columns(rows))
        if active:
            await self._connection.execute(
                _SQL["activate"], self._scope, *columns(self._row(*one) for one in active.items())
            )
        idle = [encoded(key) for key in changed if key not in active and self._is_active(key)]
        if idle:
            await self._connection.execute(_SQL["deactivate"], self._scope, idle)
        await self._store_rates(kept)
        if self._letters:
            await self._connection.executemany(_SQL["keep_letter"], self._letters)
            self._letters = []
        gone = {*changed, *self.placed} - {key for key, _ in remembered}
        if gone:
            await self.remove_empty(gone)
        self.placed.clear()
        self._entries |= kept
        self._changed.clear()

    async def remove_empty(self, keys: Iterable[str]) -> None:
        """Remove the rows of locked keys that hold nothing."""
        await self._connection.execute(_SQL["remove_empty"], self._scope, list(map(encoded, keys)))

    async def prune(self, retention_s: float) -> int:
        """Forget those of the keys that may be; return how many."""
        policy, entries = self.policy, self._entries.items()
        gone = [encoded(key) for key, one in entries if rules.is_prunable(one, self.now, retention_s, policy)]
        await self._connection.execute(_SQL["deactivate"], self._scope, gone)
        await self._connection.execute(_SQL["remove"], self._scope, gone)
        return len(gone)

    def _set_controls(self, now: float, text: str) -> None:
        self.now = now
        self.controls = controls_of(text)

    def _row(self, key: str, entry: Entry) -> tuple[Any, ...]:
        since = rules.suspect_since(entry, self.policy)
        return encoded(key), entry.token, entry.lease_until, entry.suspicions, since, _ENCODE(entry).decode()

    def _is_active(self, key: str) -> bool:
        before = self._entries.get(key)
        return before is not None and not before.is_idle

    async def _store_rates(self, kept: dict[str, Entry]) -> None:
        """Only what still limits a key is kept: as much is swept as can have been added, and more."""
        rates = [(encoded(key), entry.rate_at) for key, entry in kept.items() if entry.rate_at > self.now]
        if rates:
            await self._connection.execute(_SQL["rate"], self._scope, *columns(rates))
            await self._connection.execute(_SQL["sweep_rates"], self._scope, self.now, 2 * len(rates) + 10)


async def change_controls(
    connection: Any, scope: int, change: Callable[[Controls], Controls]
) -> tuple[Controls, Controls]:
    """Change the controls in a transaction that has the exclusive lock of the scope; return them before and after."""
    before = controls_of(await connection.fetchval(LOCK_CONTROLS, scope))
    after = change(before)
    await connection.execute(STORE_CONTROLS, scope, text_of(after))
    return before, after


def by_code(ones: Sequence[_One]) -> dict[bytes, _One] | None:
    """What one statement can judge, in the order of its keys: versioned, of no era, and all of one generation.

    None if there is nothing, or if a key occurs twice: then the second depends on what becomes of the first.
    """
    generation = next((one.order[2] for one in ones if one.order is not None and one.order[2] >= 0), 0)
    plain = (
        (encoded(one.key), one)
        for one in ones
        if one.order is not None and one.order[2] == generation and one.order[0] == 0
    )
    found = dict(sorted(plain, key=itemgetter(0)))
    return found if found and len({one.key for one in ones}) == len(ones) else None


def generation_of(plain: Mapping[bytes, ChangeHeader | Claim]) -> int:
    """The generation of what `by_code` has found: all have the same one."""
    order = next(iter(plain.values())).order
    assert order is not None
    return order[2]


def plain_commits(scope: int, claims: Mapping[bytes, Claim]) -> tuple[object, ...]:
    """What `COMMIT_PLAIN` is given for some claims."""
    deleted = [code for code, claim in claims.items() if claim.deleted]
    tokens = numbers(claim.token for claim in claims.values())
    return scope, hex_codes(claims), tokens, deleted, generation_of(claims)


def mark_of(row: Sequence[Any]) -> Order | None:
    """The mark in a row of a key."""
    return None if row[1] is None else (row[0] or 0, row[1], row[2] or 0)


def letter_of(row: Sequence[Any]) -> DeadLetter:
    """What a row of letters keeps, without its number and its moment."""
    cause, body, code, version, headers, sent_at, source, traceback, routing_key = row
    kept = msgspec.json.decode(headers, type=dict[str, str]) if headers else None
    return DeadLetter(cause, body, decoded(code), version, kept, sent_at, source, traceback, routing_key)


def record_columns(records: Sequence[HistoryRecord]) -> tuple[Sequence[Any], ...]:
    """What `ADD_RECORDS` is given for some records."""
    return columns(
        (one.at, one.what, encoded(one.key), one.version, one.detail.replace("\0", "\ufffd"), one.by) for one in records
    )


def record_of(row: Sequence[Any]) -> HistoryRecord:
    at, what, code, version, detail, by = row
    return HistoryRecord(at, what, decoded(code), version, detail, by)


def entry_of(row: Sequence[Any], text: str | None, rate_at: float | None) -> Entry | None:
    """What a row of marks, and perhaps one of `active` and one of rates, remember."""
    mark = mark_of(row)
    entry = None if mark is None else Entry(mark, bool(row[3]), row[4])
    if text is not None:
        entry = _DECODE(text)
    return entry if rate_at is None else replace(entry or EMPTY, rate_at=rate_at)


def mark_row(
    key: str, mark: Order | None, deleted: bool, updated_at: float, is_active: bool = False
) -> tuple[Any, ...]:
    """What `MARK` is given for a key; what is usual costs nothing as null."""
    era, version, generation = mark or (None, None, None)
    at = math.ceil(updated_at)
    return encoded(key), era or None, version, generation or None, deleted or None, at, is_active or None


def columns(rows: Iterable[tuple[Any, ...]]) -> tuple[Sequence[Any], ...]:
    """The columns of some rows, as `unnest` takes them."""
    return tuple(zip(*rows, strict=True))


_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder(Entry).decode
