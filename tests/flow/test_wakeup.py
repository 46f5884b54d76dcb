"""A bell for one waiting loop: it wakes at once, keeps a ring that nobody heard, and gives up at its limit."""

import asyncio

from keywise.flow.wakeup import Wakeup
from keywise.testing.virtual_loop import VirtualLoop


def test_a_ring_wakes_who_waits():
    async def wait_for_it() -> float:
        wakeup, loop = Wakeup(), asyncio.get_running_loop()
        loop.call_later(3.0, wakeup.notify)
        await wakeup.wait()
        return loop.time()

    assert VirtualLoop().run_until_complete(wait_for_it()) == 3.0


def test_a_ring_while_nobody_waits_is_kept_once():
    async def wait_twice() -> float:
        wakeup = Wakeup()
        wakeup.notify()
        wakeup.notify()
        await wakeup.wait(10.0)
        await wakeup.wait(10.0)
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run_until_complete(wait_twice()) == 10.0


def test_nothing_but_the_limit_ends_a_silent_wait():
    async def wait_for_nothing() -> float:
        await Wakeup().wait(7.0)
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run_until_complete(wait_for_nothing()) == 7.0


def test_a_limit_of_nothing_returns_at_once():
    async def look() -> float:
        await Wakeup().wait(0.0)
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run_until_complete(look()) == 0.0
