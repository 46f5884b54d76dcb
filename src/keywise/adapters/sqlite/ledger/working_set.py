"""Some entries of one ledger scope in a SQLite file, read and written back inside one transaction."""

import math
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.core import rules
from keywise.core.controls import Controls, controls_of, text_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Entry, LedgerPolicy
from keywise.core.statements import read_statements

T = TypeVar("T")

TOKEN_NONCE_BITS = 24

_SQL = read_statements(__name__)
MARK, MARK_PLAIN, NOT_PLAIN = _SQL["mark"], _SQL["mark_plain"], _SQL["not_plain"]
ADD_RECORD = _SQL["add_record"]


class SqliteScope:
    """A pipeline's part of the file; the ledger looks its number up when it is opened."""

    def __init__(self, database: SqliteDatabase, name: str, policy: LedgerPolicy) -> None:
        self.database = database
        self.name = name
        self.policy = policy
        self.number = 0

    async def run(self, keys: Iterable[str], step: Callable[["SqliteWorkingSet"], T]) -> T:
        """Run a step on keys, in one transaction of its own."""

        def act(connection: sqlite3.Connection) -> T:
            with self.working_set(connection, keys) as working_set:
                return step(working_set)

        return await self.database.write(act)

    @contextmanager
    def working_set(
        self, connection: sqlite3.Connection, keys: Iterable[str], now: float | None = None
    ) -> Iterator["SqliteWorkingSet"]:
        """Keys that are read, and written back in the end."""
        working_set = SqliteWorkingSet(self, connection, now)
        working_set.load(keys)
        yield working_set
        working_set.store()


