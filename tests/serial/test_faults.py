"""Serial functions whose observers, callers or stores misbehave: what is stored is told, and the rest goes on."""

import asyncio

import pytest

from keywise import Claim
from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.errors import DatabaseError, ExpiredError, LostError, UnansweredError
from keywise.core.events import Alarmed, CallEnded
from keywise.core.serial.contract import Mode, Request, Switch
from running import awaited
from serial.faulty_store import a_while, gate, serial, until


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


@awaited
async def test_a_request_that_cannot_be_sent_fails_alone():
    """Its error ends neither the answer nor the request that travel in the same call."""
    go_on, begun = asyncio.Event(), []

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await go_on.wait()
        return 1

    async def refuse(name, arguments):
        if name == "answer" and any(request.asked_by == "\udcff" for request in arguments[3]):
            raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    f = serial(waiting, timeout="10s")
    good = asyncio.ensure_future(f({"k": "good"}, id="good"))
    await until(lambda: begun)
    f._turns.before = refuse
    bad = asyncio.ensure_future(f._merge.call(a_request("bad", "\udcff"), {"k": "bad"}, a_deadline()))
    other = asyncio.ensure_future(f({"k": "other"}))
    go_on.set()
    assert await asyncio.gather(good, other) == [1, 1]
    with pytest.raises(UnansweredError, match=r"'bad'.*surrogates not allowed"):
        await bad
    assert await f({"k": "good"}, id="next") == 1
    await f.close()


@awaited
async def test_an_answer_that_cannot_be_stored_is_lost_alone():
    async def refuse(name, arguments):
        if name == "answer" and any(reply.body == b'"large"' for reply in arguments[0]):
            raise ValueError("string or blob too big")

    async def echo(claim: Claim, request: dict) -> str:
        return request["say"]

    f = serial(echo, timeout="10s")
    assert await f({"k": "a", "say": "1"}) == "1"
    f._turns.before = refuse
    calls = (f({"k": "a", "say": "large"}, id="x"), f({"k": "b", "say": "2"}), f({"k": "a", "say": "3"}))
    lost, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(lost, LostError) and "too big" in str(lost)
    assert others == ["2", "3"]
    await f.close()


@awaited
async def test_answers_outlast_an_error_of_the_store_that_a_person_puts_right():
    is_forbidden, alarms, go_on, begun = True, [], asyncio.Event(), []

    async def forbid(name, arguments):
        if name in ("answer", "withdraw") and is_forbidden:
            raise DatabaseError("permission denied")

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await go_on.wait()
        return 1

    f = serial(waiting, observers=[lambda event: alarms.append(event) if isinstance(event, Alarmed) else None])
    call = asyncio.ensure_future(f({"k": "a"}, timeout="10s"))
    await until(lambda: begun)
    f._turns.before = forbid
    go_on.set()
    late = asyncio.ensure_future(f({"k": "a"}, timeout="10s"))
    await until(lambda: len(alarms) > 2)
    is_forbidden = False
    assert await asyncio.gather(call, late) == [1, 1]
    await f.close()


@awaited
async def test_an_id_that_cannot_be_taken_out_holds_up_nobody():
    database, go_on, begun = MemoryDatabase(), asyncio.Event(), []

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await go_on.wait()
        return 2

    async def refuse(name, arguments):
        if name == "withdraw" and "bad" in arguments[0]:
            raise DatabaseError("a half character")

    f, g = serial(one, database), serial(waiting, database)
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: begun)
    calls = [asyncio.ensure_future(f({"k": "a"}, id=id)) for id in ("bad", "good")]
    await until(lambda: "good" in database.lines["f"].ids)
    f._turns.before = refuse
    for call in calls:
        call.cancel()
    assert await f({"k": "b"}, timeout="5s") == 1
    await until(lambda: database.lines["f"].records[database.lines["f"].ids["good"]].reply is not None)
    go_on.set()
    assert await holder == 2
    await f.close()
    await g.close()


def a_request(id: str, asked_by: str) -> Request:
    return Request(id=id, key=id, body=b"{}", asked_by=asked_by)


def a_deadline() -> float:
    return asyncio.get_running_loop().time() + 10.0


@awaited
async def test_a_key_that_is_switched_while_things_are_sent_one_by_one_is_asked_for_in_its_new_mode():
    f = serial(one)
    assert await f({"k": "b"}) == 1
    operator = f._turns.operator
    await operator.switch(Switch(keys="a", mode=Mode.OBSERVE, at=await operator.now()))
    f._turns.before = spoilt_once()
    assert await f({"k": "a"}, timeout="5s") == 1
    await f.close()


@awaited
async def test_who_was_told_that_it_did_not_run_does_not_run_later_in_another_process():
    """It came while others were sent one by one, and waited behind a slow one."""
    runs = []

    async def note(claim: Claim, request: dict) -> None:
        runs.append(request["k"])

    f = serial(note, is_shared=True, run_here=True)
    await f({"k": "first"})
    stop, is_there, go_on = gate("answer")
    spoil = spoilt_once()

    async def spoil_then_stop(name, arguments):
        await spoil(name, arguments)
        await stop(name, arguments)

    f._turns.before = spoil_then_stop
    slow = asyncio.ensure_future(f({"k": "slow"}))
    await a_while()
    impatient = asyncio.ensure_future(f({"k": "impatient"}, timeout="1s"))
    await is_there.wait()
    with pytest.raises(ExpiredError):
        await impatient
    go_on.set()
    await slow
    await f({"k": "last"})
    assert "impatient" not in runs
    await f.close()


def spoilt_once():
    """Trouble with the next answer that is nobody's fault."""
    left = [1]

    async def spoil(name, arguments):
        if name == "answer" and left:
            left.pop()
            raise DatabaseError("spoilt once")

    return spoil
