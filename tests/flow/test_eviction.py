"""What goes back to the queue because its key is blocked: not too early, the oldest first, and not for too long."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from flow.limits_rig import FlowRig
from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION, QUEUE_TRANSACTION, Running
from flow.unreachable_adapters import Unreachable
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, Delivery
from keywise.core.controls import Pause
from keywise.core.errors import TransientError
from keywise.core.events import Unavailable
from keywise.core.source import TransactionalQueue
from keywise.flow.settlement import Settlement
from operate.admin_rig import Desk

waiting_ways = pytest.mark.parametrize("way", [LEDGER_TRANSACTION, CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL])
every_way = pytest.mark.parametrize(
    "way", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]
)


def page(key: str, version: int) -> dict[str, object]:
    return {"id": key, "v": version}


class NotedSource(MemorySource):
    """A queue that notes what is given back for a while, and that may be slow to hand over."""

    receive_s = 0.0
    """How long each receive takes."""

    def __init__(self, rig: FlowRig, name: str = "queue") -> None:
        super().__init__(rig.source.database, name, visibility_s=90.0)
        self._rig = rig
        self.given_back: dict[str | int, list[float]] = defaultdict(list)
        """The delays of each message, in their order."""

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        await self._be_slow()
        return await super().receive(limit, wait_s)

    def queue_in(self, connection: object) -> TransactionalQueue:
        return SlowQueue(super().queue_in(connection), self)

    def _hide(self, deliveries: Sequence[Delivery], for_s: float, *more: object) -> None:
        if for_s not in (0.0, self.visibility_s):
            for one in deliveries:
                self.given_back[one.id].append(for_s)
        super()._hide(deliveries, for_s, *more)

    async def _be_slow(self) -> None:
        if self.receive_s:
            await self._rig.pass_s(self.receive_s)


class SlowQueue:
    """The queue inside a transaction, with the same delay."""

    def __init__(self, queue: TransactionalQueue, source: NotedSource) -> None:
        self._queue, self._source = queue, source

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        await self._source._be_slow()
        return await self._queue.receive(limit, peeked)


def noted(way: str, **options: object) -> tuple[FlowRig, NotedSource]:
    rig = FlowRig(way, **options)
    source = rig.source = NotedSource(rig)
    return rig, source


@waiting_ways
def test_a_key_that_is_busy_for_moments_gives_nothing_back(way: str):
    """Followers of a lane at work wait for milliseconds; in the queue they would wait for longer."""
    rig, source = noted(way, prefetch=20, batch_max=10)

    async def work(change: Change) -> None:
        await rig.pass_s(0.01 * int(change.key))

    rig.sink.behaviour = work

    async def story() -> None:
        async with Running(rig):
            for number in range(400):
                await rig.send(page(str(number % 8), number))
                await rig.pass_s(0.001)
            await rig.until_empty()

    rig.play(story())
    assert source.given_back == {}
    assert sorted(rig.stored.values()) == list(range(392, 400))


@waiting_ways
def test_followers_of_a_slow_change_leave_room_and_are_back_when_it_ends(way: str):
    """A queue in a database need not wait for the delay: it knows whose messages they are."""
    rig, source = noted(way, prefetch=10, batch_max=10, evict_delay_s=30.0)
    gate = asyncio.Event()

    async def work(change: Change) -> None:
        if change.key == "slow" and not gate.is_set():
            await gate.wait()

    rig.sink.behaviour = work

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("slow", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(*(page("slow", version) for version in range(2, 30)))
            await rig.pass_s(2.0)
            if way in (LEASED, LEASED_CONDITIONAL):
                await rig.send(page("other", 1))
                await rig.until(lambda: "other" in rig.stored, limit_s=3.0)
                assert source.given_back
            gate.set()
            await rig.until_empty(limit_s=3.0)

    rig.play(story())
    assert rig.stored["slow"] == 29


@waiting_ways
def test_what_is_given_back_again_stays_away_for_twice_as_long(way: str):
    rig, source = noted(way, prefetch=10, batch_max=10)

    async def story() -> None:
        await rig.ledger.pause(Pause("hot"))
        await rig.send(*(page("hot", version) for version in range(1, 41)))
        async with Running(rig):
            await rig.until(lambda: max(map(len, source.given_back.values()), default=0) >= 9, limit_s=600.0)

    rig.play(story())
    longest = max(source.given_back.values(), key=len)
    assert longest[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@every_way
@pytest.mark.parametrize("held_by", ["pause", "failure"])
def test_a_backlog_of_a_blocked_key_leaves_half_of_each_receive_to_fresh_messages(way: str, held_by: str):
    """More of its messages are due again than can be received in that time."""
    rig, source = noted(way, prefetch=20, batch_max=10, attempts_max=1000, backoff_s=0.5, backoff_max_s=1.0)

    def fail(change: Change) -> None:
        if change.key == "hot":
            raise TransientError("not yet")

    rig.sink.behaviour = fail

    async def story() -> None:
        if held_by == "pause":
            await rig.ledger.pause(Pause("hot"))
        await rig.send(*(page("hot", version) for version in range(1, 2001)))
        async with Running(rig):
            await rig.until(lambda: all(one.count for one in rig.queue.values()), limit_s=60.0)
            source.receive_s = 0.2
            await rig.pass_s(20.0)
            for number in range(40):
                await rig.send(page(f"k{number}", 1))
            await rig.until(lambda: len(rig.stored) == 40, limit_s=10.0)

    rig.play(story())
    assert "hot" not in rig.stored


@every_way
def test_a_resume_brings_back_the_whole_backlog_at_once(way: str):
    rig, source = noted(way, prefetch=20, batch_max=10)
    desk = Desk(rig)

    async def story() -> None:
        await rig.ledger.pause(Pause("hot*", is_pattern=True))
        await rig.send(*(page(f"hot{number % 50}", number) for number in range(200)))
        async with Running(rig):
            await rig.until(lambda: max(map(max, source.given_back.values()), default=0.0) == 60.0, limit_s=600.0)
            await desk.act("resume", "hot*", is_pattern=True)
            await rig.until_empty(limit_s=10.0)

    rig.play(story())
    assert len(rig.stored) == 50


def test_a_failed_release_does_not_keep_back_what_waits_for_another_delay():
    """A source such as RabbitMQ lets a worker hold what it does not give back for as long as its channel lives."""
    rig = FlowRig(LEASED)
    away = Unreachable(rig.source, release=1)
    rig.more = {"sources": [("queue", away)]}

    async def story() -> None:
        await rig.send(b"first", b"second")
        first, second = await rig.source.receive(2, 0.0)
        came = [first, replace(second, count=2), replace(second, count=3)]
        await Settlement(rig.pipeline()).release_unread(0, came)
        await rig.pass_s(rig.settings.evict_s(3))
        assert [one.body for one in await rig.source.receive(2, 0.0)] == [b"second"]

    rig.play(story())
    assert away.calls["release"] == 3
    assert [one.cause for one in rig.of(Unavailable)] == ["release did not get through"]


class SlowlyParking(NotedSource):
    """A queue that takes back slowly, or not at all until the test opens it."""

    def __init__(self, rig: FlowRig, name: str = "queue") -> None:
        super().__init__(rig, name)
        self.is_parking = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.left_to_receive = 10**6

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        if self.left_to_receive <= 0:
            await self.may_go_on.wait()
        received = await super().receive(min(limit, max(self.left_to_receive, 1)), wait_s)
        self.left_to_receive -= len(received)
        return received

    async def park(self, deliveries: Sequence[Delivery], keys: Sequence[str], delays_s: Sequence[float]) -> None:
        self.is_parking.set()
        await self.may_go_on.wait()
        await super().park(deliveries, keys, delays_s)


def test_what_is_still_on_its_way_back_when_its_key_becomes_free_is_recalled_too():
    rig = FlowRig(LEASED, prefetch=10, batch_max=10, evict_delay_s=30.0)
    source = rig.source = SlowlyParking(rig)
    gate = asyncio.Event()

    async def work(change: Change) -> None:
        if change.key == "slow" and not gate.is_set():
            await gate.wait()

    rig.sink.behaviour = work

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("slow", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(*(page("slow", version) for version in range(2, 10)))
            await source.is_parking.wait()
            gate.set()
            await rig.until(lambda: rig.stored.get("slow") == 9)
            source.may_go_on.set()
            await rig.until_empty(limit_s=3.0)

    rig.play(story())


def test_a_source_that_takes_nothing_back_does_not_hold_up_the_others():
    """Its publisher may be blocked by the broker for minutes."""
    rig = FlowRig(LEASED, prefetch=24, batch_max=10)
    stuck = SlowlyParking(rig, "bulk")
    stuck.left_to_receive = 10
    rig.more["sources"] = [("queue", rig.source), ("stuck", stuck)]

    async def work(change: Change) -> None:
        if change.key in ("a", "b"):
            await stuck.may_go_on.wait()

    rig.sink.behaviour = work

    async def story() -> None:
        await rig.send_bulk(*(page("b", version) for version in range(1, 11)))
        async with Running(rig):
            await rig.until(lambda: rig.sink.tries)
            await rig.send(*(page("a", version) for version in range(1, 7)))
            await stuck.is_parking.wait()
            for number in range(10):
                await rig.send(page(f"k{number}", 1))
                await rig.until(lambda name=f"k{number}": name in rig.stored, limit_s=3.0)
            assert "b" not in rig.stored
            stuck.may_go_on.set()
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored["a"], rig.stored["b"]) == (6, 10)


def test_a_stop_waits_until_everything_is_given_back():
    rig = FlowRig(LEASED, prefetch=10, batch_max=10, evict_delay_s=30.0)
    source = rig.source = SlowlyParking(rig)

    async def story() -> None:
        await rig.ledger.pause(Pause("hot"))
        await rig.send(*(page("hot", version) for version in range(1, 10)))
        running = Running(rig)
        async with running:
            await source.is_parking.wait()
            running.consumer.stop()
            await rig.pass_s(1.0)
            assert running.task is not None and not running.task.done()
            source.may_go_on.set()
        assert all(message.visible_at <= rig.loop.time() for message in rig.queue.values())

    rig.play(story())
