"""All of one scope of a Postgres database, to be carried to another ledger."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.postgres.database import SLOW_S
from keywise.adapters.postgres.ledger.working_set import (
    ADD_RECORDS,
    STORE_CONTROLS,
    TOKEN_NONCE_BITS,
    PostgresScope,
    PostgresWorkingSet,
    entry_of,
    letter_of,
    record_columns,
    record_of,
)
from keywise.core.controls import Controls, text_of
from keywise.core.entry import Entry
from keywise.core.key_encoding import decoded
from keywise.core.statements import read_statements
from keywise.core.transfer import LedgerTransfer, ScopeDifferences, TransferPage

LETTERS_AT_ONCE = 50
"""Their bodies may be large."""
CLEAR_AT_ONCE = 20_000
"""A statement has to end long before it counts as lost."""
TOKENS_AHEAD = 2**20
"""More than all workers can take between two steps of one statement."""
CLEARED = {"marks": "key", "active": "key", "rates": "key", "periodic_locks": "name", "letters": "id", "lines": "id"}
"""Which tables hold what belongs to a scope, and which column tells its rows apart."""

_SQL = read_statements(__name__)


class PostgresLedgerTransfer:
    """The transfer of one scope of a Postgres database."""

    def __init__(self, scope: PostgresScope) -> None:
        self._database = scope.database
        self._scope = scope

    async def scopes(self) -> list[str]:
        return [name for (name,) in await self._database.read(_SQL["scopes"])]

    async def page(self, cursor: str, limit: int) -> TransferPage:
        kind, _, after = cursor.partition(":") if cursor else ("entries", "", "")
        scope = self._scope.number
        if kind == "entries":
            rows = await self._read(_SQL["entries"], scope, bytes.fromhex(after), limit)
            found = [(decoded(code), entry_of(row, text, rate_at)) for code, *row, text, rate_at in rows]
            entries = [(key, entry) for key, entry in found if entry is not None]
            return TransferPage(entries=entries, cursor=f"entries:{rows[-1][0].hex()}" if rows else "letters:0")
        if kind == "letters":
            rows = await self._read(_SQL["letters"], scope, int(after), min(limit, LETTERS_AT_ONCE))
            letters = [(buried_at, letter_of(letter)) for _, buried_at, *letter in rows]
            return TransferPage(dead_letters=letters, cursor=f"letters:{rows[-1][0]}" if rows else "lines:0")
        rows = await self._read(_SQL["lines"], scope, int(after), limit)
        records = [record_of(record) for _, *record in rows]
        return TransferPage(records=records, cursor=f"lines:{rows[-1][0]}" if rows else "")

    async def _read(self, statement: str, *arguments: object) -> Sequence[Any]:
        """Rows by an index. A table that was just filled has no statistics, and would be read as a whole each time."""
        async with self._scope.transaction(limit_s=SLOW_S) as connection:
            await connection.execute(_BY_INDEX)
            rows: Sequence[Any] = await connection.fetch(statement, *arguments)
            return rows

    async def compare(self, other: LedgerTransfer, limit: int) -> ScopeDifferences | None:
        if not isinstance(other, PostgresLedgerTransfer) or other._database is not self._database:
            return None
        async with self._scope.transaction(limit_s=SLOW_S) as connection:
            await connection.execute(_BY_MERGING)
            found = await connection.fetch(_SQL["different_keys"], self._scope.number, other._scope.number, limit)
            [[rows]] = await connection.fetch(_SQL["row_count"], self._scope.number)
        if len(found) >= limit:
            return None
        codes = [code for (code,) in found]
        one, two = await self._entries(codes), await other._entries(codes)
        return ScopeDifferences(rows, [(decoded(code), one.get(code), two.get(code)) for code in codes])

    async def _entries(self, codes: Sequence[bytes]) -> dict[bytes, Entry | None]:
        rows = await self._read(_SQL["entries_of_keys"], self._scope.number, codes)
        return {code: entry_of(row, text, rate_at) for code, *row, text, rate_at in rows}

    async def add(self, page: TransferPage) -> None:
        async with self._scope.transaction(limit_s=SLOW_S) as connection:
            working_set = PostgresWorkingSet(self._scope, connection)
            for key, entry in page.entries:
                working_set.set(key, entry)
            for buried_at, letter in page.dead_letters:
                working_set.keep(letter, buried_at)
            await working_set.store()
            if page.records:
                await connection.execute(ADD_RECORDS, self._scope.number, *record_columns(page.records))

    async def clear(self) -> None:
        for table, column in CLEARED.items():
            statement = _SQL["clear"].format(table=table, column=column)
            while await self._database.write(statement, self._scope.number, CLEAR_AT_ONCE, limit_s=SLOW_S):
                pass

    async def set_controls(self, controls: Controls) -> None:
        async with self._scope.transaction(exclusive=True) as connection:
            await connection.execute(STORE_CONTROLS, self._scope.number, text_of(controls))

    async def tokens_above(self, floor: int) -> int:
        await self._database.write(_SQL["skip_tokens"], floor >> TOKEN_NONCE_BITS, TOKENS_AHEAD)
        [[last]] = await self._database.read("select last_value from keywise_tokens")
        return ((int(last) + 1) << TOKEN_NONCE_BITS) - 1


# Without statistics the planner may take a scope for empty, and look through all of it once for each key of the other.
_BY_MERGING = "set local enable_nestloop = off"
_BY_INDEX = "set local enable_seqscan = off; set local enable_bitmapscan = off"
