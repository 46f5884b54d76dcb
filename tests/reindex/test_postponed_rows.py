"""Rows that do not end in time are left to the sweep, and none is lost on the way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import keywise
from keywise.cli.run_text import waiting_texts
from keywise.core.change import Outcome
from keywise.core.controls import RunState
from keywise.core.entry import Claim
from keywise.core.events import Event, Settled
from keywise.reindex import worker
from keywise.reindex.admin import require_origin
from keywise.reindex.shards import ShardLedger, _digest_key
from reindex.reindex_rig import Catalogue, Works, report_of, row
from running import run


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is paused is postponed after a moment."""
    monkeypatch.setattr(worker, "SETTLE_S", 0.5)
    monkeypatch.setattr(worker, "QUIET_S", 0.1)


def test_a_row_that_another_worker_was_postponing_when_it_died_is_not_lost(tmp_path: Path):
    """It held the entry of the row, and has not stored the key in it: the page does not count as read."""
    origin = Catalogue(row("a", 1), row("b", 1))
    works = Works(tmp_path, origin)

    async def story() -> None:
        async with works.operated() as (admin, _), works.opened() as pipeline:
            await admin.pause("b", is_pattern=False)
            _, shards = require_origin(pipeline)
            held = await shards.claim(_digest_key("b"), 1)
            assert isinstance(held, Claim)
            await works.start(is_checked=False)
            async with works.working() as working:

                async def is_read_twice() -> bool:
                    return len(origin.scans) > 1 or not (await report_of(working.pipeline)).run.is_active

                await working.until(is_read_twice)
                await shards.release(held)
                await admin.resume("b", is_pattern=False)
                await working.until_ended()

    run(story(), limit_s=60)
    assert works.content() == {"a": 1, "b": 1}


def test_a_page_whose_rows_are_all_paused_does_not_stop_its_shard(tmp_path: Path):
    origin = Catalogue(*(row(f"{kind}{number}", 1) for kind in "ab" for number in range(10)))
    works = Works(tmp_path, origin)

    async def story() -> None:
        async with works.operated() as (admin, _):
            await admin.pause("a*", is_pattern=True)
            await works.start(shard_rows=10, is_checked=False)
            async with works.working() as working:

                async def is_scanned() -> bool:
                    return (await report_of(working.pipeline)).run.state is RunState.SWEEPING

                await working.until(is_scanned)
                assert works.content() == {f"b{number}": 1 for number in range(10)}
                await admin.resume("a*", is_pattern=True)
                report = await working.until_ended()
        assert report.counts == {"read": 20, "applied": 10, "postponed": 10}

    run(story(), limit_s=60)
    assert works.content() == dict.fromkeys(origin.rows, 1)


def test_rows_of_a_paused_pipeline_wait_and_status_says_why(tmp_path: Path):
    """Every row of the origin would be stored as postponed, so the shards wait."""
    origin = Catalogue(row("a", 1))
    works = Works(tmp_path, origin)

    async def story() -> None:
        async with works.operated() as (admin, _):
            await admin.pause("*", is_pattern=True)
            await works.start(is_checked=False)
            async with works.working() as working:
                await working.until(lambda: len(origin.scans) > 1)
                report = await report_of(working.pipeline)
                assert (report.run.state, report.postponed) == (RunState.SCANNING, 0)
                assert waiting_texts("shop", report) == [
                    "the pipeline is paused, and its rows wait; resume it with keywise resume --all --pipeline shop"
                ]
                await admin.resume("*", is_pattern=True)
                report = await working.until_ended()
        assert report.counts == {"read": 1, "applied": 1} and waiting_texts("shop", report) == []

    run(story(), limit_s=60)


def test_a_row_that_ends_while_it_is_postponed_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_end, postpone = asyncio.Event(), ShardLedger.postpone

    async def handler(change: keywise.Change[Any]) -> None:
        if change.key == "b":
            await may_end.wait()

    origin = Catalogue(row("a", 1), row("b", 1))
    works = Works(tmp_path, origin, handler=handler)

    have_ended = asyncio.Event()

    def watch(event: Event) -> None:
        settled = [one for one in works.events if isinstance(one, Settled) and one.outcome is Outcome.APPLIED]
        if sum(one.changes for one in settled) == 2:
            have_ended.set()

    async def postpone_late(ledger: ShardLedger, keys: Sequence[str], generation: int) -> bool:
        may_end.set()
        await have_ended.wait()
        return await postpone(ledger, keys, generation)

    works.app.observers.append(watch)
    monkeypatch.setattr(ShardLedger, "postpone", postpone_late)
    report = run(works.runs(is_checked=False))
    assert report.counts == {"read": 2, "applied": 1, "postponed": 1} and report.reconciles
