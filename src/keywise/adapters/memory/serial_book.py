"""The requests of serial functions in a memory database: dictionaries of immutable values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.serial.contract import Mode, Record, Switch, TurnPolicy
from keywise.core.serial.rules import Spot, Wish
from keywise.core.serial.steps import Hold


class Lines(msgspec.Struct):
    """What is kept for one serial function; a request is known by its key and place."""

    records: dict[tuple[str, int], Record] = {}
    ids: dict[str, tuple[str, int]] = {}
    waiting: dict[str, dict[int, bool]] = {}
    """Places of those that wait, by key."""
    holds: dict[str, Hold] = {}
    runs: dict[str, dict[int, bool]] = {}
    """Places of those with a turn, by key."""
    observed: dict[str, dict[int, bool]] = {}
    nested: dict[tuple[str, int], bool] = {}
    """Those that have no reply, and were asked for from within a turn."""
    places: dict[str, int] = {}
    served: dict[str, int] = {}
    """When a key had its last turn, as a number that grows."""
    owners: dict[str, float] = {}
    """Until when each is alive."""
    switches: dict[tuple[str, bool], Switch] = {}


class MemoryTurnBook:
    """One step on the requests of one serial function."""

    def __init__(self, database: MemoryDatabase, function: str, policy: TurnPolicy) -> None:
        self.function = function
        self.policy = policy
        self.now = database.clock()
        self.has_news = False
        self.lines = lines_of(database, function)
        self._database = database
        self._set: Callable[[dict[Any, Any], Any, Any], None] = database.set

    def record(self, id: str) -> Record | None:
        name = self.lines.ids.get(id)
        return None if name is None else self.lines.records[name]

    def put(self, record: Record) -> None:
        request = record.request
        name, lines = (request.key, record.place), self.lines
        self._set(lines.records, name, record)
        self._set(lines.ids, request.id, name)
        is_open, is_observed = record.reply is None, request.mode is Mode.OBSERVE
        self._list(lines.waiting, name, is_open and not record.token)
        self._list(lines.runs, name, is_open and record.token != 0 and not is_observed)
        self._list(lines.observed, name, is_open and is_observed)
        if request.within or record.joiners:
            self._set(lines.nested, name, True if is_open else None)

    def _list(self, lists: dict[str, dict[int, bool]], name: tuple[str, int], is_in: bool) -> None:
        key, place = name
        places = lists.get(key)
        if is_in and places is None:
            self._set(lists, key, places := {})
        if places is not None and (place in places) != is_in:
            self._set(places, place, True if is_in else None)
            if not places:
                self._set(lists, key, None)

    def next_place(self, key: str) -> int:
        place = self.lines.places.get(key, 0) + 1
        self._set(self.lines.places, key, place)
        return place

    def token(self) -> int:
        return self._database.token()

    def line(self, key: str) -> Iterable[Record]:
        return self._records(self.lines.waiting, key)

    def running(self, key: str, token: int) -> list[Record]:
        return [record for record in self._records(self.lines.runs, key) if record.token == token]

    def owned(self, owner: str) -> list[Record]:
        lists = ((places, key) for places in (self.lines.runs, self.lines.observed) for key in places)
        return [record for places, key in lists for record in self._records(places, key) if record.owner == owner]

    def observed(self, key: str) -> list[Record]:
        return list(self._records(self.lines.observed, key))

    def _records(self, lists: dict[str, dict[int, bool]], key: str) -> Iterable[Record]:
        # What a rollback brings back stands at the end of a dictionary, so its order says nothing.
        return (self.lines.records[key, place] for place in sorted(lists.get(key, ())))

    def has_line(self, key: str) -> bool:
        return key in self.lines.waiting or key in self.lines.runs

    def hold(self, key: str) -> Hold | None:
        return self.lines.holds.get(key)

    def set_hold(self, key: str, hold: Hold | None) -> None:
        before = self.lines.holds.get(key)
        if hold is not None and (before is None or before.token != hold.token):
            self._set(self.lines.served, key, self._database.number())
        self._set(self.lines.holds, key, hold)

    def free_keys(self) -> Iterable[str]:
        lines = self.lines

        def waits_since(key: str) -> tuple[int, float, str]:
            first = lines.records[key, min(lines.waiting[key])]
            return lines.served.get(key, 0), first.asked_at, key

        return sorted((key for key in lines.waiting if key not in lines.holds), key=waits_since)

    def lost_holds(self) -> Sequence[tuple[str, Hold]]:
        return [(key, hold) for key, hold in self.lines.holds.items() if not self.is_alive(hold.owner)]

    def lost_observed(self) -> Sequence[Record]:
        records = [record for key in self.lines.observed for record in self.observed(key)]
        return [record for record in records if not self.is_alive(record.owner)]

    def is_alive(self, owner: str) -> bool:
        return self.now < self.lines.owners.get(owner, 0.0)

    def live(self, owner: str) -> None:
        self._set(self.lines.owners, owner, self.now + self.policy.lease_s)

    def switches(self) -> Sequence[Switch]:
        return list(self.lines.switches.values())

    def holders(self, spot: Spot) -> Iterable[int]:
        function, key = spot
        lines = lines_of(self._database, function)
        hold = lines.holds.get(key)
        if hold is not None:
            yield hold.token
        for place in lines.observed.get(key, ()):
            yield lines.records[key, place].token

    def waits_for(self, token: int) -> Iterable[Wish]:
        for function, lines in self._database.lines.items():
            for name in lines.nested:
                record = lines.records[name]
                if token in record.request.within or token in record.joiners:
                    yield (function, name[0]), record.token


def lines_of(database: MemoryDatabase, function: str) -> Lines:
    lines: Lines = database.lines.setdefault(function, Lines())
    return lines
