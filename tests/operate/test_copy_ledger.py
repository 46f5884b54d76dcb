"""A ledger that moves: what is carried, what is refused, and what the target may hold."""

import math

import pytest
from msgspec.structs import replace

from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Move, Pause, ReindexRun, RunState
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Commit, Entry, LedgerPolicy
from keywise.core.errors import AdminError
from keywise.core.history import HistoryRecord
from keywise.core.limits import Rate
from keywise.core.transfer import TransferPage
from keywise.operate.copy_ledger import Checksum, Checksums, Plan, TargetState
from keywise.testing.conformance.dumps import joined, pages_of
from operate.copy_rig import EVERY_KEY, TERMS, Road
from running import run


def test_everything_is_there_after_a_copy_and_the_pipeline_stays_paused():
    road = Road()

    async def main() -> None:
        await road.fill()
        controls = Controls(2, (EVERY_KEY, Pause("a")), resync_at=7.0, run=ReindexRun(3, started_at=5.0))
        await road.source.transfer.set_controls(controls)
        before = joined(await pages_of(road.source.transfer, 100))
        checksums = await road.copy()
        mine, theirs = await road.content()
        assert theirs.entries == mine.entries == before.entries and len(mine.entries) > 10
        assert theirs.dead_letters == mine.dead_letters and len(mine.dead_letters) == 3
        assert theirs.records[:-1] == mine.records[:-1] == before.records
        assert (checksums.keys.count, checksums.letters.count) == (len(mine.entries), 3)
        assert await road.target.controls() == controls
        assert (await road.target.claim([ChangeHeader("new", order_of(1))], TERMS)).granted == []

    run(main())
    assert {what for what, _ in road.reported} == {"copying", "checking the copy", "checking the original"}


def test_both_histories_say_who_copied_and_why():
    road = Road()

    async def main() -> tuple[HistoryRecord, HistoryRecord]:
        await road.fill()
        await road.copy()
        return (await road.source.history(None, 1))[0], (await road.target.history(None, 1))[0]

    mine, theirs = run(main())
    assert (mine.what, mine.by, theirs.what, theirs.by) == ("copied", "ada@desk", "copied", "ada@desk")
    assert mine.detail == "to new://: 17 keys, 3 dead letters; ticket 7"
    assert theirs.detail == "from old://: 17 keys, 3 dead letters; ticket 7"


def test_tokens_of_the_target_are_above_all_of_the_source():
    road = Road()

    async def main() -> None:
        for number in range(50):
            await road.source.release(
                (await road.source.claim([ChangeHeader(f"k{number}", order_of(1))], TERMS)).granted
            )
        [old] = (await road.source.claim([ChangeHeader("a", order_of(1))], TERMS)).granted
        await road.source.commit([Commit(old)])
        await road.source.control_store.pause(EVERY_KEY)
        await road.copy()
        await road.target.control_store.resume(EVERYTHING, True)
        [new] = (await road.target.claim([ChangeHeader("a", order_of(2))], TERMS)).granted
        assert new.token > old.token

    run(main())


@pytest.mark.parametrize("ahead_s", [3600.5, -3600.5])
def test_moments_are_carried_to_the_clock_of_the_target(ahead_s):
    road = Road()

    async def main() -> None:
        await road.fill()
        soon = Entry(tried=order_of(1), attempts=1, not_before=road.clock() + 9.0)
        await road.source.transfer.add(TransferPage(entries=[("soon", soon)]))
        run_here = ReindexRun(2, started_at=7.0)
        assert await road.source.replace_controls(paused := await road.source.controls(), replace(paused, run=run_here))
        road.there.advance(ahead_s)
        plan = await road.move.plan()
        assert plan.shift_s == math.ceil(ahead_s)
        await road.copy()
        mine, theirs = await road.content()
        assert len(mine.entries) == len(theirs.entries) == 18
        for (key, here), (_, there) in zip(mine.entries, theirs.entries, strict=True):
            for name in ("updated_at", "lease_until", "tried_at", "unknown_until", "not_before", "suspected_at"):
                at = getattr(here, name)
                assert getattr(there, name) == (at + plan.shift_s if at else 0.0), (key, name)
        assert [at for at, _ in theirs.dead_letters] == [at + plan.shift_s for at, _ in mine.dead_letters]
        assert [one.at for one in theirs.records[:-1]] == [one.at + plan.shift_s for one in mine.records[:-1]]
        controls = await road.target.controls()
        assert controls.pauses == (replace(EVERY_KEY, at=5.0 + plan.shift_s),)
        assert controls.run == replace(run_here, started_at=7.0 + plan.shift_s)
        left_s = (await road.target.inspect("soon")).not_before - road.there()
        assert 9.0 <= left_s < 10.0, "never sooner, and at most a second later"

    run(main())


