"""Rates and debounces from the queue to the store, each way of a batch, alone and together."""

import itertools

import pytest

from flow.limits_rig import FlowRig
from flow.rig import LEASED, Running
from flow.test_consumer import page
from flow.test_consumer_shutdown import Gate, waiting_ways
from keywise.core import events
from keywise.core.change import Change
from keywise.core.controls import Pause
from keywise.core.entry import Entry
from keywise.core.errors import TransientError
from keywise.core.limits import Debounce, Rate


def gaps(times: list[float]) -> list[float]:
    return [round(after - before, 1) for before, after in itertools.pairwise(times)]


# Rates.


@waiting_ways
def test_a_key_is_dispatched_at_its_rate_and_ends_at_its_newest(way: str):
    rig = FlowRig(way, rate=Rate(1, per="10s"))

    async def story() -> None:
        async with Running(rig):
            for version in range(1, 26):
                await rig.send(page("a", version))
                await rig.pass_s(1.0)
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"a": 25}, [])
    assert gaps(rig.times) == [10.0] * (len(rig.times) - 1)
    assert [version for _, version in rig.written] == sorted(version for _, version in rig.written)


@waiting_ways
def test_two_workers_share_the_rate_of_a_key(way: str):
    rig = FlowRig(way, rate=Rate(1, per="10s"), batch_max=1, prefetch=4)

    async def story() -> None:
        async with Running(rig, "w1"), Running(rig, "w2"):
            for version in range(1, 26):
                await rig.send(page("a", version))
                await rig.pass_s(1.0)
            await rig.until_empty()

    rig.play(story())
    assert rig.stored == {"a": 25}
    assert min(gaps(rig.times)) >= 10.0
    versions = [version for _, version in rig.written]
    assert versions == sorted(versions), "never older after newer"


@waiting_ways
def test_a_rate_is_one_of_each_key(way: str):
    rig = FlowRig(way, rate=Rate(1, per="10s"))
    rig.run(*(page(f"k{number}", 1) for number in range(20)))
    assert len(rig.stored) == 20
    assert max(rig.times) < 1.0


@waiting_ways
def test_a_burst_of_n_goes_at_once_and_then_at_an_even_pace(way: str):
    rig = FlowRig(way, rate=Rate(3, per="9s"))

    async def story() -> None:
        async with Running(rig):
            for version in range(1, 7):
                await rig.send(page("a", version))
                await rig.until(lambda version=version: rig.stored.get("a") == version)

    rig.play(story())
    assert [round(at) for at in rig.times] == [0, 0, 0, 3, 6, 9]


@waiting_ways
def test_a_limited_key_is_told_with_its_wait_and_costs_no_attempt(way: str):
    rig = FlowRig(way, rate=Rate(1, per="10s"), attempts_max=1)
    rig.run(page("a", 1))
    rig.run(page("a", 2))
    assert (rig.stored, rig.letters, rig.of(events.Failed)) == ({"a": 2}, [], [])


def test_a_worker_says_why_a_key_waits_and_for_how_long():
    rig = FlowRig(LEASED, rate=Rate(1, per="10s"))
    rig.run(page("a", 1))
    rig.run(page("a", 2))
    [refused] = rig.of(events.Refused)
    assert (refused.key, refused.version, refused.reason) == ("a", 2, "limited")
    assert 9.0 < refused.wait_s <= 10.0


def test_a_limited_key_is_not_asked_for_again_with_every_newer_change():
    rig = FlowRig(LEASED, rate=Rate(1, per="10s"))

    async def story() -> None:
        async with Running(rig):
            for version in range(30):
                await rig.send(page("a", version))
                await rig.pass_s(0.3)
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored, len(rig.of(events.Refused))) == ({"a": 29}, 1)


# Debounce.


@waiting_ways
def test_a_burst_is_written_once_with_its_newest_change(way: str):
    rig = FlowRig(way, debounce=Debounce("2s", max_wait="60s"))

    async def story() -> None:
        async with Running(rig):
            for version in (1, 4, 2, 5, 3):
                await rig.send(page("a", version))
                await rig.pass_s(0.5)
            await rig.until_empty()

    rig.play(story())
    assert rig.written == [("a", 5)]
    assert rig.outcomes == {"applied": 1, "superseded": 4}
    assert 3.5 <= rig.times[0] <= 3.7, "two seconds after the newest came, at 1.5"


@waiting_ways
def test_a_burst_without_end_is_written_after_the_longest_wait(way: str):
    rig = FlowRig(way, debounce=Debounce("2s", max_wait="5s"))

    async def story() -> None:
        async with Running(rig):
            for version in range(1, 25):
                await rig.send(page("a", version))
                await rig.pass_s(0.5)
            await rig.until_empty()

    rig.play(story())
    assert rig.stored == {"a": 24}
    assert len(rig.written) in {2, 3}
    assert 5.0 <= rig.times[0] <= 5.2


