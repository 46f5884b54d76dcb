"""A run in place writes every row again, at its version and at the generation of the run, while live changes flow."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keywise import Ignore, Put
from keywise.core import events
from keywise.core.controls import RunState
from keywise.core.origin import Shard
from reindex.reindex_rig import Catalogue, Works, bodies_of, row
from running import run


def test_every_row_is_written_once_at_the_generation_of_the_run(tmp_path: Path):
    keys = [f"k{number:02d}" for number in range(25)]
    origin = Catalogue(*(row(key, 3) for key in keys))
    works = Works(tmp_path, origin)

    async def story() -> None:
        report = await works.runs(shard_rows=10)
        assert (report.run.state, report.run.generation, report.run.shards) == (RunState.COMPLETE, 1, 3)
        assert (report.shards_read, report.shards_begun, report.rows_expected) == (3, 0, 25)
        assert report.counts == {"read": 25, "applied": 25}
        assert works.content() == dict.fromkeys(keys, 3)
        assert await works.marks() == dict.fromkeys(keys, (0, 3, 1))
        assert len(set(origin.scans)) == len(origin.scans), "no page is read twice"
        [ended] = works.emitted(events.ReindexEnded)
        assert (ended.generation, ended.counts, ended.gone) == (1, {"read": 25, "applied": 25}, 0)

    run(story(), limit_s=60)


def test_a_second_run_writes_every_row_again(tmp_path: Path):
    origin = Catalogue(row("a", 1), row("b", 1))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.runs()
        # Somebody has edited the table, and the ledger does not know.
        works.execute("delete from stock where key = 'a'", """update stock set body = '{}' where key = 'b'""")
        report = await works.runs()
        assert (report.run.generation, report.counts) == (2, {"read": 2, "applied": 2})
        assert bodies_of(works.ledger_file) == {"a": row("a", 1), "b": row("b", 1)}

    run(story(), limit_s=60)


def test_a_live_change_wins_whether_it_comes_before_its_row_with_it_or_behind_it(tmp_path: Path):
    """The origin of this test is behind: none of its rows has what was sent."""
    origin = Catalogue(*(row(key, 1) for key in ("before", "between", "behind", "same")))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.handles(row("before", 2), row("same", 1, text="as it was sent"))
        async with works.working() as working:

            async def between(shard: Shard, after: str) -> None:
                origin.before_scan = _nothing
                await works.app.send("shop", row("between", 2))
                await working.until(lambda: "between" in works.content())

            await works.start()
            origin.before_scan = between
            report = await working.until_ended()
        assert report.counts == {"read": 4, "stale": 2, "applied": 2}
        assert bodies_of(works.ledger_file)["same"] == row("same", 1), "at the same version the row is written"
        await works.handles(row("behind", 2))
        assert works.content() == {"before": 2, "between": 2, "behind": 2, "same": 1}

    run(story(), limit_s=60)


async def _nothing(*_: object) -> None:
    pass


def test_what_was_deleted_stays_deleted_though_the_origin_is_behind(tmp_path: Path):
    origin = Catalogue(row("a", 1), row("b", 1))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.handles(row("a", 2, gone=True), row("b", 1, gone=True))
        report = await works.runs()
        # At the version of its row, a deletion could only be that of an operator, or of an origin that says so twice.
        assert report.counts == {"read": 2, "stale": 1, "removed": 1}
        assert works.content() == {}

    run(story(), limit_s=60)


def test_a_row_that_upstream_has_marked_as_deleted_is_a_deletion(tmp_path: Path):
    works = Works(tmp_path, Catalogue(row("a", 2, gone=True), row("b", 2)))

    async def story() -> None:
        await works.handles(row("a", 1), row("b", 1))
        report = await works.runs()
        assert report.counts == {"read": 2, "applied": 2}
        assert works.content() == {"b": 2}

    run(story(), limit_s=60)


def test_an_empty_origin_is_read_to_its_end(tmp_path: Path):
    works = Works(tmp_path, Catalogue())

    async def story() -> None:
        report = await works.runs()
        assert (report.run.state, report.shards_read, report.counts) == (RunState.COMPLETE, 1, {})

    run(story(), limit_s=60)


def test_rows_that_are_ignored_are_counted(tmp_path: Path):
    def read(body: dict[str, Any]) -> object:
        return Ignore() if body.get("draft") else Put(body["key"], body["version"])

    works = Works(tmp_path, Catalogue(row("a", 1), row("b", 1, draft=True)), read=read)

    async def story() -> None:
        report = await works.runs()
        assert report.counts == {"read": 2, "applied": 1, "ignored": 1}
        assert report.reconciles and works.content() == {"a": 1}

    run(story(), limit_s=60)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_share_the_shards(tmp_path: Path, workers: int):
    keys = [f"k{number:02d}" for number in range(40)]
    origin = Catalogue(*(row(key, 1) for key in keys))
    crew = [Works(tmp_path, origin) for _ in range(workers)]

    async def story() -> None:
        await crew[0].start(shard_rows=4)
        async with AsyncExitStack() as stack:
            working = [await stack.enter_async_context(one.working()) for one in crew]
            report = await working[0].until_ended()
        assert report.counts == {"read": 40, "applied": 40}
        assert sorted(scan[0] for scan in origin.scans) == sorted(f"from {start}" for start in range(0, 40, 4))
        assert sum(len(one.emitted(events.ReindexEnded)) for one in crew) == 1

    run(story(), limit_s=60)


def test_a_complete_run_ends_a_due_resync_and_a_partial_one_does_not(tmp_path: Path):
    works = Works(tmp_path, Catalogue(row("a", 1), row("b", 1)))

    async def is_due() -> bool:
        return (await works.controls()).resync_at > 0

    async def story() -> None:
        await lose_marks(works)
        await works.runs(keys=["a"])
        assert await is_due()
        await works.runs()
        assert not await is_due()

    run(story(), limit_s=60)


async def lose_marks(works: Works) -> None:
    """What a ledger does that has found out that it has lost something."""
    async with works.opened() as pipeline:
        await pipeline.admin.mark_suspect([], True)


def test_a_resync_that_falls_due_during_a_run_is_not_ended_by_it(tmp_path: Path):
    """The rows that were read before may have lost their marks."""
    origin = Catalogue(row("a", 1), row("b", 1))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start()

        async def before_scan(shard: Shard, after: str) -> None:
            await lose_marks(works)

        origin.before_scan = before_scan
        report = await works.work_until_ended()
        assert report.run.state is RunState.COMPLETE
        assert (await works.controls()).resync_at > report.run.started_at

    run(story(), limit_s=60)
