"""What an operator's write meets: failures, unknown outcomes, lost claims and deaths, and what becomes of the key."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from flow.rig import LEASED, LEASED_CONDITIONAL, WAYS, Rig, Running
from flow.test_consumer import page
from flow.unreachable_adapters import Unreachable
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Certainty, LeaseTerms, Level, Phase
from keywise.core.errors import AdminError, PermanentError, SettingsError, TransientError, UnavailableError
from keywise.core.ledger import Failure
from operate.admin_rig import Desk
from operate.test_force import desk_with

ATOMIC = [way for way in WAYS if not way.startswith(LEASED)]


@pytest.mark.parametrize("way", ATOMIC)
def test_a_failed_write_in_a_transaction_leaves_no_trace(way):
    desk = desk_with(way, truth={"id": "a", "v": 6})
    desk.rig.run(page("a", 5))

    def refuse(change: Any) -> None:
        raise ValueError("no such column")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(AdminError, match=r"ValueError: no such column.*; nothing was written"):
        desk.do("force", "a")
    assert (desk.rig.stored, desk.rig.entry("a").mark, desk.rig.entry("a").token) == ({"a": 5}, order_of(5), 0)
    assert desk.noted == []


def test_a_clean_failure_gives_the_key_back():
    desk = desk_with(truth={"id": "a", "v": 6})

    def refuse(change: Any) -> None:
        raise TransientError("try later")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(AdminError, match=r"try later.*; nothing was written"):
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
    with pytest.raises(
        AdminError,
        match=r"reset by peer.*; it may or may not have been written.*lease of 30 s.*suspect.*keywise repair",
    ):
        desk.do("force", "a")
    assert desk.rig.entry("a").abandoned
    assert desk.noted == []
    desk.rig.sink.behaviour = None
    with pytest.raises(AdminError, match="the outcome of a write of 'a' by operator is unknown"):
        desk.do("remove", "a", wait_s=5.0)
    desk.do("remove", "a", wait_s=60.0)
    assert (desk.rig.entry("a").mark, desk.rig.entry("a").suspicions) == ((0, 5, 2), 1)


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
    with pytest.raises(AdminError, match="it may or may not have been written"):
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
        [claim] = (await rig.ledger.claim([ChangeHeader("a", order_of(7))], LeaseTerms("w7", 30.0))).granted
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
    with pytest.raises(AdminError, match="the claim ended before the sink answered"):
        desk.do("force", "a")
    assert desk.rig.loop.time() < 120.0


def test_what_a_conditional_sink_holds_is_not_overwritten():
    desk = desk_with(LEASED_CONDITIONAL, truth={"id": "a", "v": 5})
    desk.rig.run(page("a", 5))
    desk.rig.sink.stored["a"] = desk.rig.sink.stored["a"].__class__(order_of(9), False, b"{}", 0.0)
    with pytest.raises(AdminError, match="the sink holds something newer; nothing was written"):
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
        rig.database.set(
            scope.entries, key, entry.__class__(entry.mark, entry.deleted, 1.0, suspicions=1, suspected_at=1.0)
        )
        rig.sink.stored.pop(key)

    async def story() -> None:
        async with Running(rig):
            await rig.until(lambda: not any(entry.suspicions for entry in scope.entries.values()), 60.0)

    rig.play(story())
    assert (rig.stored, rig.entry("forced").mark, rig.entry("removed").mark) == ({"forced": 5}, (0, 5, 1), (0, 5, 1))


def test_a_permanent_error_of_a_handler_is_told():
    desk = desk_with(truth={"id": "a", "v": 5})

    def refuse(change: Any) -> None:
        raise PermanentError("no such address")

    desk.rig.sink.behaviour = refuse
    with pytest.raises(AdminError, match=r"no such address.*; nothing was written"):
        desk.do("force", "a")


def test_a_key_that_is_reset_meanwhile_is_planned_anew():
    desk = desk_with()
    rig, resets = desk.rig, []
    rig.run(page("a", 5))

    async def refetch(key: str) -> Any:
        if not resets:
            resets.append(await desk.act("reset", "a"))
        return page("a", 5)

    rig.refetch = refetch
    assert desk.do("force", "a").order == (1, 5, 0)
    assert (rig.entry("a").mark, rig.entry("a").token, [w.order for w in rig.sink.writes][-1]) == (
        (1, 5, 0),
        0,
        (1, 5, 0),
    )


def test_what_was_written_in_part_is_removed_too():
    desk = desk_with(truth={"id": "a", "v": 7})

    def break_off(change: Any) -> None:
        raise ValueError("broke off")

    desk.rig.sink.behaviour = break_off
    with pytest.raises(AdminError, match=r"broke off.*; it may have been written in part"):
        desk.do("force", "a")
    desk.rig.sink.behaviour = None
    assert desk.do("remove", "a").order == (0, 7, 1)


def test_a_removal_that_waits_for_a_holder_covers_what_it_may_have_written():
    """Rule 6: nothing below a write of unknown outcome follows it."""
    desk = desk_with()
    rig = desk.rig
    rig.run(page("a", 5))

    async def story() -> None:
        [claim] = (await rig.ledger.claim([ChangeHeader("a", order_of(7))], LeaseTerms("w7", 30.0))).granted
        removing = asyncio.get_running_loop().create_task(desk.act("remove", "a", wait_s=60.0))
        await rig.until(lambda: desk.told)
        await rig.ledger.fail([Failure(claim, Certainty.UNKNOWN, 0.0)])
        assert (await removing).order == (0, 7, 1)

    rig.play(story())
    assert rig.loop.time() < 40.0


def test_each_key_has_the_whole_patience():
    desk = desk_with()
    rig = desk.rig
    rig.refetch = lambda key: page(key, 5)

    async def story() -> None:
        async with desk.admin(wait_s=10.0) as admin:
            for key in ("a", "b"):
                await rig.ledger.claim([ChangeHeader(key, order_of(4))], LeaseTerms("operator", 8.0))
                await admin.force(key)

    rig.play(story())
    assert rig.stored == {"a": 5, "b": 5}


def test_a_write_that_kills_one_process_after_another_is_given_up():
    desk = desk_with(truth={"id": "a", "v": 5})
    rig = desk.rig

    async def die(owner: str) -> None:
        [claim] = (
            await rig.ledger.claim([ChangeHeader("a", order_of(5))], LeaseTerms(owner, 30.0, level=Level.ALONE))
        ).granted
        await rig.ledger.renew([claim], 30.0, Phase.BEGUN)
        await rig.pass_s(31.0)

    for owner in ("o1", "o2", "o3", "o4", "o5", "o6"):
        rig.play(die(owner))
    with pytest.raises(AdminError, match="3 processes died while they wrote 'a'; nothing was written"):
        desk.do("force", "a")
    assert (rig.written, rig.entry("a").token) == ([], 0)


def test_a_key_whose_holder_died_is_taken_over_alone():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.play(desk.rig.ledger.claim([ChangeHeader("a", order_of(5))], LeaseTerms("w7", 5.0)))
    desk.do("force", "a", wait_s=10.0)
    assert desk.rig.stored == {"a": 5}


def test_nothing_is_written_unless_the_ledger_knows_that_it_begins():
    desk = desk_with(truth={"id": "a", "v": 5})

    class Forgetful(type(desk.rig.ledger)):
        """A ledger that has lost the claim by the time it is renewed."""

        async def renew(self, claims: Any, lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Any]:
            return list(claims)

    desk.rig.more["ledger"] = Forgetful(desk.rig.database, "test", desk.rig.policy)
    with pytest.raises(AdminError, match="lost before the write began; nothing was written"):
        desk.do("force", "a")
    assert desk.rig.written == []


def test_a_write_may_take_longer_than_a_lease():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.sink.behaviour = lambda change: desk.rig.pass_s(70.0)
    desk.do("force", "a")
    assert (desk.rig.stored, desk.rig.loop.time() > 69.0) == ({"a": 5}, True)


@pytest.mark.parametrize("way", ATOMIC)
def test_a_claim_that_is_lost_inside_the_transaction_takes_the_write_back(way):
    desk = desk_with(way, truth={"id": "a", "v": 5})
    entries = desk.rig.database.scope("test").entries

    def lose(change: Any) -> None:
        desk.rig.database.set(entries, "a", replace(entries["a"], token=99))

    desk.rig.sink.behaviour = lose
    with pytest.raises(AdminError, match="another worker has taken the key; nothing was written"):
        desk.do("force", "a")
    assert (desk.rig.stored, desk.noted) == ({}, [])


def test_truth_that_cannot_be_had_is_told():
    desk = desk_with(truth={"id": "a"})
    with pytest.raises(AdminError, match=r"what refetch\('a'\) returned cannot be read: .*nothing was written"):
        desk.do("force", "a")

    def refetch(key: str) -> Any:
        raise LookupError("no such database")

    desk.rig.refetch = refetch
    with pytest.raises(
        AdminError, match=r"refetch\('a'\) failed: LookupError: no such database.*; nothing was written"
    ):
        desk.do("force", "a")
    assert desk.rig.written == []


def test_an_act_whose_line_cannot_be_written_is_told_as_done():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.more["history_store"] = Unreachable(desk.rig.ledger, record=1)
    with pytest.raises(AdminError, match="forced: this is done, but the history could not be written"):
        desk.do("force", "a")
    assert (desk.rig.stored, desk.noted) == ({"a": 5}, [])


def test_a_commit_that_does_not_get_through_is_repeated():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.more["ledger"] = Unreachable(desk.rig.ledger, commit=2, after_commit=1)
    desk.do("force", "a")
    assert (desk.rig.entry("a").mark, desk.rig.entry("a").suspicions, desk.noted) == (
        order_of(5),
        0,
        [("forced", "a", 5)],
    )


def test_a_transaction_that_does_not_get_through_is_told_and_can_be_repeated():
    desk = desk_with(ATOMIC[0], truth={"id": "a", "v": 5})
    desk.rig.more["ledger"] = Unreachable(desk.rig.ledger, commit_of_transaction=1)
    with pytest.raises(UnavailableError):
        desk.do("force", "a")
    assert (desk.rig.stored, desk.rig.entry("a")) == ({}, None)
    desk.do("force", "a")
    assert desk.rig.stored == {"a": 5}
