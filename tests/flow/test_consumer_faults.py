"""When something cannot be reached, hangs, dies or is taken over: everything is held, nothing is lost or doubled."""

import pytest

from flow.rig import (
    CLAIMED_TRANSACTION,
    LEASED,
    LEASED_CONDITIONAL,
    LEDGER_TRANSACTION,
    QUEUE_TRANSACTION,
    Rig,
    Running,
)
from flow.test_consumer import every_way, page
from flow.test_consumer_shutdown import Gate, claiming_ways, waiting_ways
from flow.unreachable_adapters import Unreachable
from keywise.adapters.memory.source import MemorySource
from keywise.core import events
from keywise.core.change import Change, ChangeHeader, order_of
from keywise.core.entry import Certainty, LeaseTerms, Level, Phase
from keywise.core.errors import PermanentError, TransientError
from keywise.core.ledger import Failure

LOST_CALLS = [
    ("transaction", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION]),
    ("commit_of_transaction", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION]),
    ("after_transaction", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION]),
    ("claim", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
    ("after_claim", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
    ("commit", [LEASED, LEASED_CONDITIONAL]),
    ("after_commit", [LEASED, LEASED_CONDITIONAL]),
    ("fail", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
    ("after_fail", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
    ("dead_letter", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
    ("after_dead_letter", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]),
]


@pytest.mark.parametrize(("call", "way"), [(call, way) for call, ways in LOST_CALLS for way in ways])
def test_a_ledger_that_is_away_and_comes_back_loses_nothing(call: str, way: str):
    """Hold, extend, back off: each change ends once, whether the lost call arrived or not."""
    rig = Rig(way)
    times = 1 if call == "after_transaction" else 3
    away = Unreachable(rig.ledger, **{call: times})
    rig.more = {"ledger": away, "admin": away}

    def misbehave(change: Change) -> None:
        if change.key == "poison":
            raise PermanentError("no")
        if change.key == "b" and rig.loop.time() < 0.2:
            raise TransientError("busy")

    rig.sink.behaviour = misbehave
    rig.run(page("a", 1), page("b", 1), page("poison", 1))
    assert sum(away.failures.values()) == 0
    assert (rig.stored, {letter.key for letter in rig.letters}) == ({"a": 1, "b": 1}, {"poison"})
    assert rig.open_changes == 0
    told = rig.of(events.Unavailable)
    assert len(told) == times
    assert all("did not get through" in event.cause and event.retry_s > 0 for event in told)


@pytest.mark.parametrize("way", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION])
@pytest.mark.parametrize("call", ["commit_of_transaction", "after_transaction"])
def test_an_effect_comes_once_though_the_answer_to_its_transaction_was_lost(way: str, call: str):
    """Grade atomic: the mark tells whether it arrived."""
    rig = Rig(way)
    rig.more = {"ledger": Unreachable(rig.ledger, **{call: 2})}
    rig.run(page("a", 1), page("b", 1))
    assert sorted(rig.written) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("call", "way"),
    [
        ("after_dead_letter", CLAIMED_TRANSACTION),
        ("after_dead_letter", LEASED),
        ("after_dead_letter", LEASED_CONDITIONAL),
        ("after_transaction", QUEUE_TRANSACTION),
        ("after_transaction", LEDGER_TRANSACTION),
    ],
)
@pytest.mark.parametrize("times", [1, 3])
def test_a_poison_is_not_run_again_because_the_answer_to_its_dead_letter_was_lost(call: str, way: str, times: int):
    """Rule 13: its letter is stored, and the next newest change has its turn."""
    rig = Rig(way, attempts_max=1)
    away = Unreachable(rig.ledger, **{call: times})
    rig.more = {"ledger": away}

    def refuse(change: Change) -> None:
        if change.key == "poison" and change.version == 2:
            raise PermanentError("no")

    rig.sink.behaviour = refuse
    rig.run(page("poison", 2), page("a", 1))
    rig.run(page("poison", 1))
    assert rig.stored == {"a": 1, "poison": 1}
    assert [(letter.key, letter.version) for letter in rig.letters] == [("poison", 2)]
    runs = [at for at, key, version in rig.sink.tries if (key, version) == ("poison", 2)]
    assert len(runs) <= 3, "in a batch, in the careful one, and then alone"


def test_the_letter_of_another_message_does_not_stand_for_one_that_was_not_stored():
    rig = Rig(LEASED, attempts_max=1)
    rig.more = {"ledger": Unreachable(rig.ledger, dead_letter=2)}

    def refuse(change: Change) -> None:
        raise PermanentError("no")

    rig.sink.behaviour = refuse
    rig.run(page("a", 2), page("b", 2))
    rig.run(page("a", 2))
    assert sorted(letter.key for letter in rig.letters) == ["a", "a", "b"]


@pytest.mark.parametrize("way", [LEDGER_TRANSACTION, LEASED])
def test_a_malformed_message_leaves_one_letter_though_the_answer_was_lost(way: str):
    rig = Rig(way)
    rig.more = {"ledger": Unreachable(rig.ledger, after_dead_letter=2)}
    rig.run(b"broken", page("a", 1))
    assert [letter.body for letter in rig.letters] == [b"broken"]


@every_way
def test_a_source_that_is_away_and_comes_back_loses_nothing(way: str):
    rig = Rig(way)
    away = Unreachable(rig.source, receive=3, arrived=3, ack=1, extend=1)
    rig.more["sources"] = [("queue", away)]
    rig.run(page("a", 1), page("a", 2))
    assert rig.stored == {"a": 2}
    assert {event.what for event in rig.of(events.Unavailable)} <= {"queue", "database"}
    pauses = [event.retry_s for event in rig.of(events.Unavailable) if event.retry_s]
    assert len(pauses) == 3


@waiting_ways
def test_a_lost_ack_brings_a_duplicate_and_nothing_else(way: str):
    """Rule 5: ack comes after commit, so the message comes back and finds the mark."""
    rig = Rig(way)
    rig.more["sources"] = [("queue", Unreachable(rig.source, ack=1))]
    rig.run(page("a", 1))
    assert (rig.written, rig.outcomes) == ([("a", 1)], {"applied": 1, "duplicate": 1})


@pytest.mark.parametrize("way", [CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL])
def test_a_long_handler_keeps_its_claim_and_its_message(way: str):
    """Rule 7: the lease is 30 s, the visibility 60 s, and the work takes 200 s."""
    rig = Rig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1), page("a", 0))
        async with Running(rig):
            await rig.pass_s(200.0)
            assert await rig.source.receive(10, 0.0) == []
            gate.opened.set()
            await rig.until(lambda: not rig.queue)
        assert (rig.written, rig.outcomes) == ([("a", 1)], {"applied": 1, "superseded": 1})
        assert rig.of(events.TookOver) == []

    rig.play(story())


