"""Serial functions whose observers, callers or stores misbehave: what is stored is told, and the rest goes on."""

import asyncio

from keywise import Claim
from keywise.databases.memory import MemoryDatabase
from keywise.errors import DatabaseError
from keywise.events import Alarmed, CallEnded
from merge_trouble import a_while, gate, serial, until
from running import awaited


async def one(claim: Claim, request: dict) -> int:
    return 1


@awaited
async def test_an_observer_that_raises_costs_nobody_an_answer():
    def observe(event):
        if isinstance(event, CallEnded):
            raise RuntimeError("its own server is away")

    f = serial(one, observers=[observe])
    assert await f({"k": "a"}, timeout="5s") == 1
    await f.close()


@awaited
async def test_a_reply_to_one_caller_does_not_end_the_call_of_another():
    f = serial(one)
    assert await f({"k": "a"}, id="x") == 1
    stop, is_there, go_on = gate("answer")
    f._turns.after = stop
    first = asyncio.ensure_future(f({"k": "a"}, id="x"))
    await is_there.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.ensure_future(f({"k": "a"}, id="x", timeout="5s"))
    await a_while()
    go_on.set()
    assert await second == 1
    await f.close()


@awaited
async def test_what_is_taken_out_for_one_caller_is_asked_for_again_for_the_next():
    database, held = MemoryDatabase(), asyncio.Event()
    begun = []

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await held.wait()
        return 2

    f, g = serial(one, database), serial(waiting, database)
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: begun)
    first = asyncio.ensure_future(f({"k": "a"}, id="y"))
    await until(lambda: "y" in database.lines["f"].ids)
    stop, is_there, go_on = gate("withdraw")
    f._turns.after = stop
    first.cancel()
    await is_there.wait()
    second = asyncio.ensure_future(f({"k": "a"}, id="y", timeout="5s"))
    await a_while()
    go_on.set()
    held.set()
    assert await asyncio.gather(holder, second) == [2, 1]
    await f.close()
    await g.close()


@awaited
async def test_an_error_while_waiting_for_others_is_told_and_passes():
    database, alarms = MemoryDatabase(), []
    go_on = asyncio.Event()
    begun = []

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await go_on.wait()
        return 2

    async def fail_once(name, arguments):
        if name == "wait":
            f._turns.before = None
            raise DatabaseError("disk I/O error")

    f = serial(one, database, observers=[lambda event: alarms.append(event) if isinstance(event, Alarmed) else None])
    g = serial(waiting, database)
    assert await f({"k": "b"}) == 1
    f._turns.before = fail_once
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: begun)
    call = asyncio.ensure_future(f({"k": "a"}, timeout="5s"))
    await until(lambda: alarms)
    go_on.set()
    assert await asyncio.gather(holder, call) == [2, 1]
    assert "disk I/O error" in alarms[0].cause
    await f.close()
    await g.close()
