"""How far a run has come: by stage and by shard, with the time that is left, and why it waits."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.cli.run_text import run_facts, waiting_texts
from keywise.core import events
from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import KeywiseError, ThrottledError, UnavailableError
from keywise.core.origin import Page, Shard
from keywise.observe.log import format_held_sweep
from keywise.reindex import report as reports
from keywise.reindex.admin import require_origin
from keywise.reindex.report import RunReport, ShardReport
from reindex.reindex_rig import Away, Catalogue, Works, report_of, row
from running import run

KEYS = [f"k{number:02d}" for number in range(40)]


def works_of(folder: Path) -> tuple[Catalogue, Works]:
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    return origin, Works(folder, origin)


def test_the_facts_of_a_sweep_say_which_were_deletions_and_times_are_whole_seconds():
    going = ReindexRun(2, RunState.SWEEPING)
    swept, shard = {"found": 1, "gone": 3, "applied": 3}, ShardReport("shard 1", 5, quiet_s=0.00549)
    facts = dict(run_facts("shop", RunReport(going, 1, 0, {}, 10, 60.0, swept=swept, working=(shard,))))
    assert facts["sweep"] == "applied 3, found 1, gone 3; the deletions of gone keys count as applied"
    assert facts["reading"] == "shard 1, 5 rows, no worker reads it now, moved 0 s ago"
    scanning = RunReport(ReindexRun(2, RunState.SCANNING), 0, 1, {"read": 100}, 101, 71.8)
    assert dict(run_facts("shop", scanning))["time"] == "1 min 12 s, about 1 s left"


def test_a_held_sweep_says_how_much_the_run_may_do_by_itself():
    held = events.SweepHeld(pipeline="shop", generation=2, keys=3, delete_max=0)
    assert "does not have 3 keys of the ledger, and the run may delete 0 by itself; to delete" in format_held_sweep(
        held
    )


def test_a_report_in_the_middle_has_shards_rows_and_the_time_that_is_left(tmp_path: Path):
    origin, works = works_of(tmp_path)
    goes_on, held = asyncio.Event(), set[str]()

    async def before_scan(shard: Shard, after: str) -> None:
        if len(origin.scans) >= 2:
            held.add(shard.name)
            await goes_on.wait()

    async def story() -> None:
        await works.start(shard_rows=10)
        async with works.working() as working:
            origin.before_scan = before_scan
            await working.until(lambda: len(held) == 2)

            async def are_committed() -> bool:
                return (await report_of(working.pipeline)).shards_read == 2

            await working.until(are_committed)
            half = await report_of(working.pipeline)
            assert half.run.state is RunState.SCANNING
            assert (half.run.shards, half.shards_read, half.shards_begun) == (4, 2, 2)
            assert (half.rows_read, half.rows_expected) == (20, 40)
            assert half.left_s == pytest.approx(half.seconds, rel=0.01), "the other half takes as long"
            assert {one.name for one in half.working} == {f"shard {name}" for name in held}
            assert all(one.owner for one in half.working)
            facts = dict(run_facts("shop", half))
            assert facts["shards"] == "2 of 4 read, 2 begun"
            assert facts["rows"].startswith("20 of about 40 read, ")
            assert facts["time"].endswith(" left")
            goes_on.set()
            end = await working.until_ended()
        assert (end.shards_read, end.shards_begun, end.rows_read, end.left_s, end.working) == (4, 0, 40, None, ())
        assert [one.stage for one in works.emitted(events.ReindexMoved)] == ["scanning", "sweeping"]
        rows = {one.shard: one.rows for one in works.emitted(events.ShardAdvanced)}
        assert rows == {f"shard {number:06d}": 10 for number in range(4)}

    run(story(), limit_s=60)


def test_a_shard_whose_attempts_fail_is_stalled_and_the_others_are_read(tmp_path: Path):
    origin, works = works_of(tmp_path)

    async def before_scan(shard: Shard, after: str) -> None:
        if shard.name == "from 10":
            raise KeywiseError("the table has changed")

    async def story() -> None:
        await works.start(shard_rows=10)
        async with works.working() as working:
            origin.before_scan = before_scan

            async def is_stalled() -> bool:
                report = await report_of(working.pipeline)
                return bool(report.stalled) and report.shards_read == 3

            await working.until(is_stalled)
            report = await report_of(working.pipeline)
            [one] = report.stalled
            assert (one.name, one.attempts >= 3) == ("shard from 10", True)
            [text] = waiting_texts("shop", report)
            assert "shard from 10" in text and "attempts failed in a row; see the log of the workers" in text
            [cause, *_] = [failed.cause for failed in works.emitted(events.Failed)]
            assert "the table has changed" in cause
            origin.before_scan = Away(0)
            end = await working.until_ended()
        assert (end.run.state, end.rows_read, end.stalled) == (RunState.COMPLETE, 40, ())

    run(story(), limit_s=60)


@pytest.mark.parametrize(("error", "is_shown"), [(UnavailableError("away"), True), (ThrottledError("slower"), False)])
def test_an_origin_that_is_away_is_shown_and_one_that_throttles_is_not(
    tmp_path: Path, error: UnavailableError, is_shown: bool
):
    """A worker claims the shard at each attempt, so its entry changes all the time, though nothing is read."""
    origin, works = works_of(tmp_path)

    async def story() -> None:
        await works.start()
        async with works.working() as working:
            origin.before_scan = away = Away(10**6, error)

            async def has_tried() -> bool:
                return away.left <= 10**6 - 6

            await working.until(has_tried)
            texts = waiting_texts("shop", await report_of(working.pipeline))
            assert ["attempts failed in a row; see the log of the workers" in text for text in texts] == [
                True
            ] * is_shown
            origin.before_scan = Away(0)
            end = await working.until_ended()
        assert (end.run.state, end.rows_read, end.stalled) == (RunState.COMPLETE, 40, ())

    run(story(), limit_s=60)


def test_an_origin_that_does_not_move_on_is_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would be read for ever."""
    origin, works = works_of(tmp_path)

    async def scan(shard: Shard, after: str, limit: int) -> Page:
        return Page([row("k000", 1)], "here", is_last=False)

    async def story() -> None:
        await works.start()
        async with works.working() as working:
            monkeypatch.setattr(origin, "scan", scan)

            async def is_stalled() -> bool:
                return bool((await report_of(working.pipeline)).stalled)

            await working.until(is_stalled)
            assert "with the cursor that it was given" in works.emitted(events.Failed)[0].cause
            monkeypatch.undo()
            end = await working.until_ended()
        assert (end.run.state, end.stalled) == (RunState.COMPLETE, ())

    run(story(), limit_s=60)


