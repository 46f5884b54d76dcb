"""All of one scope of a SQLite file, to be carried to another ledger."""

import sqlite3
from typing import Any

from msgspec.structs import replace

from keywise.adapters.sqlite.ledger.working_set import (
    ADD_RECORD,
    TOKEN_NONCE_BITS,
    SqliteScope,
    SqliteWorkingSet,
    entry_of,
    letter_of,
)
from keywise.core.controls import Controls
from keywise.core.entry import EMPTY
from keywise.core.history import HistoryRecord
from keywise.core.statements import read_statements
from keywise.core.transfer import TransferPage

LETTERS_AT_ONCE = 50
"""Their bodies may be large."""
CLEAR_AT_ONCE = 20_000
"""Nobody has to wait for longer than such a stretch takes."""
CLEARED = {"marks": "key", "active": "key", "rates": "key", "periodic_locks": "name", "letters": "id", "lines": "id"}
"""Which tables hold what belongs to a scope, and which column tells its rows apart."""

_SQL = read_statements(__name__)


class SqliteLedgerTransfer:
    """The transfer of one scope of a SQLite database."""

    def __init__(self, scope: SqliteScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def scopes(self) -> list[str]:
        return [str(name) for (name,) in self._database.read(_SQL["scopes"])]

    async def page(self, cursor: str, limit: int) -> TransferPage:
        kind, _, after = cursor.partition(":") if cursor else ("entries", "", "")
        if kind == "entries":
            return self._entries(after, limit)
        return self._letters(int(after), limit) if kind == "letters" else self._lines(int(after), limit)

    def _entries(self, after: str, limit: int) -> TransferPage:
        scope = self._scope.number
        rows: Any = self._database.read(_SQL["entries"], (*(scope, after) * 3, limit, *(scope,) * 3))
        entries = []
        for key, *row, text, rate_at in rows:
            entry = entry_of(row, text)
            if rate_at is not None:
                entry = replace(entry or EMPTY, rate_at=rate_at)
            assert entry is not None, "a key that is listed has a row"
            entries.append((key, entry))
        return TransferPage(entries=entries, cursor=f"entries:{rows[-1][0]}" if rows else "letters:0")

    def _letters(self, after: int, limit: int) -> TransferPage:
        rows: Any = self._database.read(_SQL["letters"], (self._scope.number, after, min(limit, LETTERS_AT_ONCE)))
        letters = [(buried_at, letter_of(letter)) for _, buried_at, *letter in rows]
        return TransferPage(dead_letters=letters, cursor=f"letters:{rows[-1][0]}" if rows else "lines:0")

    def _lines(self, after: int, limit: int) -> TransferPage:
        rows: Any = self._database.read(_SQL["lines"], (self._scope.number, after, limit))
        return TransferPage(
            records=[HistoryRecord(*row[1:]) for row in rows], cursor=f"lines:{rows[-1][0]}" if rows else ""
        )

    async def add(self, page: TransferPage) -> None:
        def act(connection: sqlite3.Connection) -> None:
            scope = self._scope.number
            # Rates are taken over as they are, so nothing of them is over yet.
            working_set = SqliteWorkingSet(connection, scope, self._scope.policy, now=0.0)
            for key, entry in page.entries:
                working_set.set(key, entry)
            working_set.store()
            for buried_at, letter in page.dead_letters:
                working_set.keep(letter, buried_at)
            lines = [(scope, one.at, one.what, one.key, one.version, one.detail, one.by) for one in page.records]
            connection.executemany(ADD_RECORD, lines)

        await self._database.write(act)

    async def clear(self) -> None:
        for table, column in CLEARED.items():
            while await self._delete_some(_SQL["clear"].format(table=table, column=column)):
                pass

    async def _delete_some(self, statement: str) -> int:
        which = (self._scope.number, self._scope.number, CLEAR_AT_ONCE)
        return await self._database.write(lambda connection: connection.execute(statement, which).rowcount)

    async def set_controls(self, controls: Controls) -> None:
        await self._scope.run([], lambda working_set: working_set.set_controls(controls))

    async def tokens_above(self, floor: int) -> int:
        def act(connection: sqlite3.Connection) -> int:
            [value] = connection.execute(_SQL["raise_tokens"], (floor >> TOKEN_NONCE_BITS,)).fetchone()
            return int(value)

        return ((await self._database.write(act) + 1) << TOKEN_NONCE_BITS) - 1
