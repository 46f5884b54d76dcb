"""Four processes call a serial function on Redis at once, and some are killed and stopped in the middle of calls."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.serial_kill import hunt
from keywise import adapters
from keywise.core.serial.contract import TurnPolicy
from keywise.core.url import Address
from running import run, scaled
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

CALLER = Path(__file__).with_name("serial_redis_caller.py")
PROCESSES, CALLS, KEYS, SHARED = 4, 250, 20, 40


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def called(url: str) -> tuple[dict[str, set], list]:
    """What all callers were told of each id, and what was run."""
    command, numbers = [sys.executable, str(CALLER), url], [str(number) for number in (CALLS, KEYS, SHARED)]
    callers = [
        subprocess.Popen([*command, f"p{number}", *numbers], stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    try:
        said = [json.loads(caller.communicate(timeout=scaled(100))[0]) for caller in callers]
    finally:
        for caller in callers:
            caller.kill()
    told: dict[str, set] = {}
    for id, answer in itertools.chain.from_iterable(one["told"].items() for one in said):
        told.setdefault(id, set()).add(answer)
    return told, [one for answer in said for one in answer["ran"]]


def test_a_thousand_calls_of_four_processes_run_one_at_a_time(server):
    """No overlap on a key, first come first served, and everybody is told what is stored; the same id runs once."""
    told, ran = called(server.url)
    asked_for = PROCESSES * (CALLS - SHARED) + SHARED
    assert len(told) == asked_for == len(ran)
    records = {one.request.id: one for one in run(history(server.url))}
    assert told == {id: {json.loads(one.reply.body)} for id, one in records.items()}
    for _, of_key in itertools.groupby(sorted(ran, key=lambda one: (one[0], one[2])), lambda one: one[0]):
        runs = list(of_key)
        assert all(before[3] <= after[2] for before, after in itertools.pairwise(runs)), "two ran at once"
        places = [records[id].place for _, id, _, _ in runs]
        assert places == list(range(1, len(runs) + 1)), "they ran in the order of their arrival"
        assert [json.loads(records[id].reply.body) for _, id, _, _ in runs] == places


def test_after_kills_and_stops_in_the_middle_of_calls_nothing_was_accepted_twice(server, tmp_path):
    tally = hunt(tmp_path, server.url, 10)
    assert tally.faults == []
    assert (tally.kills, tally.stops) == (10, 10)
    assert tally.told["done"] > 20, "the hunt goes on until so many more have ended well"


async def history(url: str) -> list:
    turns = adapters.connect_turns(Address(f"{url}?buckets=7", "count", {}), "judge", TurnPolicy())
    async with turns:
        return await turns.operator.history(None, 10_000)