class SqliteWorkingSet:
    """Some entries of one scope, read and written back inside one transaction."""

    def __init__(self, scope: SqliteScope, connection: sqlite3.Connection, now: float | None = None) -> None:
        self._connection = connection
        self._scope = scope.number
        self.policy = scope.policy
        self.now = scope.database.now() if now is None else now
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, Entry | None] = {}

    def load(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        wanted = msgspec.json.encode(keys).decode()
        active = load_active(self._connection, self._scope, wanted)
        # The row of a key with something going on holds its mark too, so its row of marks need not be read.
        idle = msgspec.json.encode([key for key in keys if key not in active]).decode()
        for key, *row in self._connection.execute(_SQL["marks"], (self._scope, idle)):
            self._entries[key] = _idle(row)
        self._entries |= active
        if self.policy.rate is not None:
            for key, rate_at in self._connection.execute(_SQL["rates"], (self._scope, wanted)):
                self._entries[key] = replace(self._entries.get(key, EMPTY), rate_at=rate_at)

    @cached_property
    def controls(self) -> Controls:
        return load_controls(self._connection, self._scope)

    def set_controls(self, controls: Controls) -> None:
        text = text_of(controls)
        self._connection.execute(_SQL["store_controls"], (text, self._scope, text))

    def eras(self) -> tuple[bool, int]:
        """Whether a key is held, and the highest era of any key."""
        is_held, highest = self._connection.execute(
            _SQL["eras"], (self._scope, self.now, *(self._scope,) * 2)
        ).fetchone()
        return bool(is_held), highest

    def acquire_lock(self, task: str, every_s: float) -> bool:
        turn = (self._scope, task, self.now, self.now - every_s)
        return self._connection.execute(_SQL["periodic_lock"], turn).rowcount > 0

    def entry(self, key: str) -> Entry | None:
        return self._changed.get(key, self._entries.get(key))

    def set(self, key: str, entry: Entry | None) -> None:
        self._changed[key] = entry

    def store(self) -> None:
        """Write back what was set. A mark that is there is never taken away."""
        marks, active, idle = [], [], []
        for key, entry in self._changed.items():
            is_idle = entry is None or entry.is_idle
            if entry is not None and entry.mark is not None and (is_idle or self._changes_mark(key, entry)):
                marks.append((self._scope, key, *entry.mark, entry.deleted, math.ceil(entry.updated_at)))
            if entry is None or is_idle:
                idle.append((self._scope, key))
            else:
                text = _ENCODE(entry).decode()
                row = (entry.token, entry.lease_until, entry.suspicions, rules.suspect_since(entry, self.policy), text)
                active.append((self._scope, key, *row))
        self._connection.executemany(MARK, marks)
        self._connection.executemany(_SQL["activate"], active)
        self._connection.executemany(_SQL["deactivate"], idle)
        self._store_rates()
        self._entries |= {key: entry for key, entry in self._changed.items() if entry is not None}
        self._changed.clear()

    def _changes_mark(self, key: str, entry: Entry) -> bool:
        """Whether the mark differs from what was read. A claim leaves it alone, and is a page less to write."""
        known = self._entries.get(key, EMPTY)
        return (entry.mark, entry.deleted) != (known.mark, known.deleted)

    def _store_rates(self) -> None:
        """Only what still limits a key is kept: as much is swept as can have been added, and more."""
        now = self.now
        rates = [(self._scope, key, e.rate_at) for key, e in self._changed.items() if e is not None and e.rate_at > now]
        if rates:
            self._connection.executemany(_SQL["rate"], rates)
            self._connection.execute(_SQL["sweep_rates"], (self._scope, self._scope, now, 2 * len(rates) + 10))

    def tokens(self, count: int) -> list[int]:
        """Sequence numbers with a nonce: not reused even if the sequence is set back by a restore."""
        [last] = self._connection.execute(_SQL["tokens"], (count,)).fetchone()
        nonce = secrets.randbits(TOKEN_NONCE_BITS)
        return [(last - i) << TOKEN_NONCE_BITS | nonce for i in range(count)]

    def keep(self, letter: DeadLetter, buried_at: float | None = None) -> None:
        headers = msgspec.json.encode(letter.headers).decode() if letter.headers else None
        at = self.now if buried_at is None else buried_at
        row = (self._scope, at, letter.key, letter.version, letter.cause, letter.body, headers, letter.sent_at)
        self._connection.execute(_SQL["keep_letter"], (*row, letter.source, letter.traceback, letter.routing_key))

    def prune(self, retention_s: float) -> int:
        """Forget those of the keys that may be; return how many."""
        policy, now, entries = self.policy, self.now, self._entries.items()
        gone = [(self._scope, key) for key, entry in entries if rules.is_prunable(entry, now, retention_s, policy)]
        self._connection.executemany(_SQL["remove"], gone)
        self._connection.executemany(_SQL["deactivate"], gone)
        return len(gone)


def load_controls(connection: sqlite3.Connection, scope: int) -> Controls:
    [text] = connection.execute(_SQL["load_controls"], (scope,)).fetchone()
    return controls_of(text)


def load_active(connection: sqlite3.Connection, scope: int, keys: str) -> dict[str, Entry]:
    if connection.execute(_SQL["any_active"], (scope,)).fetchone() is None:
        return {}
    return {key: _DECODE(text) for key, text in connection.execute(_SQL["active"], (scope, keys))}


def letter_of(row: Sequence[Any]) -> DeadLetter:
    """What a row of letters keeps, without its number and its moment."""
    cause, body, key, version, headers, sent_at, source, traceback, routing_key = row
    kept = msgspec.json.decode(headers, type=dict[str, str]) if headers else None
    return DeadLetter(cause, body, key, version, kept, sent_at, source, traceback, routing_key)


def entry_of(row: Sequence[Any], text: str | None, rate_at: float | None) -> Entry:
    """What a row of marks, of `active` and of rates remember of a key that has one of them."""
    entry = EMPTY if row[0] is None else _idle(row)
    if text is not None:
        entry = _DECODE(text)
    return entry if rate_at is None else replace(entry, rate_at=rate_at)


def _idle(row: Sequence[Any]) -> Entry:
    era, version, generation, deleted, updated_at = row
    return Entry((era, version, generation), bool(deleted), updated_at)


_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder(Entry).decode