def test_a_hung_handler_is_ended_and_its_change_tried_again_after_the_lease():
    """Rule 7: up to runtime_max; rule 6: its outcome is unknown, so the lease runs out first."""
    rig = Rig(LEASED, runtime_max_s=60.0)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 2), page("a", 1))
        async with Running(rig):
            await gate.reached.wait()
            await rig.until(lambda: rig.of(events.Failed))
            assert 60.0 <= rig.loop.time() <= 60.0 + rig.settings.lease_s
            assert "the claim ended before the sink answered" in rig.of(events.Failed)[0].cause
            rig.sink.behaviour = None
            await rig.until(lambda: not rig.queue)
        assert rig.written == [("a", 2)]
        assert [event.key for event in rig.of(events.TookOver)] == ["a"]
        assert rig.entry("a").suspicions == 1

    rig.play(story())


def test_nothing_older_follows_a_write_of_unknown_outcome():
    """Rule 6: the older change waits, though the newer one is not committed."""
    rig = Rig(LEASED)
    failures = iter([OSError("connection reset")])

    def lose_the_answer(change: Change) -> None:
        for error in failures if change.version == 5 else ():
            rig.sink.write(change, token=0)
            raise error

    rig.sink.behaviour = lose_the_answer

    async def story() -> None:
        await rig.send(page("a", 5))
        async with Running(rig):
            await rig.until(lambda: rig.of(events.Failed))
            await rig.send(page("a", 4))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.written == [("a", 5), ("a", 5)]
    assert rig.outcomes == {"applied": 1, "superseded": 1}
    times = [at for at, _, _ in rig.sink.tries]
    assert times[1] - times[0] >= rig.settings.lease_s, "the lease had to run out"


