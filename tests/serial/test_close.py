"""Closing a serial function: what runs comes to its end, what waits is taken out, and callers are told what is true."""

import asyncio
import threading

import pytest

from keywise import Claim
from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.errors import ExpiredError, LostError, UnansweredError, UnavailableError
from keywise.core.serial.contract import Ending
from running import awaited
from serial.faulty_store import serial, until


class Gated:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    async def run(self, claim: Claim, request: dict) -> str:
        self.begun.append(request["k"])
        await self.go_on.wait()
        return "done"


def is_known(database: MemoryDatabase, id: str) -> bool:
    return id in database.lines["f"].ids


def outcome(database: MemoryDatabase, id: str) -> Ending | None:
    reply = database.lines["f"].records[database.lines["f"].ids[id]].reply
    return None if reply is None else reply.outcome


@awaited
async def test_what_waits_for_another_process_is_taken_out_before_its_caller_is_told():
    database, there, here = MemoryDatabase(), Gated(), Gated()
    f, g = serial(here.run, database), serial(there.run, database)
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: there.begun)
    call = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await until(lambda: is_known(database, "x"))
    await f.close()
    with pytest.raises(ExpiredError, match="closed"):
        await call
    assert outcome(database, "x") is Ending.EXPIRED
    behind = asyncio.ensure_future(g({"k": "a"}, timeout="5s"))
    there.go_on.set()
    assert await asyncio.gather(holder, behind) == ["done", "done"]
    assert here.begun == []
    await g.close()


@awaited
async def test_what_waits_behind_something_that_runs_here_is_taken_out_and_that_comes_to_its_end():
    database, here = MemoryDatabase(), Gated()
    f = serial(here.run, database, concurrency=1)
    running = asyncio.ensure_future(f({"k": "a"}, id="first"))
    await until(lambda: here.begun)
    waiting = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await until(lambda: is_known(database, "x"))
    closing = asyncio.ensure_future(f.close())
    with pytest.raises(ExpiredError, match="closed"):
        await waiting
    assert outcome(database, "x") is Ending.EXPIRED
    with pytest.raises(ExpiredError, match="closed"):
        await f({"k": "b"})
    here.go_on.set()
    assert await running == "done"
    await closing
    assert here.begun == ["a"]


@awaited
@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_what_a_worker_runs_is_waited_for_and_then_unanswered(ends_in_time):
    database, there = MemoryDatabase(), Gated()
    caller = serial(there.run, database, is_shared=True, drain="10s" if ends_in_time else "100ms")
    worker = serial(there.run, database, is_shared=True)
    await worker.work()
    call = asyncio.ensure_future(caller({"k": "a"}, id="x"))
    await until(lambda: there.begun)
    closing = asyncio.ensure_future(caller.close())
    if ends_in_time:
        there.go_on.set()
        assert await call == "done"
    else:
        with pytest.raises(UnansweredError, match="closed"):
            await call
        there.go_on.set()
    await closing
    await until(lambda: outcome(database, "x") is Ending.DONE)
    await worker.close()


@awaited
async def test_no_worker_runs_what_was_taken_out():
    database, there = MemoryDatabase(), Gated()
    caller = serial(there.run, database, is_shared=True)
    call = asyncio.ensure_future(caller({"k": "a"}, id="x"))
    await until(lambda: "f" in database.lines and is_known(database, "x"))
    await caller.close()
    with pytest.raises(ExpiredError, match="closed"):
        await call
    assert outcome(database, "x") is Ending.EXPIRED


@awaited
async def test_a_caller_whose_request_cannot_be_taken_out_is_unanswered():
    database, there, here = MemoryDatabase(), Gated(), Gated()
    f, g = serial(here.run, database, drain="100ms"), serial(there.run, database)
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: there.begun)
    call = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await until(lambda: is_known(database, "x"))

    async def be_away(name, arguments):
        raise UnavailableError("no route")

    f._turns.before = be_away
    await f.close()
    with pytest.raises(UnansweredError, match="closed"):
        await call
    there.go_on.set()
    await holder
    await g.close()


@awaited
async def test_what_does_not_end_in_time_is_broken_off_and_its_key_goes_on():
    database, here, there = MemoryDatabase(), Gated(), Gated()
    f, g = serial(here.run, database, drain="50ms"), serial(there.run, database)
    call = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await until(lambda: here.begun)
    await f.close()
    with pytest.raises(LostError):
        await call
    there.go_on.set()
    assert await g({"k": "a"}, timeout="5s") == "done"
    await g.close()


@awaited
async def test_a_thread_that_hangs_is_not_waited_for_and_keeps_its_key():
    database, go_on, begun = MemoryDatabase(), threading.Event(), []

    def hang(claim: Claim, request: dict) -> str:
        begun.append(request)
        go_on.wait(30)
        return "done"

    f = serial(hang, database, drain="50ms")
    call = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await until(lambda: begun)
    async with asyncio.timeout(10):
        await f.close()
    with pytest.raises(UnansweredError, match="closed"):
        await call
    assert outcome(database, "x") is None
    go_on.set()
