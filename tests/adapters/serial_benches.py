"""A factory for each backend of turns: what the conformance suite makes its benches with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.benches import MovingClock, advance_all, two_databases
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.adapters.sqlite.serial.backend import SqliteTurns
from keywise.core.serial.contract import TurnPolicy
from keywise.testing.conformance import TurnsBench


@asynccontextmanager
async def memory_turns(policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
    clock = MovingClock()
    database = MemoryDatabase(clock=clock)
    async with (
        MemoryTurns(database, "function", "w1", policy) as turns,
        MemoryTurns(database, "function", "w2", policy) as another,
        MemoryTurns(database, "other function", "w1", policy) as beside,
    ):
        yield TurnsBench(turns=turns, another=another, beside=beside, advance=clock.advance)


@asynccontextmanager
async def sqlite_turns(policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
    async with (
        two_databases() as (one, other),
        SqliteTurns(one, "function", "w1", policy) as turns,
        SqliteTurns(other, "function", "w2", policy) as another,
        SqliteTurns(one, "other function", "w1", policy) as beside,
    ):
        yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance_all(one, other))


TURNS = {"memory.serial": {"memory": memory_turns}, "sqlite.serial.backend": {"sqlite": sqlite_turns}}