def test_a_change_whose_last_outcome_is_unknown_becomes_a_dead_letter_after_the_lease():
    """Rule 13: it is buried by a claim of its own, and the key stays suspect."""
    rig = Rig(LEASED, attempts_max=2)

    def lose_the_answer(change: Change) -> None:
        raise OSError("connection reset")

    rig.sink.behaviour = lose_the_answer
    rig.run(page("a", 1))
    assert [letter.cause for letter in rig.letters] == ["the outcome of the last of 2 attempts is unknown"]
    assert len(rig.sink.tries) == 2
    assert rig.entry("a").suspicions > 0


@claiming_ways
def test_a_change_that_kills_its_workers_becomes_a_dead_letter(way: str):
    """Rule 18: after so many deaths alone; its neighbours go on meanwhile."""
    rig = Rig(way, crashes_max=2)

    async def die(owner: str) -> None:
        terms = LeaseTerms(owner, 30.0, Level.ALONE)
        [claim] = (await rig.ledger.claim([ChangeHeader("a", order_of(1))], terms)).granted
        await rig.ledger.renew([claim], 30.0, Phase.BEGUN)
        await rig.pass_s(31.0)

    async def story() -> None:
        for number in range(5):
            await die(f"x{number}")
        await rig.work(page("a", 1), page("b", 1))

    rig.play(story())
    assert [letter.cause for letter in rig.letters] == ["2 workers died alone with this change"]
    assert (rig.stored, rig.sink.calls) == ({"b": 1}, [1])
    assert [(event.key, event.crashes) for event in rig.of(events.TookOver)] == [("a", 2)]


@claiming_ways
def test_a_change_whose_holder_died_gets_a_call_of_its_own(way: str):
    """Rule 18: another death raises its level, and not that of its neighbours."""
    rig = Rig(way)

    async def story() -> None:
        await rig.ledger.claim([ChangeHeader("a", order_of(1))], LeaseTerms("dead", 30.0))
        await rig.pass_s(31.0)
        await rig.work(page("a", 1), *(page(f"k{number}", 1) for number in range(5)))

    rig.play(story())
    assert len(rig.stored) == 6
    assert 1 in rig.sink.calls
    opened = [event.changes for event in rig.of(events.BatchOpened)]
    assert opened == [5, 1]


def test_a_change_that_loses_its_answers_does_not_take_its_neighbours_along():
    """Rule 17: a call of unknown outcome fails all that it carried; each of them is then tried alone."""
    rig = Rig(LEASED, attempts_max=3)

    def lose_the_answer(change: Change) -> None:
        if change.key == "a":
            raise OSError("connection reset")

    rig.sink.behaviour = lose_the_answer
    rig.run(*(page(key, 1) for key in "abcde"))
    assert [letter.key for letter in rig.letters] == ["a"]
    assert sorted(rig.stored) == ["b", "c", "d", "e"]


def test_changes_that_failed_before_go_alone_and_fresh_ones_together():
    """Rule 17: none of them may take others along, nor each other."""
    rig = Rig(LEASED, concurrency=1)

    async def story() -> None:
        claims = (
            await rig.ledger.claim([ChangeHeader(key, order_of(1)) for key in "ad"], LeaseTerms("w0", 30.0))
        ).granted
        await rig.ledger.fail([Failure(claim, Certainty.CLEAN, 0.0) for claim in claims])
        await rig.work(*(page(key, 1) for key in "abcdef"))

    rig.play(story())
    assert len(rig.stored) == 6
    tried = [key for _, key, _ in rig.sink.tries]
    calls = iter(tried)
    together = [{next(calls) for _ in range(size)} for size in rig.sink.calls]
    assert {"a"} in together
    assert {"d"} in together
    assert len(together) < 6, "the others share a call"


