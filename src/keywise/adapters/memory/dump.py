"""All of one scope of a memory database, to be carried to another ledger."""

import math
from itertools import islice
from typing import Any, TypeAlias

from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase, MemoryScope
from keywise.core.controls import PLAIN, Controls
from keywise.core.transfer import TransferPage

Row: TypeAlias = tuple[str, str, Any]
"""Kind, position inside its kind, and what is kept there."""


class MemoryLedgerTransfer:
    """The transfer of one scope of a memory database."""

    def __init__(self, database: MemoryDatabase, scope: MemoryScope) -> None:
        self._database = database
        self._scope = scope

    async def scopes(self) -> list[str]:
        return sorted(name for name, scope in self._database.scopes.items() if _holds_something(scope))

    async def page(self, cursor: str, limit: int) -> TransferPage:
        committed, scope = self._database.committed, self._scope
        entries: list[Row] = [("1", key, (key, entry)) for key, entry in sorted(committed(scope.entries).items())]
        letters: list[Row] = [("2", f"{n:020}", kept) for n, kept in sorted(committed(scope.letters).items())]
        lines: list[Row] = [("3", f"{n:020}", line) for n, line in sorted(committed(scope.lines).items())]
        after = tuple(cursor.split(":", 1)) if cursor else ("", "")
        found = list(islice((row for row in (*entries, *letters, *lines) if row[:2] > after), limit))
        by_kind = {kind: [thing for one, _, thing in found if one == kind] for kind in "123"}
        return TransferPage(
            entries=by_kind["1"],
            dead_letters=by_kind["2"],
            records=by_kind["3"],
            cursor=":".join(found[-1][:2]) if found else "",
        )

    async def add(self, page: TransferPage) -> None:
        async with self._database.transaction():
            for key, entry in page.entries:
                rounded = replace(entry, updated_at=float(math.ceil(entry.updated_at)))
                self._database.set(self._scope.entries, key, rounded)
            for kept in page.dead_letters:
                self._database.set(self._scope.letters, self._database.number(), kept)
            for line in page.records:
                self._database.set(self._scope.lines, self._database.number(), line)

    async def clear(self) -> None:
        async with self._database.exclusive():
            for table in (self._scope.entries, self._scope.letters, self._scope.lines, self._scope.periodic_locks):
                table.clear()

    async def set_controls(self, controls: Controls) -> None:
        async with self._database.exclusive():
            self._database.set(self._scope.controls, "", controls)

    async def tokens_above(self, floor: int) -> int:
        return self._database.tokens_above(floor)


def _holds_something(scope: MemoryScope) -> bool:
    return bool(scope.entries or scope.letters or scope.lines or scope.controls.get("", PLAIN) != PLAIN)
