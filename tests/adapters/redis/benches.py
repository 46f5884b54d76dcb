"""Factories for the ledger in Redis: benches on a real server, under names that nobody else uses."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.entry import LedgerPolicy
from keywise.testing.conformance import LedgerBench
from keywise.testing.conformance.benches.redis import move_clock
from servers import shared

_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{next(_numbers)}"


def redis_ledger(buckets: int | None):
    @asynccontextmanager
    async def make(policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
        name, url = fresh("scope"), shared.redis().url
        one, other = RedisDatabase(url), RedisDatabase(url)

        def advance(seconds: float) -> None:
            move_clock(one, seconds)
            move_clock(other, seconds)

        async with (
            RedisLedger(one, name, policy, buckets) as ledger,
            RedisLedger(other, name, policy, buckets) as again,
        ):
            yield LedgerBench(ledger=ledger, another=again, advance=advance)

    return make


LEDGERS = {"redis.ledger.ledger": {"redis": redis_ledger(None), "redis with one bucket": redis_ledger(1)}}