def test_a_sweep_whose_attempts_fail_is_stalled(tmp_path: Path):
    """Each attempt looks up a page of keys before it fails, and begins again at the first."""
    origin, works = works_of(tmp_path)

    async def before_fetch(keys: Sequence[str]) -> None:
        if "new" in keys:
            raise KeywiseError("the table has changed")

    async def story() -> None:
        await works.handles(*(row(f"a{number:03}", 1) for number in range(150)), row("new", 1))
        await works.start(delete_max=151, is_checked=False)
        async with works.working() as working:
            origin.before_fetch = before_fetch

            async def is_stalled() -> bool:
                return [one.name for one in (await report_of(working.pipeline)).stalled] == ["sweep"]

            await working.until(is_stalled)
            assert len(waiting_texts("shop", await report_of(working.pipeline))) == 1
            origin.before_fetch = Away(0)
            end = await working.until_ended()
        assert (end.run.state, end.swept["gone"], end.stalled) == (RunState.COMPLETE, 151, ())

    run(story(), limit_s=60)


def test_a_shard_that_does_not_move_is_stalled_and_names_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "STALLED_S", 0.5)
    origin, works = works_of(tmp_path)
    goes_on = asyncio.Event()

    async def before_scan(shard: Shard, after: str) -> None:
        if shard.name == "from 30":
            await goes_on.wait()

    async def story() -> None:
        await works.start(shard_rows=10)
        async with works.working() as working:
            origin.before_scan = before_scan

            async def is_stalled() -> bool:
                return [one.name for one in (await report_of(working.pipeline)).stalled] == ["shard from 30"]

            await working.until(is_stalled)
            report = await report_of(working.pipeline)
            [one] = report.stalled
            assert one.owner and not report.is_unattended
            [text] = waiting_texts("shop", report)
            assert one.owner in text
            goes_on.set()
            end = await working.until_ended()
        assert end.stalled == ()

    run(story(), limit_s=60)


def test_a_row_that_is_postponed_after_the_sweep_is_not_waited_for(tmp_path: Path):
    """A worker that was stopped with a page that another one has read."""
    _, works = works_of(tmp_path)

    async def story() -> int:
        ended = await works.runs()
        async with works.opened() as pipeline:
            _, shards = require_origin(pipeline)
            await shards.postpone(["k01"], ended.run.generation)
        return (await works.report()).postponed

    assert run(story(), limit_s=60) == 0


def test_a_run_without_workers_says_so_and_a_paused_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "UNATTENDED_S", 0.0)
    _, works = works_of(tmp_path)

    async def story() -> None:
        await works.start()
        report = await works.report()
        assert report.is_unattended
        assert waiting_texts("shop", report) == [
            "no worker takes part in it now; start one with keywise run, or see the log of the workers"
        ]
        await works.pause()
        report = await works.report()
        assert not report.is_unattended and waiting_texts("shop", report) == []

    run(story())
