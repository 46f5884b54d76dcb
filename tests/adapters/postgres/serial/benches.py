"""Factories for the turns on Postgres: benches on a real server, under names that nobody else uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.postgres.benches import advance_all, two_openings
from keywise.adapters.postgres.serial.lock_backend import PostgresLockTurns
from keywise.adapters.postgres.serial.queue_backend import PostgresQueueTurns
from keywise.core.serial.contract import TurnPolicy
from keywise.testing.conformance import TurnsBench
from keywise.testing.conformance.benches.postgres import remove_name


def postgres_turns(kind: type):
    @asynccontextmanager
    async def make(policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
        async with two_openings() as (one, other):
            # Causes name the function, and are compared with those of a function of this name in memory.
            for name in ("function", "other function"):
                await remove_name(one, name)
            async with (
                kind(one, "function", "w1", policy) as turns,
                kind(other, "function", "w2", policy) as another,
                kind(one, "other function", "w1", policy) as beside,
            ):
                yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance_all(one, other))

    return make


TURNS = {
    "postgres.serial.queue_backend": {"postgres-queue": postgres_turns(PostgresQueueTurns)},
    "postgres.serial.lock_backend": {"postgres-lock": postgres_turns(PostgresLockTurns)},
}