def test_followers_of_a_change_that_has_to_wait_wait_with_it():
    """Rule 4: in one transaction too, an older change is not written just because the newest is not due."""
    rig = Rig(QUEUE_TRANSACTION)

    def fail_at_first(change: Change) -> None:
        if change.version == 2 and rig.loop.time() < 0.1:
            raise TransientError("busy")

    rig.sink.behaviour = fail_at_first
    rig.run(page("a", 1), page("a", 2))
    assert (rig.written, rig.outcomes) == ([("a", 2)], {"applied": 1, "superseded": 1})


def test_a_ledger_that_stays_away_is_asked_less_and_less_often():
    rig = Rig(LEASED, backoff_s=0.5, backoff_max_s=8.0, lease_s=60.0, margin_s=2.0)
    rig.more["ledger"] = Unreachable(rig.ledger, commit=6)
    rig.run(page("a", 1))
    pauses = [event.retry_s for event in rig.of(events.Unavailable)]
    assert all(whole / 2 <= pause <= whole for pause, whole in zip(pauses, (0.5, 1, 2, 4, 8, 8), strict=True))


@claiming_ways
def test_a_key_that_somebody_else_holds_is_asked_for_again_and_costs_no_attempt(way: str):
    """Rule 10: busy is no failure."""
    rig = Rig(way, attempts_max=1)

    async def story() -> None:
        results = await rig.ledger.claim([ChangeHeader("a", order_of(1))], LeaseTerms("other", 30.0))
        await rig.send(page("a", 2), page("b", 1))
        async with Running(rig):
            await rig.pass_s(20.0)
            assert rig.stored == {"b": 1}
            await rig.ledger.release(results.granted)
            await rig.until(lambda: not rig.queue, limit_s=2.0)

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"a": 2, "b": 1}, [])
    assert len(rig.of(events.Refused)) > 10
    assert {(event.key, event.reason) for event in rig.of(events.Refused)} == {("a", "busy")}


@waiting_ways
def test_a_blocked_key_takes_at_most_half_of_the_room(way: str):
    """Rule 15: the surplus comes back later, and other keys go on."""
    rig = Rig(way, prefetch=10, batch_max=10, evict_delay_s=5.0)

    async def story() -> None:
        results = await rig.ledger.claim([ChangeHeader("a", order_of(0))], LeaseTerms("other", 30.0))
        await rig.send(*(page("a", number) for number in range(1, 31)))
        await rig.send(page("b", 1), page("c", 1))
        async with Running(rig):
            await rig.until(lambda: len(rig.stored) == 2, limit_s=25.0)
            await rig.ledger.release(results.granted)
            await rig.until(lambda: not rig.queue, limit_s=30.0)  # Long before a visibility ends by itself.

    rig.play(story())
    assert rig.stored == {"a": 30, "b": 1, "c": 1}
    assert sum(rig.outcomes.values()) == 32


@every_way
def test_several_sources_of_one_pipeline_share_its_keys(way: str):
    rig = Rig(way)
    live, bulk = rig.source, MemorySource(rig.source.database, "bulk", visibility_s=60.0)
    rig.more["sources"] = [("live", live), ("bulk", bulk)]

    async def story() -> None:
        await bulk.send([b'{"id": "a", "v": 1}', b'{"id": "b", "v": 1}', b"broken"])
        await rig.send(page("a", 2))
        async with Running(rig):
            await rig.until(lambda: not rig.queue and not rig.source.database.queue("bulk"))

    rig.play(story())
    assert rig.stored == {"a": 2, "b": 1}
    assert [letter.source for letter in rig.letters] == ["bulk"]
    assert [event.source for event in rig.of(events.Started)] == ["live", "bulk"]


@every_way
def test_two_consumers_share_the_work_and_apply_each_change_once(way: str):
    rig = Rig(way, batch_max=4, prefetch=8)

    async def story() -> None:
        await rig.send(*(page(f"k{number % 20}", number) for number in range(60)))
        async with Running(rig, "w1"), Running(rig, "w2"):
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert sorted(rig.stored.values()) == list(range(40, 60))
    assert len(rig.written) == len(set(rig.written))
