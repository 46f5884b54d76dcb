"""All of one scope of a SQLite file, to be carried to another ledger."""

import sqlite3
from typing import Any

from msgspec.structs import replace

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.history import ADD
from keywise.adapters.sqlite.ledger.working_set import (
    TOKEN_NONCE_BITS,
    SqliteScope,
    SqliteWorkingSet,
    entry_of,
    headers_of,
    store_controls,
)
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, LedgerPolicy
from keywise.core.history import HistoryRecord
from keywise.core.limits import Rate
from keywise.core.transfer import TransferPage

LETTERS_AT_ONCE = 50
"""Their bodies may be large."""
CLEAR_AT_ONCE = 20_000
"""Nobody has to wait for longer than such a stretch takes."""
_PERIODIC_LOCKS = "keywise_periodic_locks"
CLEARED = {
    **{"keywise_marks": "key", "keywise_active": "key", "keywise_rates": "key", _PERIODIC_LOCKS: "name"},
    **{"keywise_letters": "id", "keywise_lines": "id"},
}
"""Which tables hold what belongs to a scope, and what tells their rows apart within one."""


class SqliteLedgerTransfer:
    """The transfer of one scope of a SQLite database."""

    def __init__(self, database: SqliteDatabase, scope: SqliteScope, policy: LedgerPolicy) -> None:
        self._database = database
        self._scope = scope
        # Whatever the pipeline says of rates now, moments that were charged are kept.
        self._policy = replace(policy, rate=policy.rate or Rate(1))

    async def scopes(self) -> list[str]:
        return [str(name) for (name,) in self._database.read(_SCOPES)]

    async def page(self, cursor: str, limit: int) -> TransferPage:
        kind, _, after = cursor.partition(":") if cursor else ("entries", "", "")
        if kind == "entries":
            return self._entries(after, limit)
        return self._letters(int(after), limit) if kind == "letters" else self._lines(int(after), limit)

    def _entries(self, after: str, limit: int) -> TransferPage:
        scope = self._scope.number
        rows: Any = self._database.read(_ENTRIES, (*(scope, after) * 3, limit, *(scope,) * 3))
        entries = []
        for key, *row, text, rate_at in rows:
            entry = entry_of(row, text)
            if rate_at is not None:
                entry = replace(entry or EMPTY, rate_at=rate_at)
            assert entry is not None, "a key that is listed has a row"
            entries.append((key, entry))
        return TransferPage(entries=entries, cursor=f"entries:{rows[-1][0]}" if rows else "letters:0")

    def _letters(self, after: int, limit: int) -> TransferPage:
        rows: Any = self._database.read(_LETTERS, (self._scope.number, after, min(limit, LETTERS_AT_ONCE)))
        letters = [
            (buried_at, DeadLetter(cause, body, key, version, headers_of(headers), sent_at, source))
            for _, buried_at, cause, body, key, version, headers, sent_at, source in rows
        ]
        return TransferPage(dead_letters=letters, cursor=f"letters:{rows[-1][0]}" if rows else "lines:0")

    def _lines(self, after: int, limit: int) -> TransferPage:
        rows: Any = self._database.read(_LINES, (self._scope.number, after, limit))
        return TransferPage(
            records=[HistoryRecord(*row[1:]) for row in rows], cursor=f"lines:{rows[-1][0]}" if rows else ""
        )

    async def add(self, page: TransferPage) -> None:
        def act(connection: sqlite3.Connection) -> None:
            scope = self._scope.number
            # Rates are taken over as they are, so nothing of them is over yet.
            working_set = SqliteWorkingSet(connection, scope, self._policy, now=0.0)
            for key, entry in page.entries:
                working_set.set(key, entry)
            working_set.store()
            for buried_at, letter in page.dead_letters:
                working_set.keep(letter, buried_at)
            lines = [(scope, one.at, one.what, one.key, one.version, one.detail, one.by) for one in page.records]
            connection.executemany(ADD, lines)

        await self._database.write(act)

    async def clear(self) -> None:
        for table, column in CLEARED.items():
            some = f"select {column} from {table} where scope = ? limit {CLEAR_AT_ONCE}"  # noqa: S608
            statement = f"delete from {table} where scope = ? and {column} in ({some})"  # noqa: S608
            while await self._deleted(statement):
                pass

    async def _deleted(self, statement: str) -> int:
        scope = self._scope.number
        return await self._database.write(lambda connection: connection.execute(statement, (scope, scope)).rowcount)

    async def set_controls(self, controls: Controls) -> None:
        await self._database.write(lambda connection: store_controls(connection, self._scope.number, controls))

    async def tokens_above(self, floor: int) -> int:
        def act(connection: sqlite3.Connection) -> int:
            [value] = connection.execute(_TOKENS, (floor >> TOKEN_NONCE_BITS,)).fetchone()
            return int(value)

        return ((await self._database.write(act) + 1) << TOKEN_NONCE_BITS) - 1


_ROWS = " or ".join(
    f"exists (select 1 from {one} where scope = scopes.id)"  # noqa: S608
    for one in CLEARED
    if one != _PERIODIC_LOCKS
)
_SCOPES = f"select name from keywise_scopes as scopes where controls != '{{}}' or {_ROWS} order by name"  # noqa: S608
_KEYS = (
    "select key from keywise_marks where scope = ? and key > ? union "
    "select key from keywise_active where scope = ? and key > ? union "
    "select key from keywise_rates where scope = ? and key > ? order by key limit ?"
)
# Not by a list of keys, as elsewhere: JSON in SQLite ends at a NUL, and nothing may be left out here.
_ENTRIES = (
    "select wanted.key, marks.era, marks.version, marks.generation, marks.deleted, marks.updated_at, active.entry, "  # noqa: S608
    f"rates.at from ({_KEYS}) as wanted "
    "left join keywise_marks as marks on marks.scope = ? and marks.key = wanted.key "
    "left join keywise_active as active on active.scope = ? and active.key = wanted.key "
    "left join keywise_rates as rates on rates.scope = ? and rates.key = wanted.key order by wanted.key"
)
_LETTERS = (
    "select id, buried_at, cause, body, key, version, headers, sent_at, source from keywise_letters "
    "where scope = ? and id > ? order by id limit ?"
)
_LINES = (
    "select id, at, what, key, version, detail, by from keywise_lines where scope = ? and id > ? order by id limit ?"
)
_TOKENS = "update keywise_meta set value = max(value, ?) where name = 'tokens' returning value"
