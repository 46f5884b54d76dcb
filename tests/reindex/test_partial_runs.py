"""A run over some rows only, and a dry run over all of them: what each reads, counts, writes, and leaves alone."""

from pathlib import Path
from typing import Any

import pytest

from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError, ThrottledError
from keywise.reindex.admin import require_origin
from keywise.reindex.dry_run import DryRun, DryRunReport
from keywise.reindex.plan import RunPlan
from keywise.reindex.run_state import replace_run
from reindex.reindex_rig import Away, Catalogue, Works, bodies_of, row
from running import run

KEYS = [f"k{number:02d}" for number in range(20)]


def works_of(folder: Path, **options: Any) -> tuple[Catalogue, Works]:
    origin = Catalogue(*(row(key, 1, text="new") for key in KEYS))
    return origin, Works(folder, origin, **options)


async def written_before(works: Works) -> None:
    await works.handles(*(row(key, 1, text="old") for key in [*KEYS, "gone"]))


def renewed(works: Works) -> list[str]:
    return [key for key, body in bodies_of(works.ledger_file).items() if body.get("text") == "new"]


def test_some_keys_are_written_and_all_others_are_left_alone(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> None:
        await written_before(works)
        report = await works.runs(keys=["k03", "k07", "k03", "never there"])
        assert (report.run.state, report.run.is_partial) == (RunState.COMPLETE, True)
        assert report.counts == {"read": 2, "applied": 2}
        assert renewed(works) == ["k03", "k07"]
        assert "gone" in works.content(), "a partial run cannot know which keys are gone"

    run(story())


def test_many_keys_are_read_in_shards_that_fit_into_the_ledger(tmp_path: Path):
    keys = [f"{number:04d} {'x' * 100}" for number in range(100)]
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in keys)))

    async def story() -> None:
        report = await works.runs(keys=keys)
        assert report.counts == {"read": 100, "applied": 100}
        assert report.run.shards > 3

    run(story(), limit_s=60)


def test_the_first_rows_are_written_and_the_rest_is_left_alone(tmp_path: Path):
    origin, works = works_of(tmp_path)

    async def story() -> None:
        await written_before(works)
        report = await works.runs(limit=7, shard_rows=3)
        assert report.counts == {"read": 7, "applied": 7}
        assert renewed(works) == KEYS[:7]
        assert sum(rows for _, _, rows in origin.scans) == 7, "no more rows were read"
        assert "gone" in works.content()

    run(story())


def test_an_interrupted_start_for_some_rows_is_not_completed_by_one_for_all_rows(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> None:
        await written_before(works)
        async with works.opened() as pipeline:
            starting = ReindexRun(1, starts=1, is_partial=True, started_at=await pipeline.admin.now())
            assert await replace_run(pipeline, None, starting)
            # The killed command had stored its only shard.
            shards = await RunPlan(keys=["k03"]).shards(pipeline.origin)
            await require_origin(pipeline)[1].write(shards, 1, 1)
        with pytest.raises(AdminError, match="reindex 1 of pipeline 'shop' is starting"):
            await works.start()
        report = await works.runs(keys=["k03"])
        assert (report.run.generation, report.counts) == (1, {"read": 1, "applied": 1})

    run(story())


def test_a_run_over_no_key_is_refused(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> None:
        with pytest.raises(AdminError, match="there are no keys to read, so nothing was started"):
            await works.start(keys=[])
        assert (await works.controls()).run is None

    run(story())


@pytest.mark.parametrize("size", [513, 9000])
def test_a_run_over_a_key_that_is_too_long_is_refused(tmp_path: Path, size: int):
    """The keys of a shard are kept in its position."""
    _, works = works_of(tmp_path)

    async def story() -> None:
        with pytest.raises(AdminError, match=r"key 'xxxx.*'… has more than 512 bytes, so nothing was started"):
            await works.start(keys=["k03", "x" * size])
        assert (await works.controls()).run is None

    run(story())


def test_the_keys_of_a_run_may_have_any_characters(tmp_path: Path):
    keys = [sign * 511 + end for sign in ('"', "\\", "\x01", "k") for end in "ab"]
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in keys)))

    async def story() -> None:
        report = await works.runs(keys=keys)
        assert report.counts == {"read": 8, "applied": 8}

    run(story())


