"""How a consumer ends: drained, cancelled or out of time; what is given back and what is left to its lease."""

import asyncio

import pytest

from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION, WAYS, Rig, Running
from flow.test_consumer import every_way, page
from keywise.core import events
from keywise.core.change import Change
from keywise.core.entry import Claim
from keywise.flow.consumer import DRAIN_LOOK_S, KEYS_SHOWN

waiting_ways = pytest.mark.parametrize("way", WAYS[1:])
claiming_ways = pytest.mark.parametrize("way", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL])


class Gate:
    """Holds up the store until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, change: Change) -> None:
        self.reached.set()
        await self.opened.wait()


@every_way
def test_a_stop_lets_running_work_finish(way: str):
    rig = Rig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            running.consumer.stop()
            await rig.pass_s(3.0)
            assert not running.task.done()
            gate.opened.set()
        assert (rig.stored, rig.outcomes) == ({"a": 1}, {"applied": 1})

    rig.play(story())


@claiming_ways
def test_a_drain_says_what_it_waits_for_and_for_how_long(way: str):
    rig = Rig(way, drain_s=60.0, concurrency=2)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            running.consumer.stop()
            await rig.pass_s(DRAIN_LOOK_S + 1.0)
            gate.opened.set()

    rig.play(story())
    first, second = rig.of(events.Draining)
    assert (first.changes, list(first.keys), first.left_s) == (1, ["a"], 60.0)
    assert (second.changes, list(second.keys)) == (1, ["a"])
    assert 59.0 - DRAIN_LOOK_S < second.left_s <= 60.0 - DRAIN_LOOK_S


def test_a_drain_names_a_few_of_the_keys_that_it_waits_for():
    rig = Rig(LEASED, concurrency=20)
    rig.sink.batch_max = 1

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(*(page(f"k{number:02}", 1) for number in range(20)))
        async with Running(rig) as running:
            await rig.until(lambda: len(rig.sink.tries) == 20)
            running.consumer.stop()
            await rig.pass_s(0.1)
            gate.opened.set()

    rig.play(story())
    [draining] = rig.of(events.Draining)
    assert (draining.changes, len(draining.keys)) == (20, KEYS_SHOWN)


@every_way
def test_a_stop_of_an_idle_consumer_ends_at_once(way: str):
    rig = Rig(way, poll_s=60.0)

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(5.0)
        assert rig.loop.time() < 66.0

    rig.play(story())
    assert isinstance(rig.events[-1], events.Stopped)


@waiting_ways
def test_a_drain_gives_back_what_waits_at_once(way: str):
    """Rule 18: a drained worker costs nothing, and nobody waits for a visibility to end."""
    rig = Rig(way, batch_max=1, prefetch=10, concurrency=1)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(*(page(f"k{number}", 1) for number in range(5)))
        async with Running(rig) as running:
            await gate.reached.wait()
            await rig.until(lambda: all(message.visible_at > rig.loop.time() for message in rig.queue.values()))
            running.consumer.stop()
            gate.opened.set()
        done = set(rig.stored)
        assert len(done) in {1, 2}
        left = await rig.source.receive(10, 0.0)
        assert len(left) == 5 - len(done), "visible to others now"

    rig.play(story())


@claiming_ways
def test_a_drain_gives_back_claims_whose_work_had_not_begun(way: str):
    """Rule 18: nothing was written under them."""
    rig = Rig(way, concurrency=1)
    rig.sink.batch_max = 1

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            await rig.send(page("b", 1), page("c", 1))
            if way != CLAIMED_TRANSACTION:  # There the open transaction keeps everybody out.
                await rig.until(lambda: any(rig.entry(key) for key in "bc"))
            running.consumer.stop()
            gate.opened.set()
        assert rig.stored == {"a": 1}
        assert (rig.entry("b"), rig.entry("c")) == (None, None)
        assert len(await rig.source.receive(10, 0.0)) == 2

    rig.play(story())


@claiming_ways
def test_a_cancelled_consumer_leaves_its_leases_to_run_out(way: str):
    """Rule 6: what runs has an unknown outcome, so nothing is released."""
    rig = Rig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
        entry = rig.entry("a")
        assert entry.token != 0
        assert entry.lease_until > rig.loop.time()
        assert await rig.source.receive(10, 0.0) == []
        assert rig.of(events.Stopped) == []

    rig.play(story())


@every_way
def test_what_a_cancelled_consumer_left_is_done_by_the_next_one(way: str):
    rig = Rig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1), page("b", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            running.task.cancel()
            await asyncio.wait([running.task])
        rig.sink.behaviour = None
        async with Running(rig, "w2"):
            await rig.until(lambda: not rig.queue)
        assert (rig.stored, rig.letters) == ({"a": 1, "b": 1}, [])

    rig.play(story())


@pytest.mark.parametrize("way", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION])
def test_a_drain_that_takes_too_long_is_ended(way: str):
    """A hung handler does not keep a worker from stopping; its lease has to run out."""
    rig = Rig(way, drain_s=7.0)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            stopped_at = rig.loop.time()
            running.consumer.stop()
            await running.task
        assert rig.loop.time() - stopped_at == pytest.approx(7.0)
        assert (rig.stored, len(rig.queue)) == ({}, 1)
        assert way == LEDGER_TRANSACTION or rig.entry("a").token != 0

    rig.play(story())
    [stopped] = rig.of(events.Stopped)
    assert (stopped.changes, list(stopped.keys)) == (1, ["a"]), "what was still running"


def test_a_consumer_whose_work_was_finished_stops_with_nothing_running():
    rig = Rig(LEASED)

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    [stopped] = rig.of(events.Stopped)
    assert (stopped.changes, list(stopped.keys)) == (0, [])


def test_a_stop_during_the_claim_gives_everything_back():
    rig = Rig(LEASED)

    async def story() -> None:
        async with rig.database.exclusive():
            await rig.send(page("a", 1))
            async with Running(rig) as running:
                await rig.pass_s(1.0)
                running.consumer.stop()
                await rig.pass_s(1.0)
                rig.database._writer.release()
                await running.task
                await rig.database._writer.acquire()
        assert (rig.stored, rig.entry("a")) == ({}, None)
        assert len(await rig.source.receive(10, 0.0)) == 1

    rig.play(story())


@every_way
def test_an_error_that_is_nobodys_fault_stops_the_consumer_as_itself(way: str):
    """No ExceptionGroup leaves a module."""
    rig = Rig(way)

    class Broken(BaseException):
        """Not an ordinary error of an observer, which would only be logged."""

    def observe(event: events.Event) -> None:
        if isinstance(event, events.BatchOpened):
            raise Broken

    rig.more["observers"] = [observe]

    async def story() -> None:
        await rig.send(page("a", 1))
        running = Running(rig)
        async with asyncio.timeout(60.0):
            with pytest.raises(Broken):
                await running.consumer.run()

    rig.play(story())


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL])
def test_a_change_under_a_lost_claim_is_asked_for_again(way: str):
    """Rule 9: the commit is refused, and the key is somebody else's."""
    rig = Rig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig):
            await gate.reached.wait()
            mine = rig.entry("a")
            await rig.ledger.release([Claim("a", mine.intent, False, mine.token)])
            rig.sink.behaviour = None
            await rig.until(lambda: not rig.queue)
        assert rig.stored == {"a": 1}
        assert [event.key for event in rig.of(events.ClaimLost)][:1] == ["a"]

    rig.play(story())


@every_way
def test_an_observer_that_fails_stops_nothing(way: str, caplog: pytest.LogCaptureFixture):
    """Whoever watches must not be able to stop what is watched."""
    rig = Rig(way)

    def observe(event: events.Event) -> None:
        raise ValueError("a bug in an observer")

    rig.more["observers"] = [observe]

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.pass_s(5.0)

    rig.play(story())
    assert list(rig.stored) == ["a"]
    assert "an observer failed" in caplog.text
