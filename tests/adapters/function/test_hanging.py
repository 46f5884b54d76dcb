"""A handler that hangs loses its claim and nobody else's."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from adapters.function.handler_shop import SHORT, bodies, handle_until, keys, shop_with
from app.shop import Shop
from keywise import Change
from keywise.adapters.function.sink import FunctionSink
from keywise.core.change import order_of
from keywise.core.entry import Claim
from running import run

COUNT = 20
HUNG = {**SHORT, "runtime_max": "500ms", "drain": "100ms", "attempts_max": 2}


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What a hanging thread waits for; it ends with the test."""
    event = threading.Event()
    yield event
    event.set()


async def work_beside_a_hung_change(shop: Shop, applied: list[str]) -> tuple[str, int, int]:
    """Send one that hangs and many after it: its cause of death, its suspicion, and how many died besides."""

    async def is_over() -> bool:
        return len(set(applied)) == COUNT and bool(await shop.letters())

    await handle_until(shop, is_over, {"key": "hung", "version": 1}, *bodies(COUNT))
    letters, entry = await shop.letters(), await shop.entry("hung")
    cause = next(letter.cause for letter in letters if letter.key == "hung")
    return cause, entry.suspicions, len(letters) - 1


def test_a_plain_handler_that_hangs_keeps_its_slot_and_the_others_go_on(tmp_path, never):
    begun: list[str] = []
    applied: list[str] = []

    def handle(change: Change) -> None:
        begun.append(change.key)
        if change.key == "hung":
            never.wait()
        applied.append(change.key)

    shop = shop_with(handle, tmp_path, concurrency=4, **HUNG)
    cause, suspect, others = run(work_beside_a_hung_change(shop, applied))
    assert cause == "the outcome of the last of 2 attempts is unknown"
    assert suspect > 0, "it may write whenever it wakes up"
    assert (begun.count("hung"), others) == (1, 0), "a second thread would hang as well"
    assert set(applied) == keys(COUNT), "a busy machine may make a call twice"


def test_a_batch_with_one_that_hangs_costs_its_neighbours_no_more_than_that_try(tmp_path, never):
    """Rule 17: one bad change never takes its batch with it. Each is tried alone, though the thread still hangs."""
    applied: list[str] = []

    def handle(changes: list[Change]) -> None:
        if any(change.key == "hung" for change in changes):
            never.wait()
        applied.extend(change.key for change in changes)

    shop = shop_with(handle, tmp_path, concurrency=4, **HUNG)
    cause, suspect, others = run(work_beside_a_hung_change(shop, applied))
    assert cause == "the outcome of the last of 2 attempts is unknown"
    assert (suspect > 0, others) == (True, 0)
    assert set(applied) == keys(COUNT), "a busy machine may make a call twice"


def test_a_key_whose_earlier_call_still_runs_fails_alone(never):
    """A newer version of it may come in one batch with others."""
    begun: list[list[str]] = []

    def handle(changes: list[Change]) -> None:
        begun.append([change.key for change in changes])
        if any(change.key == "hung" for change in changes):
            never.wait()

    async def outcomes(sink: FunctionSink, *some: str) -> list[str]:
        changes = [Change(key, order_of(1)) for key in some]
        claims = [Claim(key, order_of(1), False, token=1) for key in some]
        return [result.outcome.value for result in await sink.apply(changes, claims)]

    async def hang(sink: FunctionSink, *some: str) -> None:
        """Call it, and give it up once it runs."""
        calling = asyncio.create_task(outcomes(sink, *some))
        while begun[-1:] != [list(some)]:
            await asyncio.wait([calling], timeout=0.01)
        calling.cancel()
        await asyncio.wait([calling])

    async def story() -> None:
        async with FunctionSink(handle, threads=4) as sink:
            await hang(sink, "hung", "a")
            assert await outcomes(sink, "b", "hung", "c") == ["applied", "failed", "applied"]
            assert await outcomes(sink, "a", "b") == ["failed", "applied"]
            assert await outcomes(sink, "a") == ["applied"]
            await hang(sink, "hung")
            assert await outcomes(sink, "hung") == ["failed"], "a third thread would hang as well"
        assert begun == [["hung", "a"], ["b", "c"], ["b"], ["a"], ["hung"]]

    run(story())


def test_an_async_handler_that_hangs_is_cancelled_and_its_slot_is_free(tmp_path):
    """There is only one slot, so the others could not go on without it."""
    applied: list[str] = []
    cancelled: list[str] = []

    async def handle(change: Change) -> None:
        try:
            if change.key == "hung":
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(change.key)
            raise
        applied.append(change.key)

    shop = shop_with(handle, tmp_path, concurrency=1, **HUNG)
    cause, suspect, others = run(work_beside_a_hung_change(shop, applied))
    assert cause == "the outcome of the last of 2 attempts is unknown"
    assert (suspect > 0, others) == (True, 0)
    assert cancelled[:2] == ["hung"] * 2 and set(cancelled) == {"hung"}, "a busy machine may make a call once more"
