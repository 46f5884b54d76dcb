"""Factories for the turns in Redis: benches on a real server, in a database that nobody else uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.serial.backend import RedisTurns
from keywise.core.serial.contract import TurnPolicy
from keywise.testing.conformance import TurnsBench
from keywise.testing.conformance.benches.redis import move_clock
from servers import shared

NUMBER = 7


def turns_url() -> str:
    return f"{shared.redis().url.rpartition('/')[0]}/{NUMBER}"


@asynccontextmanager
async def redis_turns(policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
    one, other = RedisDatabase(turns_url()), RedisDatabase(turns_url())

    def advance(seconds: float) -> None:
        move_clock(one, seconds)
        move_clock(other, seconds)

    async with one:
        # Causes name the function, and are compared with those of a function of this name in memory.
        await one.run("FLUSHDB")
        async with (
            RedisTurns(one, "function", "w1", policy) as turns,
            RedisTurns(other, "function", "w2", policy) as another,
            RedisTurns(one, "other function", "w1", policy) as beside,
        ):
            yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance)


TURNS = {"redis.serial.backend": {"redis": redis_turns}}