def test_a_resync_that_is_due_stays_due_on_the_other_clock():
    road = Road(ahead_s=99.5)

    async def main() -> None:
        await road.source.mark_suspect([], True)
        since = (await road.source.controls()).resync_at
        await road.source.control_store.pause(EVERY_KEY)
        await road.copy()
        assert (await road.target.controls()).resync_at == since + 100.0

    run(main())


def test_clocks_that_nearly_agree_count_as_one():
    road = Road(ahead_s=1.9)

    async def main() -> None:
        await road.source.control_store.pause(EVERY_KEY)
        assert (await road.move.plan()).shift_s == 0.0

    run(main())


def test_only_charges_that_still_limit_a_key_are_carried():
    road = Road(policy=LedgerPolicy(rate=Rate(1, per=100.0)))

    async def main() -> None:
        for key in ("old", "new"):
            claims = (await road.source.claim([ChangeHeader(key, order_of(1))], TERMS)).granted
            await road.source.release(claims)
            if key == "old":
                road.clock.advance(150.0)
                road.there.advance(150.0)
        await road.source.control_store.pause(EVERY_KEY)
        assert (await road.copy()).keys.count == 1
        assert await road.target.inspect("old") is None
        assert (await road.target.inspect("new")).rate_at > road.clock()

    run(main())


def test_texts_that_not_every_store_takes_are_carried_as_it_would_take_them():
    road = Road()
    letter = DeadLetter("a\0cause", b"\0", "k", 1, {}, 1.0, "so\0urce")

    async def main() -> None:
        await road.source.control_store.pause(EVERY_KEY)
        await road.source.transfer.add(
            TransferPage(
                dead_letters=[(1.0, letter)], records=[HistoryRecord(1.0, "stale", "k", 1, "de\0tail", "b\0y")]
            )
        )
        await road.copy()
        _, theirs = await road.content()
        carried = replace(letter, cause="a\ufffdcause", source="so\ufffdurce", headers=None)
        assert theirs.dead_letters == [(1.0, carried)]
        assert theirs.records[0] == HistoryRecord(1.0, "stale", "k", 1, "de\ufffdtail", "b\ufffdy")

    run(main())


def test_a_pipeline_that_is_not_paused_is_refused():
    road = Road()
    assert road.refusal() == (
        "pipeline 'pages' is not paused in old://, so a worker could change it meanwhile; "
        "first keywise pause --all --wait --pipeline pages"
    )
    run(road.source.control_store.pause(Pause("a*", True)))
    assert "is not paused in old://" in road.refusal(), "some keys are not all"


def test_a_pipeline_whose_sink_moves_or_is_built_beside_is_refused():
    road = Road()
    run_beside = ReindexRun(7, RunState.SCANNING, into="pages-7")
    moving = Controls(pauses=(EVERY_KEY,), move=Move("pages-6", "pages-7", 99), run=run_beside)
    run(road.source.transfer.set_controls(moving))
    assert road.refusal() == "pipeline 'pages' moves to target 'pages-7' now, which takes some seconds; try again"
    run(road.source.transfer.set_controls(replace(moving, move=None)))
    assert road.refusal() == (
        "reindex 7 of pipeline 'pages' fills 'pages-7' beside the live target, and its marks are in a scope of their "
        "own in old://; wait for the swap (keywise reindex status pages), or end it with keywise reindex cancel pages"
    )
    ended = replace(moving, move=None, run=replace(run_beside, state=RunState.CANCELLED))
    run(road.source.transfer.set_controls(ended))
    assert run(road.move.plan()).found is TargetState.NOTHING


