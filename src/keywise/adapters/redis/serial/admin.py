"""What an operator sees and sets of the requests of one serial function in a Redis server."""

from typing import Any

import msgspec

from keywise.adapters.redis.script import Script
from keywise.adapters.redis.serial.scripts import HISTORY, PRUNE, RECORD, STATES, SWITCH
from keywise.adapters.redis.serial.store import RedisTurnsStore, record_of
from keywise.core.serial.contract import KeyState, Record, Switch

PRUNE_AT_ONCE = 1_000
"""Nobody has to wait for longer than such a stretch takes."""


class RedisTurnsOperator:
    """The operator's verbs, on one function."""

    def __init__(self, store: RedisTurnsStore) -> None:
        self._store = store
        self._database = store.database

    async def now(self) -> float:
        return await self._database.now()

    async def states(self, limit: int) -> list[KeyState]:
        return [
            KeyState(
                key=key.decode(),
                waiting=waiting,
                running=running,
                owner=owner.decode(),
                since=float(since),
                overlaps=overlaps,
            )
            for key, waiting, running, owner, since, overlaps in await self._call(STATES, limit)
        ]

    async def history(self, key: str | None, limit: int) -> list[Record]:
        which = ("", "") if key is None else ("1", key)
        return [record_of(fields) for fields in await self._call(HISTORY, limit, *which)]

    async def record(self, id: str) -> Record | None:
        found = await self._call(RECORD, id)
        return record_of(found[0]) if found else None

    async def switches(self) -> list[Switch]:
        return await self._store.read_switches()

    async def switch(self, switch: Switch | None, keys: str = "", is_pattern: bool = False) -> None:
        name = (keys, is_pattern) if switch is None else (switch.keys, switch.is_pattern)
        packed = b"" if switch is None else msgspec.msgpack.encode(switch)
        await self._call(SWITCH, msgspec.msgpack.encode(name), packed)

    async def prune(self, retention_s: float) -> int:
        until, total = await self.now() - retention_s, 0
        while True:
            [gone] = await self._call(PRUNE, repr(until), PRUNE_AT_ONCE)
            total += int(gone)
            if gone < PRUNE_AT_ONCE:
                return total

    async def _call(self, script: Script, *arguments: Any) -> list[Any]:
        return await self._database.call(script, self._store.prefix, *arguments)
