"""The merge queue on a SQLite file, from several real processes: in order, one at a time, and right after kills."""

import asyncio
from collections import Counter

from chaos.serial_kill import Fleet, Tally, hunt, judge, until
from keywise.adapters.sqlite.serial.backend import connect
from keywise.core.serial.contract import TurnPolicy
from keywise.core.url import Address

PROCESSES, CALLERS, KEYS, CAPACITY = 4, 250, 20, 30


def test_a_thousand_calls_on_twenty_keys_from_four_processes(tmp_path, monkeypatch):
    """No overlap on a key, first come first served, every answer is stored, capacity is kept, an id runs once."""
    monkeypatch.chdir(tmp_path)
    fleet = Fleet(
        tmp_path,
        "sqlite:///merge.db",
        settings={"lease": 30.0},
        work_s=0.0005,
        capacity=CAPACITY,
        callers=CALLERS,
        calls=1,
        keys=KEYS,
        shared=10,
        timeout_s=60.0,
    )
    for _ in range(PROCESSES):
        fleet.start()
    try:
        until(lambda: all(one.poll() is not None for one in fleet.processes), "all calls to be answered", 100)
    finally:
        for process in fleet.processes:
            process.kill()
    tally = Tally()
    judge(fleet, tally)
    assert tally.faults == []
    assert tally.told == Counter({"done": PROCESSES * CALLERS})
    assert tally.begun == PROCESSES * CALLERS - (PROCESSES - 1) * CALLERS // 10, "an id was not shared"
    taken = Counter(key for (key,) in fleet.diary.rows("select key from accepted"))
    assert taken == Counter({f"k{number}": min(CAPACITY, n) for number, n in enumerate(_asked())})
    assert asyncio.run(_ran_in_order(fleet)) == tally.begun


def _asked() -> list[int]:
    """How many different requests each key got."""
    own = Counter(number % KEYS for number in range(CALLERS) if number % 10)
    shared = Counter(number % KEYS for number in range(CALLERS) if number % 10 == 0)
    return [own[key] * PROCESSES + shared[key] for key in range(KEYS)]


async def _ran_in_order(fleet: Fleet) -> int:
    """How many began in the order of their places, which is that of their arrival; all of them should."""
    async with connect(Address(fleet.url, "accept", {}), "judge", TurnPolicy()) as turns:
        places = {one.request.id: (one.asked_at, one.place) for one in await turns.history(None, 10_000)}
    begun = fleet.diary.rows("select key, id from begun order by at")
    by_key: dict[str, list[tuple[float, int]]] = {}
    for key, id in begun:
        by_key.setdefault(key, []).append(places[id])
    return sum(len(order) for order in by_key.values() if order == sorted(order))


def test_after_kills_and_stops_in_the_middle_of_calls_nothing_was_accepted_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tally = hunt(tmp_path, "sqlite:///merge.db", 10)
    assert tally.faults == []
    assert (tally.kills, tally.stops) == (10, 10)
    assert tally.told["done"] > 20, "the hunt goes on until so many more have ended well"
