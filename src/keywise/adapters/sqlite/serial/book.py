"""The requests of serial functions in a SQLite file, inside of one transaction of it."""

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from keywise.adapters.sqlite.ledger.working_set import TOKEN_NONCE_BITS
from keywise.core.serial.contract import KeyState, Mode, Record, Reply, Switch, TurnPolicy
from keywise.core.serial.rules import Spot, Wish
from keywise.core.serial.steps import Hold

WAITS, RUNS, OBSERVED, ENDED = range(4)
CHUNK = 16


class Line(msgspec.Struct):
    """What is kept of a key."""

    key: str
    place: int = 0
    """Of the last request."""
    served: int = 0
    hold: Hold | None = None


class SqliteTurnBook:
    """One step on the requests of one serial function, whose number in the file is its scope."""

    def __init__(self, connection: sqlite3.Connection, scope: Any, policy: TurnPolicy, now: float) -> None:
        self.function: str = scope.name
        self.policy = policy
        self.now = now
        self.has_news = False
        self._connection = connection
        self._scope: int = scope.number
        self._records: dict[str, Record | None] = {}
        """The last ones by their ids, as far as they were asked for."""
        self._lines: dict[str, Line] = {}
        self._alive: dict[str, bool] = {}
        self._switches: list[Switch] | None = None

    def record(self, id: str) -> Record | None:
        if id not in self._records:
            row = self._one(_BY_ID, id)
            self._records[id] = None if row is None else _DECODE(row[0])
        return self._records[id]

    def put(self, record: Record) -> None:
        request = record.request
        state = _state(record)
        row = (self._scope, request.key, record.place, request.id, state, record.token, record.owner)
        is_nested = bool(request.within or record.joiners) and state != ENDED
        times = (record.asked_at, record.ended_at, record.overlaps, is_nested)
        self._connection.execute(_PUT, (*row, *times, _ENCODE(record)))
        self._records[request.id] = record

    def next_place(self, key: str) -> int:
        line = self._line(key)
        line.place += 1
        self._keep(line)
        return line.place

    def token(self) -> int:
        [last] = self._connection.execute(_NEXT).fetchone()
        return int(last) << TOKEN_NONCE_BITS | secrets.randbits(TOKEN_NONCE_BITS)

    def line(self, key: str) -> Iterator[Record]:
        after = 0
        while rows := self._all(_WAITING, key, after, CHUNK):
            for place, blob in rows:
                after = place
                yield _DECODE(blob)

    def running(self, key: str, token: int) -> list[Record]:
        return [_DECODE(blob) for (blob,) in self._all(_RUNNING, key, token)]

    def owned(self, owner: str) -> list[Record]:
        return [_DECODE(blob) for (blob,) in self._all(_OWNED, owner)]

    def observed(self, key: str) -> list[Record]:
        return [_DECODE(blob) for (blob,) in self._all(_OBSERVED, key)]

    def has_line(self, key: str) -> bool:
        return self._one(_HAS_LINE, key) is not None

    def hold(self, key: str) -> Hold | None:
        return self._line(key).hold

    def set_hold(self, key: str, hold: Hold | None) -> None:
        line = self._line(key)
        if hold is not None and (line.hold is None or line.hold.token != hold.token):
            # Tokens grow with each turn that is given.
            line.served = hold.token
        line.hold = hold
        self._keep(line)

    def free_keys(self) -> Iterable[str]:
        return [key for (key,) in self._all(_FREE)]

    def lost_holds(self) -> Sequence[tuple[str, Hold]]:
        lines = [self._line(key) for (key,) in self._all(_LOST, self.now)]
        return [(line.key, line.hold) for line in lines if line.hold is not None]

    def lost_observed(self) -> Sequence[Record]:
        return [_DECODE(blob) for (blob,) in self._all(_LOST_OBSERVED, self.now)]

    def is_alive(self, owner: str) -> bool:
        if owner not in self._alive:
            row = self._one(_LIVES, owner)
            self._alive[owner] = row is not None and self.now < row[0]
        return self._alive[owner]

    def live(self, owner: str) -> None:
        self._connection.execute(_LIVE, (self._scope, owner, self.now + self.policy.lease_s))
        self._alive[owner] = True

    def switches(self) -> Sequence[Switch]:
        if self._switches is None:
            self._switches = [_SWITCH(text) for (text,) in self._all(_SWITCHES)]
        return self._switches

    def holders(self, spot: Spot) -> Iterable[int]:
        return [token for (token,) in self._connection.execute(_HOLDERS, spot).fetchall()]

    def waits_for(self, token: int) -> Iterable[Wish]:
        for function, blob in self._connection.execute(_NESTED).fetchall():
            record = _DECODE(blob)
            if token in record.request.within or token in record.joiners:
                yield (function, record.request.key), record.token

    def store(self, owner: str) -> int:
        """The number of the last news; a new one if there are any for others."""
        if self.has_news:
            self._connection.execute(_NEWS, (self._scope, owner))
        row = self._one(_LAST_NEWS)
        return 0 if row is None else int(row[0])

    # The operator's part.

    def set_switch(self, switch: Switch | None, keys: str, is_pattern: bool) -> None:
        if switch is None:
            self._connection.execute(_NO_SWITCH, (self._scope, keys, is_pattern))
        else:
            row = (self._scope, switch.keys, switch.is_pattern, msgspec.json.encode(switch).decode())
            self._connection.execute(_SET_SWITCH, row)

    def prune(self, retention_s: float) -> int:
        self._connection.execute(_FORGET_OWNERS, (self._scope, self.now - retention_s))
        return self._connection.execute(_PRUNE, (self._scope, self.now - retention_s)).rowcount

    def history(self, key: str | None, limit: int) -> list[Record]:
        rows = self._all(_HISTORY, limit) if key is None else self._all(_HISTORY_OF_KEY, key, limit)
        return [_DECODE(blob) for (blob,) in rows]

    def states(self, limit: int) -> list[KeyState]:
        scope = self._scope
        rows = self._connection.execute(_STATES, (scope, scope, scope, limit)).fetchall()
        return [
            KeyState(
                key=key,
                waiting=waiting,
                running=running,
                owner=owner or "",
                since=self._began(key) if running else asked_at,
                overlaps=overlaps,
            )
            for key, waiting, running, asked_at, owner, overlaps in rows
        ]

    def _began(self, key: str) -> float:
        return min(_DECODE(blob).started_at for (blob,) in self._all(_OPEN_RUNS, key))

    def _line(self, key: str) -> Line:
        if key not in self._lines:
            row = self._one(_LINE, key)
            hold = Hold(row[2], row[3], row[4]) if row is not None and row[2] else None
            self._lines[key] = Line(key) if row is None else Line(key, row[0], row[1], hold)
        return self._lines[key]

    def _keep(self, line: Line) -> None:
        token, owner, turns = (0, "", 0) if line.hold is None else (line.hold.token, line.hold.owner, line.hold.turns)
        self._connection.execute(_KEEP, (self._scope, line.key, line.place, line.served, token, owner, turns))

    def _one(self, statement: str, *arguments: object) -> Any:
        return self._connection.execute(statement, (self._scope, *arguments)).fetchone()

    def _all(self, statement: str, *arguments: object) -> list[Any]:
        return self._connection.execute(statement, (self._scope, *arguments)).fetchall()