@waiting_ways
def test_what_was_gathered_is_acked_only_after_the_newest_is_committed(way: str):
    """Rule 4: a crash before that brings all of it back."""
    rig = FlowRig(way, debounce=Debounce("1s", max_wait="5s"))

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(*(page("a", version) for version in range(1, 6)))
        async with Running(rig):
            await gate.reached.wait()
            await rig.pass_s(5.0)
            assert len(rig.queue) == 5
            gate.opened.set()
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored, rig.outcomes) == ({"a": 5}, {"applied": 1, "superseded": 4})


@waiting_ways
def test_a_drain_gives_back_at_once_what_is_gathered(way: str):
    rig = FlowRig(way, debounce=Debounce("50s", max_wait="100s"))

    async def story() -> None:
        await rig.send(page("a", 1), page("a", 2))
        async with Running(rig):
            await rig.pass_s(5.0)
        assert len(await rig.source.receive(10, 0.0)) == 2
        assert rig.loop.time() < 10.0

    rig.play(story())


@waiting_ways
def test_keys_that_are_gathered_leave_half_of_the_room_to_others(way: str):
    """Rule 15: one burst that is larger than the room holds up nobody."""
    rig = FlowRig(way, debounce=Debounce("5s", max_wait="5s"), batch_max=10, prefetch=20, evict_delay_s=2.0)

    async def story() -> None:
        await rig.send(*(page("hot", version) for version in range(1, 41)))
        async with Running(rig):
            await rig.pass_s(0.5)
            await rig.send(page("other", 1))
            await rig.until(lambda: "other" in rig.stored, limit_s=6.0)
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"hot": 40, "other": 1}, [])


# Together.


@waiting_ways
@pytest.mark.parametrize("held_by", ["rate", "pause", "holder"])
def test_a_key_that_waits_costs_no_attempt_and_holds_up_nobody(way: str, held_by: str):
    """Rules 10 and 15: its deliveries use at most half of the prefetch, and others go on."""
    rig = FlowRig(
        way,
        rate=Rate(1, per="100s") if held_by == "rate" else None,
        attempts_max=1,
        batch_max=5,
        prefetch=10,
        evict_delay_s=30.0,
    )

    async def story() -> None:
        if held_by == "rate":
            await rig.work(page("hot", 0))
        elif held_by == "pause":
            await rig.ledger.pause(Pause("hot"))
        else:
            held = Entry(token=7, owner="other", lease_until=100.0, abandoned=True)
            rig.database.scope("test").entries["hot"] = held
        await rig.send(*(page("hot", version) for version in range(1, 31)))
        async with Running(rig):
            for number in range(40):
                await rig.send(page(f"k{number}", 1))
            await rig.until(lambda: len(rig.stored) >= 40, limit_s=15.0)
            assert not rig.stored.get("hot")
            await rig.ledger.resume("hot", False)
            await rig.until_empty()

    rig.play(story())
    assert (rig.stored["hot"], rig.letters, rig.of(events.Failed)) == (30, [], [])


@waiting_ways
def test_debounce_rate_retry_and_bulk_go_together_on_one_key(way: str):
    rig = FlowRig(
        way, rate=Rate(1, per="10s"), debounce=Debounce("1s", max_wait="3s"), bulk=True, attempts_max=3, backoff_s=1.0
    )
    failures = iter([TransientError("busy")])

    def fail_once(change: Change) -> None:
        if change.version == 7:
            for error in failures:
                raise error

    rig.sink.behaviour = fail_once

    async def story() -> None:
        async with Running(rig):
            await rig.send_bulk(page("a", 1), page("a", 3), page("a", 9))
            await rig.send(page("a", 2))
            await rig.until(lambda: rig.stored.get("a") == 9)
            for version in (4, 10, 7, 12):
                await rig.send(page("a", version))
                await rig.pass_s(0.3)
            await rig.send_bulk(page("a", 11))
            await rig.until(lambda: rig.stored.get("a") == 12)
            await rig.until_empty()

    rig.play(story())
    assert rig.written == [("a", 9), ("a", 12)]
    assert min(gaps(rig.times)) >= 10.0
    assert (sum(rig.outcomes.values()), rig.letters) == (9, [])


@waiting_ways
def test_a_retry_waits_for_the_rate_too_and_counts_its_tries_only(way: str):
    """A try that failed was a dispatch; only what takes no claim rolls everything back, and then nothing happened."""
    rig = FlowRig(way, rate=Rate(1, per="20s"), attempts_max=3, backoff_s=1.0)
    failures = iter([TransientError("busy")] * 4)

    def fail_some(change: Change) -> None:
        for error in failures:
            raise error

    rig.sink.behaviour = fail_some
    rig.run(page("a", 1))
    takes_claims = way.startswith(("leased", "claimed"))
    assert len(rig.letters) == 1 if takes_claims else rig.stored == {"a": 1}
    if takes_claims:
        assert gaps(rig.times) == [20.0, 20.0]
    assert [event.attempts for event in rig.of(events.Failed)] == [1, 2]
