"""Pages are published, unpublished, republished and removed by hand while their index is rebuilt on a real OpenSearch.

The engine forgets deletions at once and is restarted in the middle; messages come in the wrong order, and come again.
"""

import asyncio
import itertools
from typing import Any

import pytest

from adapters.publishing_stores import forget_deletions
from keywise.core.controls import RunState
from keywise.reindex.admin import require_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from reindex.catalogue import Catalogue, row, run_of
from running import run
from servers import shared

pytestmark = pytest.mark.server("opensearch")

PAGES = 30
PAGE_ROWS = 8
BUILT, READ, CAUGHT_UP, SWAPPED = "before the build", "while rows are read", "while it catches up", "after the swap"
STAGES = (BUILT, READ, CAUGHT_UP, SWAPPED)
STORIES = ("twice", "republished", "unpublished", "removed", "removed and sent again", "removed and edited")
_numbers = itertools.count(1)


class House(Catalogue):
    """A publishing house. It notes what readers should see."""

    def __init__(self, ledger: str, sink: str) -> None:
        keys = [f"page {number}" for number in range(PAGES)] + [
            f"{story} {stage}" for story in STORIES for stage in STAGES
        ]
        super().__init__(ledger, sink, dict.fromkeys(keys, 1))
        self.origin.page_rows = PAGE_ROWS
        self.truth: dict[str, dict[str, Any]] = dict(self.origin.rows)

    async def publish_all(self) -> None:
        await self.app.send("pages", *self.origin.rows.values())
        await self.until_empty()

    async def tell_stories(self, stage: str, *indexes: str, restarts: bool = False) -> None:
        """Let a page of each kind change in this stage; the engine forgets what it can in the middle."""
        key = {story: f"{story} {stage}" for story in STORIES}
        # Each message that is sent first is the newer one.
        self.truth[key["twice"]] = self.origin.put(key["twice"], 3)
        self.truth[key["republished"]] = self.origin.put(key["republished"], 4)
        del self.origin.rows[key["unpublished"]], self.truth[key["unpublished"]]
        newer = self.origin.rows[key["twice"]], self.origin.rows[key["republished"]]
        await self.app.send("pages", *newer, row(key["unpublished"], 3, gone=True))
        await self.until_empty()
        for story in ("removed", "removed and sent again", "removed and edited"):
            await self.remove(key[story])
            del self.truth[key[story]]
        if restarts:
            await asyncio.to_thread(shared.opensearch().restart)
        for index in indexes:
            await asyncio.to_thread(forget_deletions, index)
        self.truth[key["removed and edited"]] = self.origin.put(key["removed and edited"], 2)
        late = row(key["twice"], 2), row(key["republished"], 3, gone=True), row(key["unpublished"], 2)
        again = row(key["removed and sent again"], 1), self.origin.rows[key["removed and edited"]]
        await self.app.send("pages", *late, *again)
        await self.until_empty()


@pytest.fixture
def name():
    """The alias of an index that forgets deletions at once."""
    name, server = f"house_{next(_numbers)}", shared.opensearch()
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0, "gc_deletes": "0s"}})
    yield name
    server.ask("DELETE", f"/{name}-*")


def test_a_rebuilt_index_equals_the_truth_after_the_swap_and_after_a_rollback(tmp_path, name):
    server = shared.opensearch()
    house = House(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}")
    old, new = f"{name}-0", f"{name}-1"
    restarted_at = list[str]()

    async def in_the_middle(after: str) -> None:
        if after and not restarted_at:
            restarted_at.append(after)
            await house.tell_stories(READ, old, new, restarts=True)

    async def story() -> None:
        async with house.working():
            await house.publish_all()
            await house.tell_stories(BUILT, old)
            assert await shown(old) == house.truth
            house.origin.before_page = in_the_middle
            await house.build(new)
            assert restarted_at, "the engine was restarted between two pages"
            await house.tell_stories(CAUGHT_UP, old, new)
            there = await house.swap()
            assert (run_of(there).state, there.target) == (RunState.COMPLETE, new)
            assert server.ask("GET", f"/{name}/_alias").keys() == {new}
            assert await shown(name) == house.truth
            await house.tell_stories(SWAPPED, old, new, restarts=True)
            assert await shown(name) == house.truth
            back = await house.roll_back()
            assert (run_of(back).state, back.target) == (RunState.COMPLETE, old)
            assert server.ask("GET", f"/{name}/_alias").keys() == {old}
            assert await shown(name) == house.truth

    run(story(), limit_s=150)
    settings = server.ask("GET", f"/{new}/_settings?flat_settings=true")[new]["settings"]
    assert settings["index.gc_deletes"] == "0s", "the new index forgets as the old one does"


def test_a_reindex_in_place_brings_nothing_back_though_its_origin_is_behind(tmp_path, name):
    """The rows are as they were before: of pages that are unpublished, removed, and newer in the index."""
    server, index = shared.opensearch(), f"{name}-0"
    house = House(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}")
    rows = dict(house.origin.rows)

    async def story() -> RunReport:
        async with house.working():
            await house.publish_all()
            for stage in STAGES:
                await house.tell_stories(stage, index)
            house.origin.rows = rows
            await asyncio.to_thread(server.restart)
            await asyncio.to_thread(forget_deletions, index)
            async with house.acting() as admin:
                await admin.start(RunPlan(is_checked=False))
                await house.until(admin.pipeline, lambda controls: run_of(controls).state is RunState.COMPLETE)
                report = await report_run(admin.pipeline, require_origin(admin.pipeline)[1])
        assert report is not None
        return report

    report = run(story(), limit_s=150)
    assert server.documents(name) == house.truth
    # Of each stage: removed, and removed and sent again; all others are newer than their rows.
    assert report.counts == {"read": len(rows), "applied": PAGES, "removed": 2 * 4, "stale": 4 * 4}


async def shown(index: str) -> dict[str, dict[str, Any]]:
    return await asyncio.to_thread(shared.opensearch().documents, index)
