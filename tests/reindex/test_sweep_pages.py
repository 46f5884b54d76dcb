"""The sweep looks up keys page by page: a slow row does not hold up other pages, and few rows are on their way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from keywise.core.change import Delivery
from keywise.core.controls import RunState
from keywise.core.entry import Claim
from keywise.flow.handover import Handover, HandoverQueue
from keywise.reindex import sweep, worker
from keywise.reindex.admin import require_origin
from keywise.reindex.rows import GoneKey
from keywise.reindex.shards import SWEEP
from keywise.reindex.sweep import Sweep
from reindex.reindex_rig import Catalogue, Works, row
from running import run

KEYS = [f"k{number:03d}" for number in range(250)]
"""The keys of three pages."""


async def missed_by_the_scan(works: Works) -> None:
    """Write all keys at version 1. The origin has version 2 by now, and no scan meets it."""
    await works.handles(*(row(key, 1) for key in KEYS))
    works.origin.put(*(row(key, 2) for key in KEYS))
    works.origin.hidden = set(KEYS)


async def pause(works: Works, key: str) -> None:
    async with works.operated() as (admin, _):
        await admin.pause(key, is_pattern=False)


def test_a_paused_key_stops_no_row_of_a_later_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "QUIET_S", 1.0)
    origin = Catalogue()
    works = Works(tmp_path, origin)
    at_repetition: list[dict[str, int]] = []

    async def before_fetch(keys: Sequence[str]) -> None:
        if len(origin.fetched) == 3:
            at_repetition.append(works.content())

    async def story() -> None:
        await missed_by_the_scan(works)
        await pause(works, "k000")
        origin.before_fetch = before_fetch
        await works.start(is_checked=False)
        async with works.working() as working:
            await working.until(lambda: bool(at_repetition))
            await works.cancel()

    run(story(), limit_s=60)
    assert at_repetition[0] == dict.fromkeys(KEYS, 2) | {"k000": 1}


def test_a_paused_key_holds_up_the_keys_of_other_pages_for_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For `QUIET_S` a page, and not until its row is given up as that of a sink that is away."""
    monkeypatch.setattr(sweep, "QUIET_S", 0.5)
    works = Works(tmp_path, Catalogue())

    async def story() -> None:
        await missed_by_the_scan(works)
        for key in ("k000", "k100"):
            await pause(works, key)
        await works.start(is_checked=False)
        async with works.working() as working:
            await working.until(lambda: [key for key in KEYS if works.content()[key] == 1] == ["k000", "k100"])
            await works.cancel()

    run(story(), limit_s=60)


def test_pages_of_paused_keys_only_are_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the first one it is not known whether its keys are paused, or its handler is slow."""
    monkeypatch.setattr(sweep, "SETTLE_S", 5.0)
    monkeypatch.setattr(sweep, "QUIET_S", 0.2)
    origin = Catalogue()
    works = Works(tmp_path, origin)

    async def story() -> list[float]:
        await missed_by_the_scan(works)
        async with works.operated() as (admin, _):
            await admin.pause("k*", is_pattern=True)
        asked_at: list[float] = []

        async def before_fetch(keys: Sequence[str]) -> None:
            asked_at.append(asyncio.get_running_loop().time())

        origin.before_fetch = before_fetch
        await works.start(is_checked=False)
        async with works.working() as working:
            await working.until(lambda: len(asked_at) >= 3)
            await works.cancel()
        return asked_at

    first, second, third, *_ = run(story(), limit_s=60)
    assert second - first >= 5.0 > third - second


def test_a_sweep_rests_before_it_is_repeated_and_a_cancel_ends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "SETTLE_S", 0.2)
    monkeypatch.setattr(sweep, "REPEAT_S", 3600.0)
    monkeypatch.setattr(sweep, "REPEAT_MAX_S", 3600.0)
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    origin = Catalogue()
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.handles(row("k000", 1))
        origin.put(row("k000", 2))
        origin.hidden = {"k000"}
        await pause(works, "k000")
        await works.start(is_checked=False)
        async with works.working() as working:

            async def has_ended_once() -> bool:
                position = (await works.shard_entries())[SWEEP].position if origin.fetched else None
                return position is not None and position.place == 1

            await working.until(has_ended_once)
            for version in range(1, 6):
                await works.app.send("shop", row("live", version))
                await working.until_empty()
            await works.cancel()
            assert len(origin.fetched) == 1, "nothing was asked for again meanwhile"

            async def is_let_go() -> bool:
                return not (await works.shard_entries())[SWEEP].token

            await working.until(is_let_go)

    run(story(), limit_s=60)


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were on their way to the pipeline, each time when some were handed over."""
    put, seen = HandoverQueue.put, list[int]()

    def noting(self: HandoverQueue, deliveries: Sequence[Delivery]) -> Handover:
        handover = put(self, deliveries)
        seen.append(len(self._open))
        return handover

    monkeypatch.setattr(HandoverQueue, "put", noting)
    return seen


