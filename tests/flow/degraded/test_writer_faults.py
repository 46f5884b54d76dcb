"""What else goes wrong while the ledger is down: handlers, the disk, and the worker itself."""

import asyncio
from typing import Any

import pytest

from flow.degraded.outage_rig import Outage, body
from flow.rig import Running
from keywise.core import events
from keywise.core.change import ChangeHeader, Outcome, order_of
from keywise.core.entry import Commit, LeaseTerms
from keywise.core.errors import PermanentError, TransientError
from keywise.core.sink import APPLIED, SinkResult
from keywise.flow.degraded.worker import PROBE_MAX_S

FLYING = b'{"since": 5.0, "begun": [["b", [0, 1, 0], false]]}\n'


@pytest.mark.parametrize("error", [PermanentError("bad"), TransientError("later"), ValueError("half"), OSError("gone")])
def test_what_fails_comes_again_until_the_ledger_can_count_it(error):
    outage = Outage(attempts_max=2)
    rig = outage.rig

    def fail(change: Any) -> None:
        if change.key == "a":
            raise error

    async def story() -> None:
        rig.sink.behaviour = fail
        async with Running(rig):
            await outage.goes_down()
            await rig.send(body("a", 1), body("b", 1))
            await rig.until(lambda: len(rig.sink.tries) > 6)
            assert (len(rig.queue), rig.letters, rig.stored) == (1, [], {"b": 1})
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert [letter.key for letter in rig.letters] == ["a"]


def test_a_malformed_message_comes_again_until_there_can_be_a_dead_letter():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            await rig.send(b"{", body("a", 1))
            await rig.until(lambda: rig.stored == {"a": 1})
            await rig.pass_s(60.0)
            assert (len(rig.queue), rig.letters) == (1, [])
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert len(rig.letters) == 1


def test_what_a_refusal_wants_to_bury_waits_for_the_ledger():
    outage = Outage("write-anyway", "dead_letter")
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            unversioned = await rig.ledger.claim([ChangeHeader("a", order_of(None))], LeaseTerms("w0", 30.0))
            await rig.ledger.commit([Commit(claim) for claim in unversioned.granted])
            outage.ledger.is_away = True
            await rig.send(body("a", 1))
            await rig.until(lambda: rig.of(events.LedgerDown))
            await rig.pass_s(60.0)
            assert rig.letters == []
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())


def test_a_change_that_was_claimed_before_ends_without_the_ledger():
    outage = Outage(concurrency=1)
    rig = outage.rig
    gate = asyncio.Event()
    results = {
        "good": APPLIED,
        "bad": SinkResult(Outcome.FAILED, "bad", permanent=True),
        "busy": SinkResult(Outcome.BUSY),
    }
    results["snoozed"] = SinkResult(Outcome.BUSY, wait_s=5.0)
    apply = rig.sink.apply

    async def wait_for_gate(changes: Any, claims: Any) -> Any:
        if not gate.is_set():
            await gate.wait()
            return [results[change.key] for change in changes]
        return await apply(changes, claims)

    async def story() -> None:
        rig.sink.apply, rig.sink.batch_max = wait_for_gate, 4
        async with Running(rig):
            await rig.send(*(body(key, 1) for key in results))
            await rig.until(lambda: all(rig.entry(key) for key in results))
            await rig.send(body("good", 2))
            await rig.pass_s(1.0)
            outage.ledger.is_away = True
            await rig.pass_s(8.0)
            gate.set()
            await rig.until(lambda: not rig.queue)
            assert rig.of(events.LedgerBack) == []

    rig.play(story())
    assert rig.stored == {"good": 2, "bad": 1, "busy": 1, "snoozed": 1}


def test_what_was_claimed_and_has_not_begun_is_written_without_its_claim():
    outage = Outage(concurrency=1)
    rig = outage.rig

    async def hold(change: Any) -> None:
        if len(rig.sink.tries) == 1:
            outage.ledger.is_away = True
            await rig.pass_s(12.0)

    async def story() -> None:
        rig.sink.behaviour, rig.sink.batch_max = hold, 1
        async with Running(rig):
            await rig.send(body("a", 1), body("b", 1))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert sorted(rig.written) == [("a", 1), ("b", 1)]


def test_a_call_without_a_claim_lasts_no_longer_than_a_lease():
    outage = Outage()
    rig = outage.rig

    async def hang(change: Any) -> None:
        if len(rig.sink.tries) == 1:
            await rig.pass_s(1000.0)

    async def story() -> None:
        rig.sink.behaviour = hang
        async with Running(rig):
            await outage.goes_down()
            await rig.send(body("a", 1))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.sink.tries[1][0] - rig.sink.tries[0][0] >= rig.settings.lease_s
    assert rig.of(events.Failed)[0].cause == "the claim ended before the sink answered"


def test_nothing_is_written_while_nothing_can_be_noted():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(1.0)
            outage.paper.is_full = True
            await outage.goes_down()
            await rig.send(body("a", 1))
            await rig.pass_s(100.0)
            assert rig.written == []
            outage.paper.is_full = False
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert {event.what for event in rig.of(events.Unavailable)} >= {"journal"}


