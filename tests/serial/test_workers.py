"""Serial functions whose requests any process may run: callers wait, and workers run."""

import asyncio

import pytest

from keywise import Claim
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.core.errors import ExpiredError, LostError, UnansweredError
from keywise.serial.function import SerialFunction, SerialWorker, Wiring, define
from running import awaited


def process(database: MemoryDatabase, ran: list, go_on: asyncio.Event | None = None, **options) -> SerialFunction:
    """The function as one process has it."""

    async def f(claim: Claim, request: dict) -> int:
        ran.append(request["n"])
        if go_on is not None:
            await go_on.wait()
        return request["n"]

    def connect(owner, policy):
        turns = MemoryTurns(database, "f", owner, policy)
        turns.is_shared = True
        return turns

    wiring = Wiring(observers=(), connect=connect)
    return define("f", f, wiring, {"key": lambda request: "a", "poll": "20ms", **options})


@awaited
async def test_a_worker_runs_what_others_ask_for():
    database, here, there = MemoryDatabase(), [], []
    caller, serving = process(database, here), process(database, there)
    worker = SerialWorker(serving)
    working = asyncio.ensure_future(worker.run())
    assert await asyncio.gather(*(caller({"n": n}) for n in range(20))) == list(range(20))
    assert (here, there) == ([], list(range(20)))
    worker.stop()
    await working
    await caller.close()


@awaited
async def test_without_a_worker_a_call_expires_and_is_never_run():
    database, ran = MemoryDatabase(), []
    caller = process(database, ran)
    with pytest.raises(ExpiredError):
        await caller({"n": 1}, timeout="1s")
    worker = SerialWorker(process(database, ran))
    working = asyncio.ensure_future(worker.run())
    patient = process(database, ran)
    assert await patient({"n": 2}) == 2
    assert ran == [2]
    worker.stop()
    await working
    await patient.close()
    await caller.close()


@awaited
async def test_a_call_that_runs_for_too_long_elsewhere_is_broken_off_there():
    database, ran, go_on = MemoryDatabase(), [], asyncio.Event()
    caller, worker = process(database, ran), SerialWorker(process(database, ran, go_on))
    working = asyncio.ensure_future(worker.run())
    with pytest.raises((UnansweredError, LostError)):
        await caller({"n": 1}, id="1", timeout="1s")
    with pytest.raises(LostError, match="deadline"):
        await caller({"n": 1}, id="1")
    assert ran == [1]
    worker.stop()
    await working
    await caller.close()


@awaited
async def test_callers_may_run_them_too():
    database, ran = MemoryDatabase(), []
    caller = process(database, ran, run_here=True)
    assert await caller({"n": 1}) == 1
    await caller.close()
