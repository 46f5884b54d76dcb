"""All of one scope of a SQLite file, to be carried to another ledger."""

import sqlite3
from typing import Any

from msgspec.structs import astuple

from keywise.adapters.sqlite.ledger.working_set import (
    ADD_RECORD,
    TOKEN_NONCE_BITS,
    SqliteScope,
    SqliteWorkingSet,
    entry_of,
    letter_of,
)
from keywise.core.controls import Controls
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
        scope = self._scope.number
        rows: Any
        if kind == "entries":
            rows = self._database.read(_SQL["entries"], (*(scope, after) * 3, limit, *(scope,) * 3))
            entries = [(key, entry_of(row, text, rate_at)) for key, *row, text, rate_at in rows]
            return TransferPage(entries=entries, cursor=f"entries:{rows[-1][0]}" if rows else "letters:0")
        if kind == "letters":
            rows = self._database.read(_SQL["letters"], (scope, int(after), min(limit, LETTERS_AT_ONCE)))
            letters = [(buried_at, letter_of(letter)) for _, buried_at, *letter in rows]
            return TransferPage(dead_letters=letters, cursor=f"letters:{rows[-1][0]}" if rows else "lines:0")
        rows = self._database.read(_SQL["lines"], (scope, int(after), limit))
        records = [HistoryRecord(*record) for _, *record in rows]
        return TransferPage(records=records, cursor=f"lines:{rows[-1][0]}" if rows else "")

    async def add(self, page: TransferPage) -> None:
        def act(connection: sqlite3.Connection) -> None:
            # Rates are taken over as they are, so nothing of them is over yet.
            working_set = SqliteWorkingSet(self._scope, connection, now=0.0)
            for key, entry in page.entries:
                working_set.set(key, entry)
            working_set.store()
            for buried_at, letter in page.dead_letters:
                working_set.keep(letter, buried_at)
            connection.executemany(ADD_RECORD, [(self._scope.number, *astuple(record)) for record in page.records])

        await self._database.write(act)

    async def clear(self) -> None:
        which = (self._scope.number, self._scope.number, CLEAR_AT_ONCE)
        for table, column in CLEARED.items():
            while await self._database.execute(_SQL["clear"].format(table=table, column=column), which):
                pass

    async def set_controls(self, controls: Controls) -> None:
        await self._scope.run([], lambda working_set: working_set.set_controls(controls))

    async def tokens_above(self, floor: int) -> int:
        def act(connection: sqlite3.Connection) -> int:
            [value] = connection.execute(_SQL["raise_tokens"], (floor >> TOKEN_NONCE_BITS,)).fetchone()
            return int(value)

        return ((await self._database.write(act) + 1) << TOKEN_NONCE_BITS) - 1