async def postpone(works: Works, keys: Sequence[str]) -> None:
    async with works.opened() as pipeline:
        await require_origin(pipeline)[1].postpone(keys, 1)


def test_postponed_rows_are_read_and_handed_over_page_by_page(tmp_path: Path, depths: list[int]):
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    origin.hidden = set(KEYS)
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start(is_checked=False)
        await postpone(works, KEYS)
        report = await works.work_until_ended()
        assert (report.run.state, report.swept, report.postponed) == (
            RunState.COMPLETE,
            {"found": 250, "applied": 250},
            0,
        )
        assert works.content() == dict.fromkeys(KEYS, 1)

    run(story(), limit_s=60)
    assert sorted(map(len, origin.fetched)) == [50, 100, 100]
    assert max(depths) == 100


def test_gone_keys_are_deleted_page_by_page(tmp_path: Path, depths: list[int]):
    works = Works(tmp_path, Catalogue())

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        report = await works.runs(is_checked=False, delete_max=250)
        assert (report.run.state, report.swept["gone"], report.deleted) == (RunState.COMPLETE, 250, 250)
        assert works.content() == {}

    run(story(), limit_s=60)
    assert max(depths) == 100


def test_gone_keys_above_the_limit_are_counted_and_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    works = Works(tmp_path, Catalogue())
    advance, kept = Sweep._advance, list[int]()

    async def noting(self: Sweep, claim: Claim) -> bool:
        kept.append(len(self._missing))
        return await advance(self, claim)

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        monkeypatch.setattr(Sweep, "_advance", noting)
        report = await works.runs(is_checked=False, delete_max=120)
        assert (report.run.state, report.gone) == (RunState.SWEEPING, 250)
        assert works.content() == dict.fromkeys(KEYS, 1)

    run(story(), limit_s=60)
    assert max(kept) == 100


def test_deletions_are_counted_page_by_page_before_they_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first worker is lost before the second page, which therefore counts twice."""
    monkeypatch.setattr(sweep, "FETCH_KEYS", 10)
    works, keys = Works(tmp_path, Catalogue()), KEYS[:30]
    hand_over, pages = Sweep._hand_over, list[int]()

    async def failing(self: Sweep, deliveries: Sequence[Delivery]) -> list[Delivery]:
        pages.append(sum(isinstance(one, GoneKey) for one in deliveries))
        if pages[-2:] == [10, 10]:
            raise RuntimeError("this worker goes no further")
        return await hand_over(self, deliveries)

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in keys))
        monkeypatch.setattr(Sweep, "_hand_over", failing)
        report = await works.runs(is_checked=False, delete_max=30)
        assert (report.deleted, report.gone, len(works.content())) == (20, 20, 20)

    run(story(), limit_s=60)


def test_a_cancel_is_noticed_between_two_pages_of_postponed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "FETCH_KEYS", 1)
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    origin.hidden = set(KEYS)
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start(is_checked=False)
        await postpone(works, KEYS)
        origin.before_fetch = cancelling(works, 2)
        report = await works.work_until_ended()
        assert report.run.state is RunState.CANCELLED

    run(story(), limit_s=100)
    assert 2 <= len(works.content()) <= len(origin.fetched) < len(KEYS)


def test_a_cancel_is_noticed_between_two_pages_of_gone_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "FETCH_KEYS", 1)
    works, keys = Works(tmp_path, Catalogue()), KEYS[:100]

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in keys))
        works.origin.before_fetch = cancelling(works, len(keys) + 2)
        await works.start(is_checked=False, delete_max=len(keys))
        report = await works.work_until_ended()
        assert report.run.state is RunState.CANCELLED

    run(story(), limit_s=100)
    assert 0 < len(works.content()) <= len(keys) - 2


def cancelling(works: Works, after: int) -> Callable[[Sequence[str]], Awaitable[None]]:
    """Cancel the run after so many pages, and let the others take a while: workers notice it within a second."""

    async def before_fetch(keys: Sequence[str]) -> None:
        if len(works.origin.fetched) == after:
            await works.cancel()
        if len(works.origin.fetched) >= after:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.1)

    return before_fetch