def test_a_claim_that_is_held_is_refused():
    road = Road()

    async def main() -> None:
        await road.source.claim([ChangeHeader("it's", order_of(1))], TERMS)
        await road.source.control_store.pause(EVERY_KEY)

    run(main())
    assert "\"it's\" of pipeline 'pages' is still held by w1 in old://" in road.refusal()
    road.clock.advance(61.0)
    assert run(road.move.plan()).found is TargetState.NOTHING, "a lease that ran out is carried as it is"


@pytest.mark.parametrize("ahead_s", [0.0, 100.0])
def test_the_same_content_is_not_copied_again(ahead_s):
    road = Road()

    async def main() -> Plan:
        await road.fill()
        road.there.advance(ahead_s)
        await road.copy()
        road.there.advance(1.5)
        return await road.move.plan()

    assert run(main()).found is TargetState.SAME, "also if the clocks have drifted since"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (TransferPage(entries=[("more", Entry(order_of(1)))]), "18 keys instead of 17"),
        (TransferPage(entries=[("a", Entry(order_of(99)))]), "17 keys, and some of them are different"),
        (TransferPage(dead_letters=[(1.0, DeadLetter("cause", b""))]), "4 dead letters instead of 3"),
        (TransferPage(records=[HistoryRecord(1.0, "stale")]), "6 lines of history instead of 5"),
    ],
)
def test_what_the_target_holds_besides_is_reported_and_replaced_only_while_it_is_unused(change, difference):
    road = Road()

    async def main() -> None:
        await road.fill()
        await road.copy()
        await road.target.transfer.add(change)
        plan = await road.move.plan()
        assert (plan.found, plan.difference) == (TargetState.OTHER, difference)
        await road.move.check_replaceable()
        await road.target.control_store.resume(EVERYTHING, True)
        with pytest.raises(AdminError, match="is not paused in new://, so it may be in use"):
            await road.move.check_replaceable()
        [claim] = (await road.target.claim([ChangeHeader("held", order_of(1))], TERMS)).granted
        await road.target.control_store.pause(EVERY_KEY)
        with pytest.raises(AdminError, match="'held' of pipeline 'pages' is still held by w1 in new://"):
            await road.move.check_replaceable()
        await road.target.release([claim])
        await road.copy()
        assert (await road.move.plan()).found is TargetState.SAME

    run(main())


def test_a_target_with_nothing_but_a_pause_holds_something():
    road = Road()

    async def main() -> Plan:
        await road.fill()
        await road.target.control_store.pause(Pause("a"))
        return await road.move.plan()

    assert run(main()).difference == "0 keys instead of 17"


def test_a_checksum_does_not_depend_on_the_order():
    one, other, third = Checksum(), Checksum(), Checksum()
    for thing in ("a", "b", "b"):
        one.add(thing, 1)
    for thing in ("b", "a", "b"):
        other.add(thing, 1)
    for thing in ("b", "a", "a"):
        third.add(thing, 1)
    assert one == other != third
    assert len(str(one)) == 32


def test_the_order_of_lines_counts_and_that_of_letters_does_not():
    """Each dead letter carries the time at which it was stored, so its place in a page does not matter."""
    letters, lines = (
        [(1.0, DeadLetter("one", b"")), (2.0, DeadLetter("two", b""))],
        [HistoryRecord(1.0, "one"), HistoryRecord(1.0, "two")],
    )
    one, other = Checksums(), Checksums()
    one.add(TransferPage(dead_letters=letters, records=lines))
    other.add(TransferPage(dead_letters=letters[::-1], records=lines[::-1]))
    assert one.letters == other.letters
    assert one.difference(other) == "2 lines of history, and some of them are different"
