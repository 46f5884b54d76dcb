"""Live changes go before bulk ones, each way of a batch; bulk goes on however many live ones come."""

import asyncio
import gc
import itertools
import json
from typing import Any

import pytest

from flow.limits_rig import FlowRig
from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION, QUEUE_TRANSACTION, Running
from flow.test_consumer import every_way, page
from keywise.adapters.memory.database import Message
from keywise.adapters.memory.source import MemorySource
from keywise.core import events
from keywise.core.change import Change
from keywise.core.entry import Entry
from keywise.core.errors import UnavailableError
from keywise.flow.transactional import BULK_PART

TAKES_S = 0.1


def slow(rig: FlowRig) -> None:
    """Every write takes its time."""

    async def take_time(change: Change) -> None:
        await rig.pass_s(TAKES_S)

    rig.sink.behaviour = take_time


def bulk_pages(count: int) -> list[dict[str, object]]:
    return [page(f"b{number}", 1) for number in range(count)]


@every_way
def test_a_live_change_waits_for_no_more_than_a_short_batch_of_bulk(way: str):
    rig = FlowRig(way, bulk=True, batch_max=40, prefetch=80, concurrency=4, lease_s=600.0, runtime_max_s=600.0)
    rig.sink.batch_max = 10
    slow(rig)

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(200))
        async with Running(rig):
            await rig.until(lambda: len(rig.order) > 15)
            await rig.send(page("live", 1))
            sent = len(rig.order)
            await rig.until(lambda: "live" in rig.order)
            between = rig.order.index("live") - sent
            assert between <= 10, "a part of the largest batch"
            await rig.until(lambda: "live" in rig.stored, limit_s=2.0)
            rig.sink.behaviour = None
            await rig.until_empty()

    rig.play(story())
    assert len(rig.stored) == 201


@every_way
def test_live_changes_that_wait_as_well_go_first(way: str):
    rig = FlowRig(way, bulk=True, batch_max=8, prefetch=16, concurrency=1)

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(20))
        await rig.send(*(page(f"a{number}", 1) for number in range(4)))
        async with Running(rig):
            await rig.until_empty()

    rig.play(story())
    assert sorted(rig.order[:4]) == ["a0", "a1", "a2", "a3"]
    assert len(rig.stored) == 24


@every_way
@pytest.mark.parametrize("handlers", [1, 2, 8])
def test_bulk_goes_on_under_live_load_that_never_ends(way: str, handlers: int):
    """More live changes come than can be written, and still bulk has its share; but not more than that."""
    rig = FlowRig(way, bulk=True, batch_max=8, prefetch=32, concurrency=handlers, lease_s=600.0, runtime_max_s=600.0)
    rig.sink.batch_max = 1 if way.startswith("leased") else 8
    slow(rig)

    async def press() -> None:
        for turn in itertools.count():
            await rig.send(*(page(f"a{turn}.{number}", 1) for number in range(max(8, 2 * handlers))))
            await rig.pass_s(TAKES_S)

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(1000))
        pressing = asyncio.get_running_loop().create_task(press())
        async with Running(rig):
            await rig.pass_s(30.0)
            pressing.cancel()
            share = sum(key.startswith("b") for key in rig.order) / len(rig.order)
            assert 1 / 100 <= share <= 1 / 4
            rig.sink.behaviour = None

    rig.play(story())


@every_way
def test_bulk_alone_is_not_slowed_down(way: str):
    """Where nothing live waits, every worker and every batch is for bulk."""
    rig = FlowRig(way, bulk=True, batch_max=40, prefetch=80, concurrency=8)
    rig.sink.batch_max = 1 if way.startswith("leased") else 40
    slow(rig)

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(48))
        async with Running(rig):
            await rig.until_empty()

    rig.play(story())
    side_by_side = 6 if way.startswith("leased") else 1
    assert max(rig.times) <= 48 * TAKES_S / side_by_side + 1.0


@every_way
def test_if_all_queues_are_bulk_none_goes_behind(way: str):
    rig = FlowRig(way, bulk=True, batch_max=40, prefetch=80)
    rig.more["bulk"] = frozenset({0, 1})

    async def story() -> None:
        await rig.send(*(page(f"a{number}", 1) for number in range(40)))
        await rig.send_bulk(*bulk_pages(40))
        async with Running(rig):
            await rig.until_empty()

    rig.play(story())
    assert len(rig.stored) == 80


@every_way
def test_a_newer_live_change_wins_over_bulk_and_an_older_one_loses(way: str):
    rig = FlowRig(way, bulk=True)

    async def story() -> None:
        await rig.send_bulk(page("a", 5), page("b", 1))
        await rig.send(page("a", 3), page("b", 2))
        async with Running(rig):
            await rig.until_empty()

    rig.play(story())
    assert rig.stored == {"a": 5, "b": 2}
    assert sum(rig.outcomes.values()) == 4


@pytest.mark.parametrize("way", [LEDGER_TRANSACTION, CLAIMED_TRANSACTION, LEASED])
def test_bulk_that_is_blocked_leaves_room_to_bulk_and_live(way: str):
    """Rule 15, on both lanes."""
    rig = FlowRig(way, bulk=True, batch_max=8, prefetch=16, evict_delay_s=30.0)

    async def story() -> None:
        entries = rig.database.scope("test").entries
        async with Running(rig):
            for number in range(12):
                entries[f"b{number}"] = Entry(token=7, owner="other", lease_until=1000.0, abandoned=True)
            await rig.send_bulk(*bulk_pages(40))
            await rig.send(page("a", 1))
            await rig.until(lambda: len(rig.stored) == 29, limit_s=10.0)

    rig.play(story())
    assert rig.letters == []