def replies(connection: sqlite3.Connection, scope: int, ids: Sequence[str]) -> dict[str, Reply]:
    """Of the last requests with these ids, those that have ended."""
    rows = connection.execute(_REPLIES, (scope, msgspec.json.encode(ids).decode())).fetchall()
    found = [_DECODE(blob) for (blob,) in rows]
    return {record.request.id: record.reply for record in found if record.reply is not None}


def last_news(connection: sqlite3.Connection, scope: int) -> int:
    row = connection.execute(_LAST_NEWS, (scope,)).fetchone()
    return 0 if row is None else int(row[0])


def _state(record: Record) -> int:
    if record.reply is not None:
        return ENDED
    if record.request.mode is Mode.OBSERVE:
        return OBSERVED
    return RUNS if record.token else WAITS


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Record).decode
_SWITCH = msgspec.json.Decoder(Switch).decode
_BY_ID = "select record from keywise_requests where scope = ? and id = ? order by rowid desc limit 1"
_REPLIES = (
    "select record from keywise_requests where rowid in (select (select max(rowid) from keywise_requests r "
    "where r.scope = ? and r.id = wanted.value) from json_each(?) wanted) and state = 3"
)
_PUT = (
    "insert into keywise_requests (scope, key, place, id, state, token, owner, asked_at, ended_at, overlaps, nested, "
    "record) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (scope, key, place) do update set "
    "state = excluded.state, token = excluded.token, owner = excluded.owner, ended_at = excluded.ended_at, "
    "overlaps = excluded.overlaps, nested = excluded.nested, record = excluded.record"
)
_NEXT = "update keywise_meta set value = value + 1 where name = 'tokens' returning value"
_WAITING = (
    "select place, record from keywise_requests where scope = ? and key = ? and state = 0 and place > ? "
    "order by place limit ?"
)
_RUNNING = (
    "select record from keywise_requests where scope = ? and state in (1, 2) and key = ? and token = ? and state = 1 "
    "order by place"
)
_OWNED = "select record from keywise_requests where scope = ? and state in (1, 2) and owner = ?"
_OBSERVED = (
    "select record from keywise_requests where scope = ? and state in (1, 2) and key = ? and state = 2 order by place"
)
_OPEN_RUNS = "select record from keywise_requests where scope = ? and state in (1, 2) and key = ?"
_HAS_LINE = (
    "select 1 from (select 1 from keywise_requests where scope = ?1 and key = ?2 and state = 0 union all "
    "select 1 from keywise_requests where scope = ?1 and state in (1, 2) and key = ?2 and state = 1) limit 1"
)
_LINE = "select place, served, token, owner, turns from keywise_turn_lines where scope = ? and key = ?"
_KEEP = (
    "insert into keywise_turn_lines values (?, ?, ?, ?, ?, ?, ?) on conflict (scope, key) do update set "
    "place = excluded.place, served = excluded.served, token = excluded.token, owner = excluded.owner, "
    "turns = excluded.turns"
)
_FREE = (
    "select waiting.key from (select scope, key, min(place) as place from keywise_requests "
    "where scope = ? and state = 0 group by scope, key) waiting "
    "join keywise_turn_lines line using (scope, key) join keywise_requests request using (scope, key, place) "
    "where line.token = 0 order by line.served, request.asked_at, waiting.key"
)
_LOST = (
    "select key from keywise_turn_lines line where scope = ? and token != 0 and not exists "
    "(select 1 from keywise_turn_owners owner where owner.scope = line.scope and owner.owner = line.owner "
    "and owner.until > ?)"
)
_LOST_OBSERVED = (
    "select record from keywise_requests request where scope = ? and state in (1, 2) and state = 2 and not exists "
    "(select 1 from keywise_turn_owners owner where owner.scope = request.scope and owner.owner = request.owner "
    "and owner.until > ?)"
)
_LIVES = "select until from keywise_turn_owners where scope = ? and owner = ?"
_LIVE = (
    "insert into keywise_turn_owners values (?, ?, ?) on conflict (scope, owner) do update set until = excluded.until"
)
_SWITCHES = "select switch from keywise_switches where scope = ?"
_SET_SWITCH = "insert or replace into keywise_switches values (?, ?, ?, ?)"
_NO_SWITCH = "delete from keywise_switches where scope = ? and keys = ? and is_pattern = ?"
_HOLDERS = (
    "select line.token from keywise_scopes scope join keywise_turn_lines line on line.scope = scope.id "
    "where scope.name = ?1 and line.key = ?2 and line.token != 0 union all "
    "select request.token from keywise_scopes scope join keywise_requests request on request.scope = scope.id "
    "where scope.name = ?1 and request.state in (1, 2) and request.key = ?2 and request.state = 2"
)
_NESTED = (
    "select scope.name, request.record from keywise_requests request join keywise_scopes scope "
    "on scope.id = request.scope where request.nested = 1"
)
_NEWS = (
    "insert into keywise_turn_news values (?, 1, ?) on conflict (scope) do update set number = number + 1, "
    "owner = excluded.owner"
)
_LAST_NEWS = "select number from keywise_turn_news where scope = ?"
_PRUNE = "delete from keywise_requests where scope = ? and state = 3 and ended_at <= ?"
_FORGET_OWNERS = "delete from keywise_turn_owners where scope = ? and until <= ?"
_HISTORY = "select record from keywise_requests where scope = ? order by asked_at desc, place desc, key desc limit ?"
_HISTORY_OF_KEY = (
    "select record from keywise_requests where scope = ? and key = ? order by asked_at desc, place desc limit ?"
)
_STATES = (
    "select open.key, sum(open.state = 0) as waiting, sum(open.state != 0), min(open.asked_at), "
    "(select owner from keywise_turn_lines line where line.scope = ? and line.key = open.key and line.token != 0), "
    "(select count(*) from keywise_requests kept where kept.scope = ? and kept.key = open.key and kept.overlaps > 0) "
    "from keywise_requests open where open.scope = ? and open.state < 3 group by open.key "
    "order by waiting desc, open.key limit ?"
)
