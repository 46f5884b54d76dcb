"""A handler that says "later": the change goes back to its queue, comes back not before its time, and costs no try."""

import itertools
from collections.abc import Callable

import pytest

from flow.limits_rig import FlowRig
from flow.rig import CLAIMED_TRANSACTION, LEASED, LEDGER_TRANSACTION, QUEUE_TRANSACTION, Running, Table
from flow.test_consumer import page
from keywise.adapters.function.sink import FunctionSink
from keywise.core import events
from keywise.core.change import Change
from keywise.core.errors import TransientError
from keywise.core.limits import Snooze
from keywise.core.transaction import Transaction

atomic_ways = pytest.mark.parametrize("way", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION])
both_words = pytest.mark.parametrize("word", ["return", "raise"])


class Calls:
    """What a handler was called with, and when."""

    def __init__(self, rig: FlowRig) -> None:
        self.rig = rig
        self.made: list[tuple[float, str, int | None]] = []

    def note(self, change: Change) -> None:
        self.made.append((self.rig.loop.time(), change.key, change.version))

    @property
    def gaps(self) -> list[float]:
        return [after[0] - before[0] for before, after in itertools.pairwise(self.made)]


def say(word: str, snooze: Snooze) -> Snooze:
    if word == "raise":
        raise snooze
    return snooze


def handled(rig: FlowRig, handler: Callable) -> None:
    rig.sink = FunctionSink(handler, threads=1)


@both_words
def test_a_snoozed_change_comes_back_not_before_its_time_and_costs_no_attempt(word: str):
    rig = FlowRig(LEASED, attempts_max=1)
    calls = Calls(rig)

    async def handle(change: Change) -> Snooze | None:
        calls.note(change)
        return say(word, Snooze("100s")) if len(calls.made) < 4 else None

    handled(rig, handle)
    rig.run(page("a", 1))
    assert len(calls.made) == 4
    assert all(100.0 <= gap <= 101.0 for gap in calls.gaps)
    assert (rig.outcomes, rig.letters, rig.of(events.Failed)) == ({"applied": 1}, [], [])
    assert [(e.key, e.version, e.wait_s) for e in rig.of(events.Snoozed)] == [("a", 1, 100.0)] * 3


def test_a_snoozed_change_is_nowhere_but_in_its_queue():
    """Nothing is held for it here: no lane, no claim, no receipt that has to be extended; a restart changes nothing."""
    rig = FlowRig(LEASED)
    calls = Calls(rig)

    async def handle(change: Change) -> Snooze | None:
        calls.note(change)
        return Snooze("1000s") if len(calls.made) == 1 else None

    handled(rig, handle)

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.until(lambda: rig.of(events.Snoozed))
            await rig.pass_s(100.0)
            last = rig.of(events.Waiting)[-1]
            assert (last.live, last.held, rig.entry("a")) == (0, 0, None)
            [message] = rig.queue.values()
            assert message.visible_at == pytest.approx(1000.0, abs=1.0)
        async with Running(rig, "w2"):
            await rig.until_empty()

    rig.play(story())
    assert calls.gaps[0] >= 1000.0


def test_other_changes_of_a_snoozed_key_go_on():
    """What was said concerns one change; the newest still wins in the end."""
    rig = FlowRig(LEASED)
    calls = Calls(rig)

    async def handle(change: Change) -> Snooze | None:
        calls.note(change)
        return Snooze("50s") if change.version == 5 and rig.loop.time() < 40.0 else None

    handled(rig, handle)

    async def story() -> None:
        await rig.send(page("a", 3), page("a", 5))
        async with Running(rig):
            await rig.until(lambda: len(calls.made) == 2, limit_s=2.0)
            await rig.until_empty()

    rig.play(story())
    assert [version for _, _, version in calls.made] == [5, 3, 5]
    assert rig.entry("a").mark[1] == 5


def test_a_snooze_neither_costs_a_try_nor_forgets_those_that_failed():
    rig = FlowRig(LEASED, attempts_max=3, backoff_s=1.0)
    calls = Calls(rig)

    async def handle(change: Change) -> Snooze:
        calls.note(change)
        if len(calls.made) % 2:
            return Snooze("10s")
        raise TransientError("busy")

    handled(rig, handle)
    rig.run(page("a", 1))
    assert [event.attempts for event in rig.of(events.Failed)] == [1, 2]
    assert (len(calls.made), len(rig.letters)) == (6, 1)


@both_words
def test_a_batch_that_is_snoozed_comes_back_as_a_whole(word: str):
    rig = FlowRig(LEASED, attempts_max=1)
    batches: list[int] = []

    async def handle(changes: list[Change]) -> Snooze | None:
        batches.append(len(changes))
        return say(word, Snooze("100s")) if len(batches) == 1 else None

    handled(rig, handle)
    rig.run(*(page(f"k{number}", 1) for number in range(8)))
    assert (batches, rig.outcomes) == ([8, 8], {"applied": 8})
    assert len(rig.of(events.Snoozed)) == 8


class WritesFirst(Table):
    """A table that has written when the test is asked, as a handler with a transaction may."""

    async def write(self, transaction: Transaction, changes: list[Change]) -> None:
        wanted, self.behaviour = self.behaviour, None
        try:
            await super().write(transaction, changes)
        finally:
            self.behaviour = wanted
        for change in changes:
            if wanted is not None:
                wanted(change)


@atomic_ways
def test_whatever_a_snoozed_change_wrote_in_the_transaction_is_rolled_back(way: str):
    rig = FlowRig(way, attempts_max=1)
    rig.sink = WritesFirst(rig.database, runs_user_code=way == CLAIMED_TRANSACTION)
    rig.sink.batch_max = 1

    def snooze(change: Change) -> None:
        if change.key == "b" and rig.loop.time() < 100.0:
            raise Snooze("100s")

    rig.sink.behaviour = snooze

    async def story() -> None:
        await rig.send(page("a", 1), page("b", 1), page("c", 1))
        async with Running(rig):
            await rig.until(lambda: len(rig.stored) == 2)
            await rig.pass_s(90.0)
            assert rig.stored == {"a": 1, "c": 1}
            await rig.until_empty()

    rig.play(story())
    assert sorted(rig.written) == [("a", 1), ("b", 1), ("c", 1)]
    assert (rig.letters, rig.of(events.Failed), rig.outcomes) == ([], [], {"applied": 3})
    assert max(rig.times) >= 100.0


def test_a_batch_that_is_snoozed_in_its_transaction_is_asked_once():
    """It is no error: nobody looks for the change that is to blame."""
    rig = FlowRig(CLAIMED_TRANSACTION)
    rig.sink.batch_max = 100

    def snooze(change: Change) -> None:
        if rig.loop.time() < 100.0:
            raise Snooze("100s")

    rig.sink.behaviour = snooze
    rig.run(*(page(f"k{number}", 1) for number in range(8)))
    assert (rig.sink.calls, len(rig.stored)) == ([8, 8], 8)
