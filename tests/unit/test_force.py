"""A key is written again, or deleted, by an operator's word: in its turn, above the mark, and below the next change."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from keywise.change import VERSION_MIN, Want, order_of
from keywise.envelope import Envelope, FieldRoute, Fields
from keywise.errors import ActError, PermanentError, SettingsError, TransientError
from keywise.limits import Rate
from keywise.rules import Policy, Terms
from keywise.standing import Pause
from unit.desk import WHO, WHY, Desk
from unit.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, ONE_TRANSACTION, WAYS, Rig, Running
from unit.test_consumer import page

ATOMIC = [way for way in WAYS if not way.startswith(LEASED)]


def desk_with(way: str = LEASED, *, truth: Any = None, **settings: Any) -> Desk:
    rig = Rig(way, **settings)
    rig.refetch = lambda key: truth
    return Desk(rig)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_forced_is_written_again_above_the_mark_and_the_next_version_wins(way):
    desk = desk_with(way, truth={"id": "a", "v": 5, "text": "true"})
    desk.rig.run(page("a", 5))
    change = desk.do("force", "a")
    assert (change.order, desk.rig.entry("a").mark, desk.rig.entry("a").token) == ((0, 5, 1), (0, 5, 1), 0)
    assert b"true" in desk.rig.sink.stored["a"].body
    assert desk.noted[-1] == ("forced", "a", 5)
    assert (desk.lines[-1].by, desk.lines[-1].detail) == (WHO, WHY)
    desk.rig.run(page("a", 5), page("a", 6))
    assert (desk.rig.stored, desk.rig.entry("a").mark) == ({"a": 6}, (0, 6, 0))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_removed_is_gone_until_the_next_version(way):
    desk = desk_with(way)
    desk.rig.run(page("a", 5), page("b", 1))
    assert desk.do("remove", "a").order == (0, 5, 1)
    assert (desk.rig.stored, desk.rig.entry("a").deleted) == ({"b": 1}, True)
    assert desk.noted[-1] == ("removed", "a", 5)
    desk.rig.run(page("a", 5))
    assert desk.rig.stored == {"b": 1}, "an old message does not bring it back"
    desk.rig.run(page("a", 6))
    assert desk.rig.stored == {"a": 6, "b": 1}


@pytest.mark.parametrize("way", [LEASED, ONE_TRANSACTION])
def test_a_key_that_nobody_knows_is_removed_below_all_that_may_come(way):
    desk = desk_with(way)
    assert desk.do("remove", "a").order == (0, VERSION_MIN, 0)
    assert desk.noted == [("removed", "a", None)]
    desk.rig.run(page("a", -7))
    assert desk.rig.stored == {"a": -7}


def test_a_key_that_the_truth_has_not_is_deleted():
    desk = desk_with(truth=None)
    desk.rig.run(page("a", 5))
    change = desk.do("force", "a")
    assert (change.order, change.deleted, desk.rig.stored) == ((0, 5, 1), True, {})
    assert desk.lines[-1].detail == f"a deletion; {WHY}"


def test_truth_that_is_newer_is_written_at_its_own_order():
    desk = desk_with(truth={"id": "a", "v": 8})
    desk.rig.run(page("a", 5))
    assert desk.do("force", "a").order == order_of(8)
    desk.rig.run(page("a", 8))
    assert desk.rig.outcomes["duplicate"] == 1


def test_truth_that_is_older_is_written_only_on_demand_and_the_mark_never_falls():
    desk = desk_with(truth={"id": "a", "v": 3, "text": "old"})
    desk.rig.run(page("a", 5))
    with pytest.raises(ActError, match=r"version 3, which is older than the mark at version 5.*--older"):
        desk.do("force", "a")
    assert (desk.rig.written, desk.noted) == ([("a", 5)], [])
    assert desk.do("force", "a", older=True).order == (0, 5, 1)
    assert b"old" in desk.rig.sink.stored["a"].body


def test_in_a_new_era_the_lowest_order_is_enough_and_the_first_change_wins():
    desk = desk_with(truth={"id": "a", "v": 1})
    desk.rig.run(page("a", 5), page("b", 5))
    desk.do("reset", "a")
    desk.do("reset", "b")
    assert desk.do("force", "a").order == (1, 1, 0)
    assert desk.do("remove", "b").order == (1, VERSION_MIN, 0)
    desk.rig.run(page("a", 2), page("b", 1))
    assert desk.rig.stored == {"a": 2, "b": 1}


def test_changes_without_a_version_can_be_forced_and_removed_too():
    desk = desk_with(truth={"id": "a"})
    desk.rig.envelope = _unversioned()
    desk.rig.run({"id": "a"})
    assert desk.do("force", "a").order == (0, 1, -1)
    assert desk.do("force", "a").order == (0, 2, -1)
    assert desk.do("remove", "a").order == (0, 3, -1)
    desk.do("remove", "never seen")
    desk.rig.run({"id": "never seen"})
    assert list(desk.rig.stored) == ["never seen"], "the first change of a removed key is applied, and none is mixed"


def _unversioned() -> Envelope:
    return Envelope(FieldRoute(Fields("id", None, {})), body_max_bytes=10_000)


def test_versions_that_cannot_be_ordered_are_refused():
    desk = desk_with(truth={"id": "a", "v": 1})
    rig = desk.rig
    versioned, rig.envelope = rig.envelope, _unversioned()
    rig.run({"id": "a"})
    rig.envelope = versioned
    with pytest.raises(ActError, match="nobody can order them"):
        desk.do("force", "a")


def test_a_paused_key_can_be_forced():
    for way in (LEASED, CLAIMED_TRANSACTION):
        desk = desk_with(way, truth={"id": "a", "v": 5})
        desk.rig.play(desk.rig.ledger.pause(Pause("*", is_pattern=True)))
        desk.do("force", "a")
        assert desk.rig.stored == {"a": 5}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_that_is_held_is_waited_for(way):
    desk = desk_with(way, truth={"id": "a", "v": 5})
    rig = desk.rig

    async def story() -> None:
        answers = await rig.ledger.claim([Want("a", order_of(5))], Terms("w7", 30.0))
        forcing = asyncio.get_running_loop().create_task(desk.act("force", "a"))
        await rig.until(lambda: desk.told)
        assert rig.stored == {}
        await rig.ledger.commit(answers.granted)
        await forcing

    rig.play(story())
    assert desk.told[0] == "'a' is held by w7"
    assert (rig.stored, rig.entry("a").mark) == ({"a": 5}, (0, 5, 1)), "the plan was made anew after the wait"


def test_a_key_that_is_held_for_long_is_told_with_its_holder():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.play(desk.rig.ledger.claim([Want("a", order_of(5))], Terms("w7", 100.0)))
    with pytest.raises(ActError, match=r"^'a' is held by w7; waited 10 s; wait longer with --wait$"):
        desk.do("force", "a", wait_s=10.0)
    assert 10.0 <= desk.rig.loop.time() < 12.0


def test_no_handler_runs_beside_an_act_on_the_same_key():
    desk = desk_with(truth={"id": "a", "v": 8})
    rig = desk.rig
    rig.sink.behaviour = lambda change: rig.pass_s(5.0)

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("a", 5))
            await rig.until(lambda: rig.sink.tries)
            forcing = asyncio.get_running_loop().create_task(desk.act("force", "a"))
            await rig.until(lambda: len(rig.sink.tries) == 2)
            await rig.send(page("a", 9))
            await forcing
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.written == [("a", 5), ("a", 8), ("a", 9)]
    begun = [at for at, _, _ in rig.sink.tries]
    assert all(after >= before + 5.0 for before, after in pairwise(begun))


def test_the_rate_of_a_key_holds_for_operators_too():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.ledger._policy = Policy(intents=True, rate=Rate(1, per="10s"))
    desk.do("force", "a")
    before = desk.rig.loop.time()
    desk.do("force", "a")
    assert desk.rig.loop.time() >= before + 9.9
    assert desk.told == ["the rate of 'a' is used up"]


@pytest.mark.parametrize("way", ATOMIC)
def test_a_failed_write_in_a_transaction_leaves_no_trace(way):
    desk = desk_with(way, truth={"id": "a", "v": 6})
    desk.rig.run(page("a", 5))

    def refuse(change: Any) -> None:
        raise ValueError("no such column")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(ActError, match="ValueError: no such column; nothing was written"):
        desk.do("force", "a")
    assert (desk.rig.stored, desk.rig.entry("a").mark, desk.rig.entry("a").token) == ({"a": 5}, order_of(5), 0)
    assert desk.noted == []


def test_a_clean_failure_gives_the_key_back():
    desk = desk_with(truth={"id": "a", "v": 6})

    def refuse(change: Any) -> None:
        raise TransientError("try later")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(ActError, match="try later; nothing was written"):
        desk.do("force", "a")
    desk.rig.sink.behaviour = None
    desk.rig.run(page("a", 5))
    assert desk.rig.stored == {"a": 5}, "what is older need not wait for a write that never was"


def test_a_write_of_unknown_outcome_keeps_the_key_until_the_lease_ends_and_leaves_a_suspect():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.run(page("a", 5))

    def lose(change: Any) -> None:
        raise ConnectionError("reset by peer")

    desk.rig.sink.behaviour = lose
    with pytest.raises(ActError, match=r"reset by peer; nobody knows.*lease of 30 s.*suspect.*keywise repair"):
        desk.do("force", "a")
    assert desk.rig.entry("a").abandoned
    assert desk.noted == []
    desk.rig.sink.behaviour = None
    with pytest.raises(ActError, match="operator does not know whether its write to 'a' landed"):
        desk.do("remove", "a", wait_s=5.0)
    desk.do("remove", "a", wait_s=60.0)
    assert (desk.rig.entry("a").mark, desk.rig.entry("a").suspect) == ((0, 5, 2), 1)


@pytest.mark.parametrize("mark", [None, 5])
def test_what_may_be_in_the_sink_is_removed_too(mark: int | None):
    """A write of unknown outcome that nobody will repeat must not keep an operator waiting for its message."""
    desk = desk_with(truth={"id": "a", "v": 7})
    if mark is not None:
        desk.rig.run(page("a", mark))

    def lose(change: Any) -> None:
        desk.rig.sink.write(change, token=99)
        raise ConnectionError("no answer")

    desk.rig.sink.behaviour = lose
    with pytest.raises(ActError, match="nobody knows"):
        desk.do("force", "a")
    desk.rig.sink.behaviour = None
    before = desk.rig.loop.time()
    assert desk.do("remove", "a", wait_s=60.0).order == (0, 7, 1)
    assert (desk.rig.stored, desk.rig.loop.time() < before + 31.0) == ({}, True)
    desk.rig.run(page("a", 8))
    assert desk.rig.stored == {"a": 8}


def test_a_change_that_is_being_tried_is_no_reason_to_remove_it():
    """Its handler may fail cleanly, and its next try is the next real change."""
    desk = desk_with()
    rig = desk.rig
    rig.run(page("a", 5))

    async def story() -> None:
        [claim] = (await rig.ledger.claim([Want("a", order_of(7))], Terms("w7", 30.0))).granted
        removing = asyncio.get_running_loop().create_task(desk.act("remove", "a"))
        await rig.until(lambda: desk.told)
        await rig.ledger.release([claim])
        assert (await removing).order == (0, 5, 1)

    rig.play(story())
    rig.run(page("a", 7))
    assert rig.stored == {"a": 7}


def test_a_handler_that_hangs_ends_with_its_claim():
    desk = desk_with(truth={"id": "a", "v": 5}, runtime_max_s=60.0)

    async def hang(change: Any) -> None:
        await desk.rig.pass_s(10_000.0)

    desk.rig.sink.behaviour = hang
    with pytest.raises(ActError, match="the claim ended before the sink answered"):
        desk.do("force", "a")
    assert desk.rig.loop.time() < 120.0


def test_what_a_conditional_sink_holds_is_not_overwritten():
    desk = desk_with(LEASED_CONDITIONAL, truth={"id": "a", "v": 5})
    desk.rig.run(page("a", 5))
    desk.rig.sink.stored["a"] = desk.rig.sink.stored["a"].__class__(order_of(9), False, b"{}", 0.0)
    with pytest.raises(ActError, match="the sink holds something newer; nothing was written"):
        desk.do("force", "a")
    assert (desk.rig.entry("a").mark, desk.rig.entry("a").token) == (order_of(5), 0)


def test_without_a_source_of_truth_nothing_is_forced():
    desk = Desk(Rig())
    with pytest.raises(SettingsError, match=r"decorate it with \.refetch"):
        desk.do("force", "a")


def test_truth_of_another_key_is_refused():
    desk = desk_with(truth={"id": "b", "v": 5})
    with pytest.raises(Exception, match="return the body of the key asked for"):
        desk.do("force", "a")
    assert desk.rig.written == []


def test_a_repair_of_a_forced_key_writes_the_truth_and_of_a_removed_one_its_deletion():
    """The truth has no generation; it must not look older than what an operator forced."""
    desk = desk_with(truth=None, horizon_s=1.0, repair_s=1.0)
    rig = desk.rig
    rig.refetch = lambda key: {"id": key, "v": 5}
    rig.run(page("forced", 5), page("removed", 5))
    desk.do("force", "forced")
    desk.do("remove", "removed")
    scope = rig.database.scope("test")
    for key in ("forced", "removed"):
        entry = scope.entries[key]
        rig.database.set(scope.entries, key, entry.__class__(entry.mark, entry.deleted, 1.0, suspect=1, suspect_at=1.0))
        rig.sink.stored.pop(key)

    async def story() -> None:
        async with Running(rig):
            await rig.until(lambda: not any(entry.suspect for entry in scope.entries.values()), 60.0)

    rig.play(story())
    assert (rig.stored, rig.entry("forced").mark, rig.entry("removed").mark) == ({"forced": 5}, (0, 5, 1), (0, 5, 1))


def test_a_permanent_error_of_a_handler_is_told():
    desk = desk_with(truth={"id": "a", "v": 5})

    def refuse(change: Any) -> None:
        raise PermanentError("no such address")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(ActError, match="no such address; nothing was written"):
        desk.do("force", "a")