def test_bulk_in_the_ledgers_database_has_short_batches_though_live_comes_from_elsewhere():
    rig = FlowRig(QUEUE_TRANSACTION, batch_max=5 * BULK_PART, prefetch=10 * BULK_PART)
    elsewhere = FlowRig(LEASED).source
    rig.more |= {"sources": [("live", elsewhere), ("bulk", rig.bulk_source)], "bulk": frozenset({1})}

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(100))
        async with Running(rig):
            await rig.until_empty()

    rig.play(story())
    assert max(rig.sink.calls) == 5


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL])
def test_bulk_handlers_that_hang_leave_workers_and_claims_to_live_changes(way: str):
    rig = FlowRig(way, bulk=True, concurrency=4, lease_s=600.0, runtime_max_s=600.0, drain_s=1.0)
    rig.sink.batch_max = 1

    async def hang(change: Change) -> None:
        await rig.pass_s(500.0 if change.key.startswith("b") else TAKES_S)

    rig.sink.behaviour = hang

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(50))
        async with Running(rig):
            await rig.until(lambda: len(rig.order) == 3)
            await rig.send(*(page(f"a{number}", 1) for number in range(10)))
            await rig.until(lambda: len(rig.stored) == 10, limit_s=3.0)
            assert sum(key.startswith("b") for key in rig.order) == 3

    rig.play(story())


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL])
@pytest.mark.parametrize(("batch_max", "side_by_side"), [(10, 1), (1, 6)])
def test_a_sink_that_takes_many_changes_gets_one_call_with_bulk_at_a_time_beside_live_ones(
    way: str, batch_max: int, side_by_side: int
):
    """One that takes a single change is left to all workers that are not for live changes."""
    rig = FlowRig(way, bulk=True, batch_max=80, prefetch=160, concurrency=8, lease_s=600.0, runtime_max_s=600.0)
    rig.sink.batch_max = batch_max
    at_work, seen = set[str](), list[int]()

    async def look(change: Change) -> None:
        if change.key.startswith("b"):
            at_work.add(change.key)
            seen.append(len(at_work))
        await rig.pass_s(TAKES_S)
        at_work.discard(change.key)

    rig.sink.behaviour = look

    async def press() -> None:
        for turn in itertools.count():
            await rig.send(page(f"a{turn}", 1))
            await rig.pass_s(TAKES_S)

    async def story() -> None:
        pressing = asyncio.get_running_loop().create_task(press())
        async with Running(rig):
            await rig.until(lambda: "a0" in rig.order)
            await rig.send_bulk(*bulk_pages(200))
            await rig.until(lambda: len(seen) >= 50)
            assert max(seen) == side_by_side
            pressing.cancel()
            rig.sink.behaviour = None

    rig.play(story())


def test_bulk_goes_on_though_the_only_worker_always_finds_a_live_change():
    """Each call takes all that is claimed, and something live is claimed during each call."""
    rig = FlowRig(LEASED, bulk=True, concurrency=1, batch_max=40, prefetch=80)
    rig.sink.batch_max = 40
    slow(rig)

    async def press() -> None:
        for turn in itertools.count():
            await rig.send(page(f"a{turn}", 1))
            await rig.pass_s(TAKES_S / 2)

    async def story() -> None:
        async with Running(rig):
            pressing = asyncio.get_running_loop().create_task(press())
            await rig.until(lambda: len(rig.order) > 3)
            await rig.send_bulk(*bulk_pages(50))
            await rig.until(lambda: "b0" in rig.stored, limit_s=600.0)
            pressing.cancel()
            rig.sink.behaviour = None

    rig.play(story())


def test_a_live_change_that_came_while_bulk_waited_for_its_transaction_goes_first():
    rig = FlowRig(QUEUE_TRANSACTION, bulk=True)

    async def story() -> None:
        await rig.send_bulk(*bulk_pages(20))
        async with rig.database.exclusive():
            async with Running(rig) as running:
                await rig.pass_s(1.0)
                body = json.dumps(page("live", 1)).encode()
                rig.queue[rig.database.number()] = Message(body, rig.loop.time(), rig.loop.time())
                rig.database._writer.release()
                await rig.until_empty()
                running.consumer.stop()
                await running.task
            await rig.database._writer.acquire()

    rig.play(story())
    assert rig.order[0] == "live"
    assert len(rig.stored) == 21


def test_two_queues_that_cannot_be_reached_at_once_are_one_trouble():
    """No error of either is left that nobody handles."""
    rig = FlowRig(QUEUE_TRANSACTION, bulk=True)
    sources = [Away(rig.source, rig), Away(rig.bulk_source, rig)]
    rig.more["sources"] = [("queue", sources[0]), ("bulk", sources[1])]

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(5.0)
            await rig.send(page("a", 1))
            await rig.until_empty()
        gc.collect()

    rig.play(story())
    assert rig.stored == {"a": 1}
    assert rig.of(events.Unavailable)


class Away:
    """A queue that nobody can wait at for the first seconds; it can be asked all the same."""

    def __init__(self, source: MemorySource, rig: FlowRig) -> None:
        self._source, self._rig = source, rig
        self.queue_in, self.peek = source.queue_in, source.peek

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def arrived(self, wait_s: float) -> bool:
        if wait_s > 0 and self._rig.loop.time() < 2.0:
            raise UnavailableError("no answer")
        return await self._source.arrived(wait_s)
