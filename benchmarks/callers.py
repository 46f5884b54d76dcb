"""Callers side by side, each asking again as soon as it has its answer, and the same work for everybody whom they ask.

The work takes one more of what a key has, and its answer is how many are taken then: a read and a write. Run one at a
time, the answers of a key are 1, 2, 3, …; two at once would give the same answer twice.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg
import msgspec

TABLE = "create table slots (key text primary key, taken bigint not null)"
FILL = "insert into slots (key, taken) select 'k' || number, 0 from generate_series(0, $1::int - 1) number"
TAKEN = "select taken from slots where key = $1"
TAKE = "update slots set taken = $2 where key = $1"
WARM_UP = 0.2
"""What ends in the first fifth of the time is not measured, for anybody."""

Ask = Callable[[str], Awaitable[int]]
"""Have the work done for a key, and wait for its answer."""


class Load(msgspec.Struct, frozen=True):
    """Who calls, and for how long."""

    callers: int
    keys: int
    seconds: float
    pause_s: float = 0.0
    """How long a caller waits before it asks again."""

    def arguments(self) -> list[str]:
        """As the command lines of the processes that are called take it."""
        given = {"callers": self.callers, "keys": self.keys, "seconds": self.seconds, "pause": self.pause_s}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


class Called(msgspec.Struct, frozen=True):
    """How it went."""

    calls_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_call: float
    """Of the process that asks and runs; servers are apart."""


async def work(connection: Any, key: str) -> int:
    """What everybody does on Postgres, inside of a transaction."""
    taken = int(await connection.fetchval(TAKEN, key)) + 1
    await connection.execute(TAKE, key, taken)
    return taken


async def prepare(url: str, keys: int, *more: str) -> None:
    """The table of the work, and whatever else there has to be."""
    connection = await asyncpg.connect(url)
    for statement in (TABLE, *more):
        await connection.execute(statement)
    await connection.execute(FILL, keys)
    await connection.close()


async def as_it_is(connection: object) -> None:
    """For pools: spare the round trip that cleans a connection after each use, because there is nothing to clean."""


def enter(askers: dict[str, Callable[[str, Load], AbstractAsyncContextManager[Ask]]]) -> None:
    """The command line of all who are called: whom to call, where, and how much. Prints one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=sorted(askers))
    parser.add_argument("--url", required=True, help="an empty database")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    load = Load(options.callers, options.keys, options.seconds, options.pause)
    called = asyncio.run(_called(askers[options.what](options.url, load), load))
    print(msgspec.json.encode(called).decode())


async def _called(asked: AbstractAsyncContextManager[Ask], load: Load) -> Called:
    async with asked as ask:
        return await call_all(ask, load)


async def call_all(ask: Ask, load: Load) -> Called:
    """Call until the time is over, check all answers, and measure those after the warm-up."""
    answers: dict[str, list[int]] = defaultdict(list)
    # The first call may open something.
    answers["k0"].append(await ask("k0"))
    began, warm_cpu_s = time.perf_counter(), 0.0
    warm_at, until = began + WARM_UP * load.seconds, began + load.seconds
    delays_s: list[float] = []

    async def call(number: int) -> None:
        nonlocal warm_cpu_s
        rng = random.Random(number)
        # A median needs two.
        while (asked_at := time.perf_counter()) < until or len(delays_s) < 2:
            key = f"k{rng.randrange(load.keys)}"
            answers[key].append(await ask(key))
            if (now := time.perf_counter()) >= warm_at:
                warm_cpu_s = warm_cpu_s or time.process_time()
                delays_s.append(now - asked_at)
            if load.pause_s:
                await asyncio.sleep(load.pause_s)

    await asyncio.gather(*(call(number) for number in range(load.callers)))
    elapsed_s, cpu_s = time.perf_counter() - warm_at, time.process_time() - warm_cpu_s
    for key, told in answers.items():
        assert sorted(told) == list(range(1, len(told) + 1)), f"{key} was not worked on one at a time"
    hundredths = statistics.quantiles(delays_s, n=100)
    calls = len(delays_s)
    return Called(calls / elapsed_s, 1000 * hundredths[49], 1000 * hundredths[98], 1e6 * cpu_s / calls)
