"""A run is paused, goes on where it was, and is cancelled; a cancelled one leaves nothing that could go live."""

import asyncio
import itertools
import os
from pathlib import Path

import pytest

from keywise.core import events
from keywise.core.controls import RunState
from keywise.core.errors import AdminError
from keywise.core.origin import Shard
from keywise.reindex.admin import require_origin
from keywise.reindex.plan import RunPlan
from reindex import catalogue as beside
from reindex.reindex_rig import Catalogue, Works, row
from running import run
from servers import shared

KEYS = [f"k{number:03d}" for number in range(40)]
MANY = [f"k{number:03d}" for number in range(200)]
"""The keys of shards with one row each. Read slowly, they last until workers notice what an operator does."""
ROWS = {f"k{number}": 1 for number in range(30)}
_numbers = itertools.count(1)


def test_a_pause_keeps_every_shard_where_it_is_and_costs_nothing(tmp_path: Path):
    origin = Catalogue(*(row(key, 1) for key in MANY))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start(shard_rows=1)
        async with works.working() as working:

            async def before_scan(shard: Shard, after: str) -> None:
                if len(origin.scans) == 3:
                    await works.pause()
                    origin.before_scan = slowly

            origin.before_scan = before_scan
            await working.until(lambda: stages(works)[-1:] == ["paused"])
            origin.before_scan = nothing

            async def is_still() -> bool:
                return not any(entry.token for entry in (await works.shard_entries()).values())

            await working.until(is_still)
            read = len(origin.scans)
            assert 3 <= read < len(MANY)
            await works.app.send("shop", row("k000", 2), row("live", 1))
            await working.until_empty()
            report = await works.report()
            assert (report.run.is_paused, report.stalled, report.is_unattended) == (True, (), False)
            assert works.content()["live"] == 1, "live changes go on"
            assert len(origin.scans) == read, "no page is read"
            assert all(entry.attempts == 0 for entry in (await works.shard_entries()).values())
            await works.resume()
            report = await working.until_ended()
        assert report.counts["read"] == len(MANY)
        assert len(set(origin.scans)) == len(origin.scans) == len(MANY), "no page is read twice"
        assert works.emitted(events.Failed) == works.emitted(events.DeadLettered) == []

    run(story(), limit_s=100)


def stages(works: Works) -> list[str]:
    return [one.stage for one in works.emitted(events.ReindexMoved)]


def test_a_pause_also_holds_the_sweep(tmp_path: Path):
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    works = Works(tmp_path, origin, horizon="5s")

    async def story() -> None:
        await works.handles(row("gone", 1))

        async def before_fetch(keys: object) -> None:
            if not (await works.controls()).run.is_paused and not origin.fetched:
                await works.pause()

        origin.before_fetch = before_fetch
        await works.start(is_checked=False, delete_max=1)
        async with works.working() as working:
            await working.until(lambda: stages(works)[-1:] == ["paused"])
            await works.app.send("shop", row("k000", 2))
            await working.until_empty()
            assert (works.content()["k000"], works.content()["gone"]) == (2, 1)
            await works.resume()
            report = await working.until_ended()
        assert (report.run.state, report.swept["gone"]) == (RunState.COMPLETE, 1)
        assert "gone" not in works.content()

    run(story(), limit_s=60)


def test_a_cancelled_run_leaves_what_it_has_written_and_the_next_one_starts_at_the_beginning(tmp_path: Path):
    origin = Catalogue(*(row(key, 1) for key in MANY))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start(shard_rows=1)
        async with works.working() as working:

            async def before_scan(shard: Shard, after: str) -> None:
                if len(origin.scans) == 3:
                    origin.before_scan = slowly
                    await works.cancel()

            origin.before_scan = before_scan
            report = await working.until_ended()
        origin.before_scan = nothing
        assert report.run.state is RunState.CANCELLED
        assert 0 < len(works.content()) < len(MANY)
        assert works.emitted(events.ReindexEnded) == [], "it is not complete"
        with pytest.raises(AdminError, match="no reindex of pipeline 'shop' is going on, so nothing was resumed"):
            await works.resume()
        report = await works.runs(shard_rows=100)
        assert (report.run.generation, report.counts["read"]) == (2, len(MANY))
        assert works.content() == dict.fromkeys(MANY, 1)

    run(story(), limit_s=60)


def on_sqlite(folder: Path) -> str:
    return f"sqlite:///{folder / 'pages.db'}"


def on_postgres(folder: Path) -> str:
    return shared.postgres().create_database(f"cancelled_{os.getpid()}_{next(_numbers)}")


@pytest.mark.parametrize("ledger", [on_sqlite, pytest.param(on_postgres, marks=pytest.mark.server("postgres"))])
def test_a_half_built_table_is_no_candidate_for_a_swap(tmp_path: Path, ledger):
    url = ledger(tmp_path)
    refuses_half_built(beside.Catalogue(url, f"{url}?table=pages", ROWS), "pages_0", "pages_1", "pages_2")


@pytest.mark.server("opensearch")
def test_a_half_built_index_is_no_candidate_for_a_swap(tmp_path: Path):
    server, name = shared.opensearch(), f"cancelled_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0}})
    one = beside.Catalogue(on_sqlite(tmp_path), f"{server.url}/{name}", ROWS)
    try:
        refuses_half_built(one, f"{name}-0", f"{name}-1", f"{name}-2")
    finally:
        server.ask("DELETE", f"/{name}-*")


def refuses_half_built(one: beside.Catalogue, live: str, half: str, whole: str) -> None:
    """Cancel a build between two pages; see that nothing lets its target go live, and that the next build does."""
    one.origin.page_rows = 10

    async def cancel(after: str) -> None:
        if after:
            one.origin.before_page = nothing
            async with one.acting() as admin:
                await admin.cancel()

    async def story() -> None:
        async with one.working():
            for key in ROWS:
                await one.change(key, 1)
            await one.until_empty()
            one.origin.before_page = cancel
            async with one.acting() as admin:
                await admin.start(RunPlan(into=half, is_checked=False))
                controls = await one.until(
                    admin.pipeline, lambda controls: beside.run_of(controls).state is RunState.CANCELLED
                )
                assert (controls.target, controls.spare) == ("", "")
                for act in (admin.verify, admin.swap):
                    with pytest.raises(AdminError, match="no target is being built beside the live one"):
                        await act()
                with pytest.raises(AdminError, match="no target to go back to"):
                    await admin.rollback()
                with pytest.raises(
                    AdminError, match=f"a cancelled run has left {half} beside the live target; drop it"
                ):
                    await admin.start(RunPlan(into=whole, is_checked=False))
                with pytest.raises(AdminError, match=half):
                    await admin.start(RunPlan(into=half, is_checked=False))
                assert await admin.drop() == half
            await until_let_go(one)
            await one.build(whole)
            there = await one.swap()
            assert (there.target, there.spare) == (whole, live)
            assert await one.content() == dict(sorted(ROWS.items()))

    run(story(), limit_s=100)


async def until_let_go(one: beside.Catalogue) -> None:
    """Wait until the worker has noticed that the run is cancelled: it holds no shard any more."""
    async with one.acting() as admin:
        _, shards = require_origin(admin.pipeline)
        while [key async for key, entry in shards.entries() if entry.token]:
            await one._look()


async def nothing(*_: object) -> None:
    pass


async def slowly(*_: object) -> None:
    """Let a scan take a while: workers notice within a second what an operator does, and on a busy machine later."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.1)