def test_a_claimed_change_ends_once_it_can_be_noted():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        rig.sink.behaviour = leave
        async with Running(rig):
            await rig.pass_s(1.0)
            await rig.send(body("a", 1))
            await rig.until(lambda: rig.of(events.LedgerDown))
            await rig.pass_s(20.0)
            assert len(rig.queue) == 1
            outage.paper.is_full = False
            await rig.until(lambda: not rig.queue)

    async def leave(change: Any) -> None:
        outage.ledger.is_away = outage.paper.is_full = True

    rig.play(story())
    assert rig.written == [("a", 1)]


def test_a_key_that_a_worker_may_have_died_of_waits_for_the_ledger():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            outage.paper.leave(FLYING)
            await rig.send(body("a", 1), body("b", 1))
            await rig.pass_s(60.0)
            assert rig.stored == {"a": 1}
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.stored == {"a": 1, "b": 1}
    assert sorted(event.keys for event in rig.of(events.MarkedSuspect)) == [1, 1]


def test_a_journal_that_cannot_be_had_is_told_now_and_then_and_stops_nothing():
    outage = Outage(maintenance_s=20.0)
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            outage.paper.troubles = ["it is torn"]
            for version in range(1, 6):
                await rig.send(body("a", version))
                await rig.until(lambda: not rig.queue)
            assert rig.stored == {"a": 5}
            outage.comes_back()
            await rig.until(lambda: outage.suspicions("a") == 1)

    rig.play(story())
    told = [event.cause for event in rig.of(events.Unavailable) if event.what == "journal"]
    assert told == ["it is torn"]


def test_what_dead_workers_noted_is_handed_over_at_start_and_later():
    outage = Outage(maintenance_s=20.0)
    rig = outage.rig
    outage.paper.leave(FLYING)

    async def story() -> None:
        async with Running(rig):
            await rig.until(lambda: outage.suspicions("b") == 1)
            outage.paper.leave(FLYING.replace(b'"b"', b'"c"'))
            await rig.until(lambda: outage.suspicions("c") == 1)
            outage.paper.is_full = True
            await rig.until(lambda: rig.of(events.Unavailable), 50.0)
            outage.paper.is_full = False

    rig.play(story())
    assert outage.paper.sheets == []


def test_a_note_that_cannot_be_removed_is_handed_over_once_and_holds_up_nothing():
    outage = Outage(maintenance_s=20.0)
    rig = outage.rig
    outage.paper.leave(FLYING)
    outage.paper.is_stuck = True

    async def story() -> None:
        async with Running(rig):
            await rig.send(body("a", 1))
            await rig.until(lambda: not rig.queue)
            await rig.pass_s(60.0)
            assert (rig.entry("a").mark, len(outage.paper.sheets)) == (order_of(1), 1)
            outage.paper.is_stuck = False
            await rig.until(lambda: not outage.paper.sheets, 50.0)

    rig.play(story())
    assert [event.keys for event in rig.of(events.MarkedSuspect)] == [1]
    assert rig.of(events.LedgerDown) == []
    assert {(event.what, event.cause) for event in rig.of(events.Unavailable)} == {("journal", "it cannot be removed")}


def test_notes_stay_until_the_ledger_has_taken_them():
    outage = Outage("write-anyway", "mark_suspect")
    rig = outage.rig
    outage.paper.leave(FLYING)
    outage.ledger.is_away = True

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(3.0)
            assert len(outage.paper.sheets) == 1
            await rig.until(lambda: rig.of(events.LedgerDown))
            await rig.pass_s(30.0)
            outage.comes_back()
            await rig.until(lambda: not outage.paper.sheets)

    rig.play(story())
    assert outage.suspicions("b") == 1


def test_a_worker_that_stops_in_an_outage_leaves_its_notes_to_the_next_one():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig, "w1"):
            await outage.goes_down()
            await rig.send(body("a", 1))
            await rig.until(lambda: not rig.queue)
        [sheet] = outage.paper.sheets
        assert not sheet.is_held
        outage.comes_back()
        async with Running(rig, "w2"):
            await rig.until(lambda: not outage.paper.sheets)

    rig.play(story())
    assert outage.suspicions("a") == 1


def test_what_was_noted_and_not_begun_before_the_stop_is_clean():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig) as running:
            await outage.goes_down()
            outage.paper.slow_s = 1.0
            await rig.send(body("a", 1))
            await rig.pass_s(2.5)
            running.consumer.stop()

    rig.play(story())
    assert (rig.written, len(rig.queue)) == ([], 1)
    assert all(not sheet.contents().keys for sheet in outage.paper.sheets)


def test_a_probe_is_a_write_however_short_after_that_of_another_worker():
    """A ledger that can be read and not written, as with a full disk, is not back."""
    outage = Outage()
    rig, locks = outage.rig, outage.rig.database.scope("test").periodic_locks

    async def story() -> float:
        async with Running(rig):
            await rig.send(body("a", 1))
            await outage.goes_down()
            locks["probe"] = others = rig.loop.time()
            outage.comes_back()
            await rig.until(lambda: rig.of(events.LedgerBack))
        return others

    others = rig.play(story())
    assert others < locks["probe"] < others + PROBE_MAX_S
