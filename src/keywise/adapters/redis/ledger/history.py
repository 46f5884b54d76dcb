"""The history of one pipeline in a Redis server."""

from collections.abc import Sequence
from typing import Any

import msgspec

from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import LINES_OF, RECORD, RECORD_ONE, TRIM
from keywise.core.history import HistoryRecord
from keywise.core.key_encoding import encoded

TRIM_AT_ONCE = 500
"""Nobody has to wait for longer than such a stretch takes."""


class RedisHistoryStore:
    """Lines of one scope, in the order in which they were written."""

    def __init__(self, scope: RedisScope) -> None:
        self._scope = scope

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        arguments: list[bytes] = []
        for line in records:
            arguments += (_place(line.key), _ENCODE(line))
        if arguments:
            # An act leaves one line, and may be what makes room again; workers write many, and can wait.
            await self._scope.call(RECORD_ONE if len(records) == 1 else RECORD, *arguments)

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        if key is not None:
            return [_DECODE(line) for line in await self._scope.call(LINES_OF, _place(key), limit)]
        found = await self._scope.database.run("XREVRANGE", self._scope.key("lines"), "+", "-", "COUNT", limit)
        return [_line(fields) for _, fields in found]

    async def after(self, number: str, limit: int) -> list[tuple[str, HistoryRecord]]:
        """Lines behind one, oldest first, each with its number."""
        start = number if number == "-" else f"({number}"
        found = await self._scope.database.run("XRANGE", self._scope.key("lines"), start, "+", "COUNT", limit)
        return [(one.decode(), _line(fields)) for one, fields in found]

    async def trim(self, age_s: float, records_max: int) -> int:
        """From the oldest on, as long as a stretch holds something to forget."""
        since = await self._scope.database.now() - age_s
        excess = await self._scope.database.run("XLEN", self._scope.key("lines")) - records_max
        total, start = 0, "-"
        while True:
            stretch = ("XRANGE", self._scope.key("lines"), start, "+", "COUNT", TRIM_AT_ONCE)
            found = [(number, _line(fields)) for number, fields in await self._scope.database.run(*stretch)]
            gone = [one for place, one in enumerate(found, total) if place < excess or one[1].at < since]
            if not gone:
                return total
            arguments: list[bytes] = []
            for number, line in gone:
                arguments += (number, _place(line.key))
            await self._scope.call(TRIM, *arguments)
            total += len(gone)
            start = f"({found[-1][0].decode()}"


def _place(key: str) -> bytes:
    """What the places of a key's lines begin with, and no other key's."""
    code = encoded(key)
    return len(code).to_bytes(2, "big") + code


def _line(fields: Any) -> HistoryRecord:
    return _DECODE(fields[1])


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(HistoryRecord).decode
