"""A key is written again, or deleted, by an operator's word: in its turn, above the mark, and below the next change."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from flow.rig import CLAIMED_TRANSACTION, LEASED, QUEUE_TRANSACTION, WAYS, Rig, Running
from flow.test_consumer import page
from keywise.core.change import VERSION_MIN, ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.entry import Commit, LeaseTerms, LedgerPolicy
from keywise.core.errors import AdminError
from keywise.core.limits import Rate
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from operate.admin_rig import WHO, WHY, Desk


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


@pytest.mark.parametrize("way", [LEASED, QUEUE_TRANSACTION])
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
    with pytest.raises(AdminError, match=r"version 3, which is older than the mark at version 5.*--older"):
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
    desk.rig.reader = _unversioned()
    desk.rig.run({"id": "a"})
    assert desk.do("force", "a").order == (0, 1, -1)
    assert desk.do("force", "a").order == (0, 2, -1)
    assert desk.do("remove", "a").order == (0, 3, -1)
    desk.do("remove", "never seen")
    desk.rig.run({"id": "never seen"})
    assert list(desk.rig.stored) == ["never seen"], "the first change of a removed key is applied, and none is mixed"


def _unversioned() -> MessageReader:
    return MessageReader(FieldRoute(Fields("id", None, {})), body_max_bytes=10_000)


def test_versions_that_cannot_be_ordered_are_refused():
    desk = desk_with(truth={"id": "a", "v": 1})
    rig = desk.rig
    versioned, rig.reader = rig.reader, _unversioned()
    rig.run({"id": "a"})
    rig.reader = versioned
    with pytest.raises(AdminError, match="they have no common order"):
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
        results = await rig.ledger.claim([ChangeHeader("a", order_of(5))], LeaseTerms("w7", 30.0))
        forcing = asyncio.get_running_loop().create_task(desk.act("force", "a"))
        await rig.until(lambda: desk.told)
        assert rig.stored == {}
        await rig.ledger.commit([Commit(claim) for claim in results.granted])
        await forcing

    rig.play(story())
    assert desk.told[0] == "'a' is held by w7"
    assert (rig.stored, rig.entry("a").mark) == ({"a": 5}, (0, 5, 1)), "the plan was made anew after the wait"


def test_a_key_that_is_held_for_long_is_told_with_its_holder():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.play(desk.rig.ledger.claim([ChangeHeader("a", order_of(5))], LeaseTerms("w7", 100.0)))
    with pytest.raises(AdminError, match=r"^'a' is held by w7; waited 10 s; wait longer with --wait$"):
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
    desk.rig.ledger.working_set.policy = LedgerPolicy(intents=True, rate=Rate(1, per="10s"))
    desk.do("force", "a")
    before = desk.rig.loop.time()
    desk.do("force", "a")
    assert desk.rig.loop.time() >= before + 9.9
    assert desk.told == ["the rate of 'a' is used up"]
