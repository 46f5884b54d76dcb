"""The rarer turns of a consumer: stolen claims, a heartbeat in a thread, queues without a visibility, failing peeks."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Self

import pytest
from msgspec.structs import replace

from flow.rig import CLAIMED_TRANSACTION, LEASED, LEDGER_TRANSACTION, QUEUE_TRANSACTION, Rig, Running
from flow.test_consumer import page
from flow.test_consumer_shutdown import Gate, claiming_ways
from flow.unreachable_adapters import Unreachable
from keywise.core import events
from keywise.core.change import Change, order_of
from keywise.core.entry import Claim, Entry, Phase
from keywise.core.errors import PermanentError, UnavailableError
from keywise.core.transaction import Transaction

THIEF = 12345


def steal(rig: Rig, key: str) -> None:
    """Give a key to somebody else, as a takeover does."""
    entries = rig.database.scope("test").entries
    entries[key] = replace(entries[key], token=THIEF, owner="thief", lease_until=rig.loop.time() + 5.0, abandoned=True)


@claiming_ways
def test_a_commit_under_a_stolen_claim_is_refused_and_its_neighbours_are_not(way: str):
    """Rules 9 and 17: the batch goes on without that key, which is asked for again."""
    rig = Rig(way)
    stolen = iter(["a"])

    def be_late(change: Change) -> None:
        for key in stolen if change.key == "a" else ():
            steal(rig, key)

    rig.sink.behaviour = be_late
    rig.run(page("a", 1), page("b", 1), page("c", 1))
    assert (rig.stored, rig.letters) == ({"a": 1, "b": 1, "c": 1}, [])
    assert [event.key for event in rig.of(events.ClaimLost)] == ["a"]
    assert rig.entry("a").suspicions == (2 if way == LEASED else 0), "a refused commit, then a takeover"
    if way == CLAIMED_TRANSACTION:
        assert sorted(rig.written) == [("a", 1), ("b", 1), ("c", 1)], "each effect once"


@claiming_ways
def test_a_burial_under_a_stolen_claim_is_left_to_the_new_holder(way: str):
    """Rule 13: one letter, by whoever holds the key."""
    rig = Rig(way)
    stolen = iter(["a"])

    def be_late(change: Change) -> None:
        for key in stolen:
            steal(rig, key)
        raise PermanentError("no")

    rig.sink.behaviour = be_late
    rig.run(page("a", 1))
    assert [letter.key for letter in rig.letters] == ["a"]
    assert [event.key for event in rig.of(events.ClaimLost)] == ["a"]


@pytest.mark.parametrize(("way", "times"), [(QUEUE_TRANSACTION, 2), (LEDGER_TRANSACTION, 2), (CLAIMED_TRANSACTION, 1)])
def test_a_database_that_goes_away_during_a_write_costs_no_attempt(way: str, times: int):
    """The whole transaction is tried again: nothing is known to be wrong with any change.

    A change that is claimed is tried alone then. The second time, others have been written, so it would be to blame.
    """
    rig = Rig(way, attempts_max=1)
    failures = iter([UnavailableError("disk is busy")] * times)

    def go_away(change: Change) -> None:
        for error in failures if change.key == "b" else ():
            raise error

    rig.sink.behaviour = go_away
    rig.run(page("a", 1), page("b", 1))
    assert (sorted(rig.written), rig.letters) == ([("a", 1), ("b", 1)], [])
    assert len(rig.of(events.Unavailable)) == times


@pytest.mark.parametrize("way", [LEDGER_TRANSACTION, QUEUE_TRANSACTION])
def test_a_database_that_goes_away_while_a_bad_change_is_looked_for_costs_no_attempt(way: str):
    rig = Rig(way, attempts_max=2)
    errors = iter([ValueError("bad"), UnavailableError("disk is busy")])

    def go_away(change: Change) -> None:
        for error in errors if change.key == "b" else ():
            raise error

    rig.sink.behaviour = go_away
    rig.run(page("a", 1), page("b", 1))
    assert (sorted(rig.written), rig.letters) == ([("a", 1), ("b", 1)], [])
    assert [event.cause for event in rig.of(events.Unavailable)] == ["disk is busy"]


def test_a_batch_that_cannot_be_read_ahead_is_read_in_its_turn():
    rig = Rig(QUEUE_TRANSACTION, batch_max=3, prefetch=3)
    away = Unreachable(rig.source, peek=2)
    rig.more["sources"] = [("queue", away)]
    rig.run(*(page(f"k{number}", 1) for number in range(15)))
    assert (len(rig.stored), away.failures["peek"]) == (15, 0)
    assert away.calls["peek"] > 2


def test_a_batch_that_was_read_ahead_may_be_gone_by_then():
    """Somebody else took it: what counts is what the transaction receives."""
    rig = Rig(QUEUE_TRANSACTION, batch_max=2, prefetch=2)

    async def story() -> None:
        await rig.send(*(page(f"k{number}", 1) for number in range(12)))
        async with Running(rig, "w1"), Running(rig, "w2"):
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert len(rig.written) == 12
    assert rig.outcomes == {"applied": 12}


def test_a_queue_without_a_visibility_needs_no_extending():
    rig = Rig(LEASED)
    source = Unreachable(rig.source)
    source.visibility_s = None
    rig.more["sources"] = [("queue", source)]
    rig.run(page("a", 1))
    assert (rig.stored, source.calls["extend"]) == ({"a": 1}, 0)


def test_waiting_messages_are_extended_before_they_come_back():
    rig = Rig(LEASED)
    source = Unreachable(rig.source)
    rig.more["sources"] = [("queue", source)]

    async def story() -> None:
        mine = Claim("a", order_of(1), False, token=THIEF)
        await rig.send(page("a", 1))
        rig.database.scope("test").entries["a"] = Entry(token=THIEF, lease_until=500.0)
        async with Running(rig):
            await rig.pass_s(200.0)
            assert await rig.source.receive(10, 0.0) == [], "it waits in its lane"
            await rig.ledger.release([mine])
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert 200.0 / 60.0 <= source.calls["extend"] <= 200.0 / 20.0, "at a third of the visibility, not more often"


class Pulsing:
    """A second connection for the heartbeat; notes the thread it is opened in."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.closed = threading.Event()
        self.thread = ""

    async def __aenter__(self) -> Self:
        self.thread = threading.current_thread().name
        self.opened.set()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed.set()

    async def renew(self, claims: list[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        return []


@pytest.mark.parametrize("ends", ["stopped", "cancelled"])
def test_a_heartbeat_with_a_connection_of_its_own_lives_as_long_as_the_consumer(ends: str):
    """Rule 7: in a thread, so that a busy event loop does not look dead."""
    rig, beating = Rig(LEASED), Pulsing()
    rig.more["connect_heartbeat"] = lambda: beating

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await rig.until(lambda: not rig.queue)
            assert beating.opened.wait(20)
            assert not beating.closed.is_set()
            if ends == "cancelled":
                running.task.cancel()

    with pytest.raises(asyncio.CancelledError) if ends == "cancelled" else nullcontext():
        rig.play(story())
    assert (beating.thread, beating.closed.is_set()) == ("keywise-heartbeat", True)
    assert rig.stored == {"a": 1}


def test_work_does_not_begin_under_a_claim_that_ended_while_it_waited_its_turn():
    """Rule 7: before dispatch too, by the holder's own deadline."""
    rig = Rig(LEASED, concurrency=1)
    rig.sink.batch_max = 1
    away = Unreachable(rig.ledger, renew=10)
    rig.more["ledger"] = away
    first = iter(["slow"])
    claimed: list[tuple[str, float]] = []

    async def be_slow(change: Change) -> None:
        claimed.append((change.key, rig.entry(change.key).lease_until - rig.loop.time()))
        for _ in first:
            await rig.pass_s(1000.0)

    rig.sink.behaviour = be_slow
    rig.run(page("a", 1), page("b", 1))
    assert rig.stored == {"a": 1, "b": 1}
    assert all(left_s > rig.settings.margin_s for _, left_s in claimed)
    assert [key for key, _ in claimed].count("b") == 1
    assert rig.entry("b").suspicions == 0, "nothing was written under the claim that ended"


def test_a_stolen_claim_without_neighbours_ends_its_transaction():
    rig = Rig(CLAIMED_TRANSACTION)
    stolen = iter(["a"])

    def be_late(change: Change) -> None:
        for key in stolen:
            steal(rig, key)

    rig.sink.behaviour = be_late
    rig.run(page("a", 1))
    assert (rig.written, len(rig.of(events.ClaimLost))) == ([("a", 1)], 1)


def test_a_renewal_after_the_commit_of_a_transaction_reports_no_lost_claim():
    """The claim is gone because it was committed. No other worker has it."""
    rig = Rig(CLAIMED_TRANSACTION)
    transaction = rig.ledger.transaction

    @asynccontextmanager
    async def slow_to_answer() -> AsyncIterator[Transaction]:
        async with transaction() as opened:
            yield opened
        await rig.pass_s(rig.settings.lease_s * 2 / 3)

    rig.ledger.transaction = slow_to_answer
    rig.run(page("a", 1), page("b", 1))
    assert (rig.stored, rig.of(events.ClaimLost)) == ({"a": 1, "b": 1}, [])


def test_a_handler_that_hangs_in_its_transaction_is_ended_with_its_claim():
    """Rule 7: what it wrote is rolled back, and it is tried again later."""
    rig = Rig(CLAIMED_TRANSACTION)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig):
            await gate.reached.wait()
            await rig.until(lambda: rig.of(events.Failed), rig.settings.runtime_max_s + rig.settings.lease_s)
            rig.sink.behaviour = None
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert [event.cause for event in rig.of(events.Failed)] == ["the claim ended before the handler did"]
    assert rig.written == [("a", 1)]
