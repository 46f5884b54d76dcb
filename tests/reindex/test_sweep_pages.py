"""The sweep looks up keys page by page: no page waits for long for a row of another one, and few rows are on their way."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.reindex import sweep
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
    monkeypatch.setattr(sweep, "SETTLE_S", 1.0)
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