def test_a_generation_is_named_by_its_number_and_the_same_number_is_the_same_run(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> None:
        started = await works.start(generation=456)
        assert await works.start(generation=456) == started
        with pytest.raises(AdminError, match="reindex 456 of pipeline 'shop' is scanning, and one runs at a time"):
            await works.start()
        report = await works.work_until_ended()
        assert (report.run.generation, report.counts["applied"]) == (456, len(KEYS))
        assert await works.start(generation=456) == report.run, "also after its end"
        with pytest.raises(AdminError, match="generation 455 is not above 456"):
            await works.start(generation=455)
        assert (await works.start()).generation == 457
        await works.cancel()
        with pytest.raises(AdminError, match="generation 457 is not above 457"):
            await works.start(generation=457)  # A script must not take the cancelled run for its own.

    run(story())


def test_the_same_number_is_refused_if_other_rows_are_asked_for(tmp_path: Path):
    """A script would take a run of some rows for one of all rows."""
    _, works = works_of(tmp_path)

    async def story() -> None:
        await works.start(generation=456, keys=["k1"])
        with pytest.raises(AdminError, match="reindex 456 of pipeline 'shop' is scanning"):
            await works.start(generation=456)
        await works.work_until_ended()
        for other in ({}, {"into": "stock_{generation}"}):
            with pytest.raises(AdminError, match="generation 456 is not above 456"):
                await works.start(generation=456, **other)

    run(story())


def test_a_generation_that_no_ledger_could_store_is_refused(tmp_path: Path):
    """Otherwise every worker of the pipeline would end with its first row, and those of each later run too."""
    _, works = works_of(tmp_path)

    async def story() -> None:
        with pytest.raises(AdminError, match="generation 2000000001 is above the highest one"):
            await works.start(generation=2_000_000_001)
        await works.start(generation=2_000_000_000)
        assert (await works.work_until_ended()).run.state is RunState.COMPLETE

    run(story())


async def dry(works: Works, **plan: Any) -> DryRunReport:
    async with works.opened() as pipeline:
        return await DryRun(pipeline, RunPlan(**plan)).run()


def test_a_dry_run_counts_what_the_run_then_does_and_writes_nothing(tmp_path: Path):
    origin, works = works_of(tmp_path)
    origin.rows["broken"] = {"key": "broken"}

    async def story() -> None:
        await written_before(works)
        await works.handles(row("k01", 5), row("k02", 2, gone=True))
        await works.remove("k03")
        before = bodies_of(works.ledger_file), await works.marks(), await works.controls()
        expected = await dry(works)
        assert (bodies_of(works.ledger_file), await works.marks(), await works.controls()) == before
        assert expected.generation == 2, "the removal has one of its own"
        assert expected.counts == {"read": 21, "apply": 17, "stale": 2, "removed": 1, "malformed": 1}
        assert (expected.gone, expected.delete_max) == (1, 0)
        report = await works.runs()
        assert report.counts == {"read": 21, "applied": 17, "stale": 2, "removed": 1, "dead": 1}
        assert report.gone == 1, "the operator is asked"

    run(story())


@pytest.mark.parametrize("plan", [{"shard_rows": 7}, {"keys": KEYS}])
def test_a_dry_run_goes_on_after_its_origin_has_throttled_it(tmp_path: Path, plan: dict[str, Any]):
    origin, works = works_of(tmp_path)

    async def story() -> None:
        await written_before(works)
        origin.before_scan, origin.before_fetch = Away(2, ThrottledError("slow")), Away(2, ThrottledError("slow"))
        report = await dry(works, is_checked=False, **plan)
        assert report.counts == {"read": 20, "apply": 20}

    run(story())


@pytest.mark.parametrize(("plan", "read"), [({"keys": ["k01", "k02"]}, 2), ({"limit": 5}, 5)])
def test_a_dry_run_of_some_rows_reads_no_others(tmp_path: Path, plan: dict[str, Any], read: int):
    _, works = works_of(tmp_path)

    async def story() -> None:
        await written_before(works)
        report = await dry(works, **plan)
        assert (report.counts, report.gone) == ({"read": read, "apply": read}, 0)

    run(story())
