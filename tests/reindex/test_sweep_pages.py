"""The sweep looks up keys page by page: no page waits for long for a row of another one, and few rows are on their way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.reindex import sweep, worker
from keywise.reindex.shards import SWEEP
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
