"""The operator's verbs on the turns of one serial function in a Postgres database: states, history, switches, prune."""

from typing import Any

from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.serial.tables import TurnTables, decoded, encoded, record_of, reply_of, storable
from keywise.core.serial.contract import KeyState, Record, Switch

PRUNE_AT_ONCE = 2_000
"""Nobody has to wait for longer than such a stretch takes."""


class PostgresTurnsOperator:
    """What an operator sees and sets."""

    def __init__(self, tables: TurnTables) -> None:
        self._tables = tables

    @property
    def _database(self) -> PostgresDatabase:
        return self._tables.database

    async def now(self) -> float:
        return await self._database.now()

    async def states(self, limit: int) -> list[KeyState]:
        rows = await self._database.read(_STATES, self._tables.number, limit)
        return [
            KeyState(key=decoded(key), waiting=waiting, running=running, owner=owner, since=since, overlaps=overlaps)
            for key, waiting, running, owner, since, overlaps in rows
        ]

    async def history(self, key: str | None, limit: int) -> list[Record]:
        which: tuple[Any, ...] = (self._tables.number, limit, *(() if key is None else (encoded(key),)))
        work, completed = (_WORK, _COMPLETED) if key is None else (_WORK_OF_KEY, _COMPLETED_OF_KEY)
        found = [_completed(row) for row in await self._database.read(completed, *which)]
        found += map(record_of, await self._database.read(work, *which))
        # One that ended between the two reads was seen twice, or as it was.
        last = {(record.request.key, record.place): record for record in reversed(found)}
        return sorted(last.values(), key=_newest, reverse=True)[:limit]

    async def record(self, id: str) -> Record | None:
        for row in await self._database.read(_WORK_OF_ID, self._tables.number, encoded(id)):
            return record_of(row)
        for row in await self._database.read(_COMPLETED_OF_ID, self._tables.number, encoded(id)):
            return _completed(row)
        return None

    async def switches(self) -> list[Switch]:
        return await self._tables.read_switches()

    async def switch(self, switch: Switch | None, keys: str = "", is_pattern: bool = False) -> None:
        function = self._tables.number
        if switch is None:
            await self._database.write(_UNSET, function, encoded(keys), is_pattern)
        else:
            name = (encoded(switch.keys), switch.is_pattern)
            setting = (switch.mode.value, switch.observe_until, switch.at, storable(switch.by))
            await self._database.write(_SET, function, *name, *setting)

    async def sessions_lost(self) -> int:
        """How often a session with the locks of running requests was lost, in any process."""
        [[losses]] = await self._database.read(_LOSSES, self._tables.number)
        return int(losses)

    async def prune(self, retention_s: float) -> int:
        total, until = 0, await self.now() - retention_s
        while rows := await self._database.write(_PRUNE, self._tables.number, until, PRUNE_AT_ONCE):
            total += len(rows)
        return total


def _completed(row: Any) -> Record:
    reply = reply_of(decoded(row["id"]), row["outcome"], row["answer"], row["cause"], row["answer_token"])
    return record_of(row, reply, row["ended_at"])


def _newest(record: Record) -> tuple[float, int, str]:
    return record.asked_at, record.place, record.request.key


_STATES = (
    "select w.key, count(*) filter (where w.token = 0), count(*) filter (where w.token != 0), "
    "coalesce((select k.owner from keywise_turn_keys as k where k.function = $1 and k.key = w.key), ''), "
    "coalesce(min(w.started_at) filter (where w.token != 0), min(w.asked_at)), "
    "count(*) filter (where w.beside > 0) + (select count(*) from keywise_turn_completed as c "
    "where c.function = $1 and c.key = w.key and c.beside > 0) "
    "from keywise_turn_work as w where w.function = $1 group by w.key order by 2 desc, 1 limit $2"
)
_BY_TIME = "order by asked_at desc, place desc, key desc limit $2"
_WORK = f"select * from keywise_turn_work where function = $1 {_BY_TIME}"  # noqa: S608
_COMPLETED = f"select * from keywise_turn_completed where function = $1 {_BY_TIME}"  # noqa: S608
_BY_PLACE = "and key = $3 order by place desc limit $2"
_WORK_OF_KEY = f"select * from keywise_turn_work where function = $1 {_BY_PLACE}"  # noqa: S608
_COMPLETED_OF_KEY = f"select * from keywise_turn_completed where function = $1 {_BY_PLACE}"  # noqa: S608
_WORK_OF_ID = "select * from keywise_turn_work where function = $1 and id = $2"
_COMPLETED_OF_ID = "select * from keywise_turn_completed where function = $1 and id = $2 order by place desc limit 1"
_CHANGED = (
    "update keywise_functions as f set switches = f.switches + 1 where f.id = $1 "
    "returning pg_notify('keywise', 't' || f.id)"
)
"""Whoever asks with an older number is told to read the switches again."""
_SET = (
    "with changed as (insert into keywise_turn_switches (function, keys, is_pattern, mode, observe_until, at, by) "
    "values ($1, $2, $3, $4, $5, $6, $7) on conflict (function, keys, is_pattern) do update set "
    "mode = excluded.mode, observe_until = excluded.observe_until, at = excluded.at, by = excluded.by) " + _CHANGED
)
_UNSET = (
    "with changed as (delete from keywise_turn_switches "  # noqa: S608
    "where function = $1 and keys = $2 and is_pattern = $3) " + _CHANGED
)
_LOSSES = "select sessions_lost from keywise_functions where id = $1"
_PRUNE = (
    "delete from keywise_turn_completed where (function, key, place) in ("
    "select function, key, place from keywise_turn_completed where function = $1 and ended_at <= $2 "
    "order by ended_at limit $3) returning 1"
)
