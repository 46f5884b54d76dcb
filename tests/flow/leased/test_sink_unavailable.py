"""A sink that takes nothing now is asked at a calm pace, and nobody is blamed for it."""

from collections.abc import Sequence
from typing import Any

from flow.rig import Rig, Running, Store
from flow.test_consumer import page
from keywise.core.change import Change, Outcome
from keywise.core.entry import Claim
from keywise.core.events import Failed, Handled, Unavailable
from keywise.core.sink import Grade, SinkResult

AWAY_S = 120.0


class AwayStore(Store):
    """A store that cannot be reached for a while."""

    batch_max = 1
    back_at = AWAY_S

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        if self._clock() < self.back_at:
            self.calls.append(len(changes))
            return [SinkResult(Outcome.BUSY, "host:80: refused")] * len(changes)
        return await super().apply(changes, claims)


def test_a_sink_that_is_away_is_asked_calmly_and_costs_no_attempt():
    rig = Rig(concurrency=4, attempts_max=1)
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.run(*(page(f"k{number}", 1) for number in range(100)))
    assert len(rig.stored) == 100
    assert (rig.letters, rig.of(Failed)) == ([], [])
    told = rig.of(Unavailable)
    assert {(event.what, event.cause) for event in told} == {("sink", "host:80: refused")}
    asked = len(rig.sink.calls) - 100
    assert asked == len(told)
    assert asked < 4 * AWAY_S, "each of four workers less than once a second"


def test_a_single_change_is_not_handed_from_one_waiting_worker_to_the_next():
    rig = Rig(concurrency=16)
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.run(page("a", 1))
    assert len(rig.sink.calls) < AWAY_S, "less than once a second"


def test_a_worker_that_waits_for_its_sink_can_be_stopped():
    rig = Rig()
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at = float("inf")

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.until(lambda: len(rig.of(Unavailable)) >= 3)

    rig.play(story())
    assert len(rig.queue) == 1, "the message is still there"
    assert rig.entry("a") is None, "and the ledger remembers nothing against it"


def test_nothing_is_held_while_a_sink_that_is_away_is_left_alone():
    """Somebody else may want the key, and whoever stops the worker does not want to wait."""
    rig = Rig(concurrency=2, backoff_s=60.0, drain_s=100.0)
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)

    async def story() -> None:
        await rig.send(page("a", 1), page("b", 1), page("c", 1))
        async with Running(rig) as running:
            await rig.until(lambda: len(rig.of(Unavailable)) == 2)
            await rig.pass_s(1.0)
            assert [rig.entry(key) for key in "abc"] == [None] * 3, "all were given back, also what waited its turn"
            told_at = rig.loop.time()
            running.consumer.stop()
            await running.task
            assert rig.loop.time() - told_at < 1.0, "it waited for the sink"

    rig.play(story())
    assert min(event.retry_s for event in rig.of(Unavailable)) > 10.0
    assert len(rig.queue) == 3 and [rig.entry(key) for key in "abc"] == [None] * 3


def test_nothing_more_is_claimed_while_every_worker_leaves_the_sink_alone():
    rig = Rig(concurrency=2, backoff_s=60.0)
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at = 10.0

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.until(lambda: len(rig.of(Unavailable)) == 1)
            await rig.send(page("b", 1))
            await rig.until(lambda: len(rig.of(Unavailable)) == 2)
            await rig.send(page("c", 1))
            await rig.pass_s(1.0)
            assert [rig.entry(key) for key in "abc"] == [None] * 3
            await rig.until(lambda: len(rig.stored) == 3)

    rig.play(story())


def test_the_time_that_a_sink_is_left_alone_is_not_the_time_of_its_call():
    rig = Rig(concurrency=1, backoff_s=60.0)
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at = 10.0
    rig.run(page("a", 1))
    assert [event.seconds for event in rig.of(Handled)] == [0.0, 0.0]
