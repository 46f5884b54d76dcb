"""Processes with different policies for one serial function, as in the midst of a deploy: what ran goes by its own."""

import itertools
from contextlib import asynccontextmanager
from functools import partial

import pytest

from adapters.benches import MovingClock, advance_all, two_databases
from adapters.redis.serial.benches import turns_url
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.adapters.postgres.serial.lock_backend import PostgresLockTurns
from keywise.adapters.postgres.serial.queue_backend import PostgresQueueTurns
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.serial.backend import RedisTurns
from keywise.adapters.sqlite.serial.backend import SqliteTurns
from keywise.core.serial.contract import Ending, TurnPolicy
from keywise.testing.conformance.benches import redis as redis_bench
from keywise.testing.conformance.benches.postgres import PostgresBenchDatabase
from keywise.testing.conformance.serial.ordering import asked, done
from running import run
from servers import shared

LEASE_S = 5.0
PLAIN, ATOMIC = (TurnPolicy(lease_s=LEASE_S, atomic=atomic) for atomic in (False, True))

_numbers = itertools.count(1)


@asynccontextmanager
async def memory():
    clock = MovingClock()
    yield MemoryTurns, MemoryDatabase(clock=clock), clock.advance


@asynccontextmanager
async def sqlite():
    async with two_databases() as (one, _):
        yield SqliteTurns, one, advance_all(one)


@asynccontextmanager
async def redis():
    database = RedisDatabase(turns_url())
    yield RedisTurns, database, partial(redis_bench.move_clock, database)


@asynccontextmanager
async def postgres(kind: type):
    database = PostgresBenchDatabase(shared.postgres().url)
    yield kind, database, database.move_clock


BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        memory,
        sqlite,
        pytest.param(redis, marks=pytest.mark.server("redis")),
        *(
            pytest.param(partial(postgres, kind), id=kind.__name__, marks=pytest.mark.server("postgres"))
            for kind in (PostgresLockTurns, PostgresQueueTurns)
        ),
    ],
)


@BACKENDS
def test_a_plain_run_that_was_lost_is_not_run_again_by_one_with_a_transaction(backend):
    async def main() -> None:
        async with deployed(backend, PLAIN, ATOMIC) as (old, new, advance):
            await old.ask([asked("1")])
            [turn] = await old.take(1)
            assert (await new.operator.record("1")).is_atomic is False
            advance(LEASE_S + 1)
            assert await new.take(1) == []
            assert (await new.operator.record("1")).reply.outcome is Ending.LOST
            assert (await old.answer([done(turn)])).refused == ["1"]

    run(main())


@BACKENDS
def test_a_run_in_a_transaction_that_was_lost_is_run_again_by_one_without(backend):
    async def main() -> None:
        async with deployed(backend, ATOMIC, PLAIN) as (old, new, advance):
            await old.ask([asked("1")])
            await old.take(1)
            assert (await new.operator.record("1")).is_atomic is True
            advance(LEASE_S + 1)
            [turn] = await new.take(1)
            assert (turn.request.id, turn.attempts) == ("1", 1)
            advance(LEASE_S + 1)
            assert await old.take(1) == []
            assert (await new.operator.record("1")).reply.outcome is Ending.LOST

    run(main())


@asynccontextmanager
async def deployed(backend, old_policy: TurnPolicy, new_policy: TurnPolicy):
    name = f"deployed {next(_numbers)}"
    async with (
        backend() as (kind, database, advance),
        kind(database, name, "old", old_policy) as old,
        kind(database, name, "new", new_policy) as new,
    ):
        yield old, new, advance
