"""How long a process counts on its turns, and how many it takes at a time."""

import asyncio
import time
from contextlib import suppress

import pytest

from keywise import Claim
from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.errors import LostError, UnansweredError, UnavailableError
from running import awaited
from serial.faulty_store import gate, serial, until

LEASE = {"lease": "1s", "margin": "300ms"}


class Hanging:
    """A function that never returns by itself."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[float] = []

    async def run(self, claim: Claim, request: dict) -> None:
        self.begun.append(request["k"])
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(time.monotonic())


@awaited
async def test_what_runs_is_broken_off_before_its_lease_is_over_if_the_store_is_silent():
    async def be_away(name, arguments):
        raise UnavailableError("no route")

    hanging = Hanging()
    f = serial(hanging.run, **LEASE)
    call = asyncio.ensure_future(f({"k": "a"}, timeout="20s"))
    await until(lambda: hanging.begun)
    f._turns.before, since = be_away, time.monotonic()
    await until(lambda: hanging.ended)
    assert hanging.ended[0] - since < 1.0
    f._turns.before = None
    with pytest.raises(LostError):
        await call
    await f.close()


@awaited
async def test_what_runs_is_broken_off_when_the_store_says_that_its_turn_is_lost():
    ahead_s = 0.0
    hanging, go_on = Hanging(), asyncio.Event()
    database = MemoryDatabase(clock=lambda: time.time() + ahead_s)
    options = {"lease": "3s", "margin": "1s", "drain": "50ms"}
    f, g = serial(hanging.run, database, **options), serial(hanging.run, database, **options)
    call = asyncio.ensure_future(f({"k": "a"}, timeout="30s"))
    await until(lambda: hanging.begun)

    async def be_slow(name, arguments):
        await go_on.wait()

    # The clock of the store jumps while no call of the first process arrives.
    f._turns.before = be_slow
    ahead_s = 10.0
    other = asyncio.ensure_future(g({"k": "a"}, timeout="20s"))
    await until(lambda: len(hanging.begun) == 2)
    assert not hanging.ended
    go_on.set()
    await until(lambda: hanging.ended)
    with pytest.raises(LostError):
        await call
    other.cancel()
    await asyncio.wait([other])
    await asyncio.gather(f.close(), g.close())


@awaited
@pytest.mark.parametrize("name", ["answer", "renew", "replies"])
async def test_a_process_was_heard_of_when_its_call_was_sent_not_when_it_was_answered(name):
    now = 1000.0
    hanging = Hanging()
    f = serial(hanging.run, clock=lambda: now, drain="1ms")
    calls = [asyncio.ensure_future(f({"k": "a"}, timeout="20s")) for _ in range(2)]
    await until(lambda: hanging.begun)
    stop, is_there, go_on = gate(name)
    f._turns.after = stop
    now = 1011.0  # A renewal is due.
    if name == "renew":
        f._merge._fall_due()
    if name == "answer":
        calls.append(asyncio.ensure_future(f({"k": "b"}, timeout="20s")))
    await is_there.wait()
    now = 1015.0
    pulse = f._merge._pulse
    pulse.heard_at = 1.0
    go_on.set()
    await until(lambda: pulse.heard_at != 1.0)
    assert pulse.heard_at == 1011.0
    for call in calls:
        call.cancel()
    await f.close()


@awaited
async def test_who_joins_with_less_patience_does_not_shorten_that_of_others():
    go_on, begun = asyncio.Event(), []

    async def waiting(claim: Claim, request: dict) -> str:
        begun.append(request["n"])
        await go_on.wait()
        return request["n"]

    f = serial(waiting)
    holder = asyncio.ensure_future(f({"k": "a", "n": "1"}))
    await until(lambda: begun)
    patient = asyncio.ensure_future(f({"k": "a", "n": "2"}, id="x", timeout="20s"))
    with pytest.raises(UnansweredError):
        await asyncio.gather(patient, f({"k": "a", "n": "2"}, id="x", timeout="100ms"))
    assert not patient.done()
    go_on.set()
    assert await asyncio.gather(holder, patient) == ["1", "2"]
    await f.close()


@awaited
async def test_calls_that_are_slow_are_not_taken_in_a_row():
    """If the process died, those behind the first would be lost, too."""
    seen = set()

    async def slow(claim: Claim, request: dict) -> None:
        seen.add(claim.token)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    f = serial(slow, run=0.001, poll="1s")
    await asyncio.gather(*(f({"k": "a"}) for _ in range(9)))
    assert len(seen) == 9
    await f.close()
