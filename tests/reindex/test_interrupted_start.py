"""A start that was killed, or that another one has overtaken: the run has all rows, by one division into shards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keywise.core.controls import Controls, RunState
from keywise.core.errors import AdminError
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport
from keywise.reindex.shards import shard_number
from reindex.reindex_rig import Catalogue, Works, row
from running import run

KEYS = [f"k{number:02d}" for number in range(40)]
Act = Callable[[], Awaitable[None]]


class Killed(Exception):
    """Stands for the death of a command."""


async def kill() -> None:
    raise Killed


class Before:
    """A part of a pipeline, with an act before each call of one method, if the arguments are those to wait for."""

    def __init__(self, part: Any, method: str, act: Act, matches: Callable[..., bool] = lambda *_: True) -> None:
        self._part, self._method, self._act, self._matches = part, method, act, matches

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._part, name)

    async def _call(self, *arguments: Any) -> Any:
        if self._matches(*arguments):
            await self._act()
        return await getattr(self._part, self._method)(*arguments)


def begins_to_scan(before: Controls, after: Controls) -> bool:
    return after.run is not None and after.run.state is RunState.SCANNING


async def start_with(works: Works, act: Act, *, before_shards: bool = False, **plan: Any) -> None:
    """Start a run, with an act before its shards are written, or else after that and before workers may read them."""
    async with works.operated() as (_, reindex):
        if before_shards:
            reindex._shards._ledger = Before(reindex._shards._ledger, "claim", act)
        else:
            store = reindex.pipeline.control_store
            reindex.pipeline.control_store = Before(store, "replace_controls", act, begins_to_scan)
        await reindex.start(RunPlan(is_checked=False, **plan))


async def start_killed(works: Works, **plan: Any) -> None:
    with pytest.raises(Killed):
        await start_with(works, kill, **plan)


def works_of(folder: Path) -> tuple[Catalogue, Works]:
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    return origin, Works(folder, origin)


def assert_whole(works: Works, report: RunReport, keys: list[str] = KEYS) -> None:
    assert sorted(works.content()) == keys
    assert (report.run.generation, report.counts) == (1, {"read": len(keys), "applied": len(keys)})


@pytest.mark.parametrize(("first", "second"), [(2, 20), (20, 2), (2, 2)])
def test_a_start_that_was_killed_is_completed_by_one_with_other_shards(tmp_path: Path, first: int, second: int):
    _, works = works_of(tmp_path)

    async def story() -> RunReport:
        await start_killed(works, shard_rows=first)
        return await works.runs(shard_rows=second, is_checked=False)

    assert_whole(works, run(story()))


def test_a_start_that_was_killed_does_not_keep_the_division_of_its_moment(tmp_path: Path):
    """The last shard has more rows by the time of the second start."""
    origin, works = works_of(tmp_path)

    async def story() -> RunReport:
        await start_killed(works, shard_rows=7)
        origin.put(row("z1", 1), row("z2", 1))
        return await works.runs(shard_rows=7, is_checked=False)

    assert_whole(works, run(story()), [*KEYS, "z1", "z2"])


def test_a_start_for_some_keys_is_completed_by_one_for_other_keys(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> RunReport:
        await start_killed(works, keys=["k01", "k02"])
        return await works.runs(keys=["k07", "k08", "k09"], is_checked=False)

    assert_whole(works, run(story()), ["k07", "k08", "k09"])


def test_a_start_is_completed_with_the_options_of_the_last_command(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def story() -> RunReport:
        await start_killed(works, also_removed=True, delete_max=7)
        return await works.runs(is_checked=False)

    started = run(story()).run
    assert (started.also_removed, started.delete_max) == (False, None)


@pytest.mark.parametrize("before_shards", [True, False])
@pytest.mark.parametrize(("first", "second"), [(2, 20), (20, 2), (7, 7)])
def test_a_start_that_another_one_has_overtaken_changes_no_shard(
    tmp_path: Path, first: int, second: int, before_shards: bool
):
    """The first one was stopped, so that the second one took it for dead, and goes on when workers read already."""
    _, works = works_of(tmp_path)

    async def overtake() -> None:
        async with works.operated() as (_, reindex):
            await reindex.start(RunPlan(shard_rows=second, is_checked=False))

    async def story() -> RunReport:
        with pytest.raises(AdminError, match="another operator has started or changed a run meanwhile"):
            await start_with(works, overtake, before_shards=before_shards, shard_rows=first)
        return await works.work_until_ended()

    assert_whole(works, run(story()))


def test_two_starts_at_once_do_not_mix_their_shards(tmp_path: Path):
    """Both write shards before either ends: one is refused, or finds that the other one writes."""
    _, works = works_of(tmp_path)

    async def story() -> RunReport:
        first_has_begun, second_has_begun = asyncio.Event(), asyncio.Event()

        async def wait_for_second() -> None:
            first_has_begun.set()
            await second_has_begun.wait()

        async def go_on_together() -> None:
            second_has_begun.set()

        first = asyncio.create_task(start_with(works, wait_for_second, before_shards=True, shard_rows=2))
        await first_has_begun.wait()
        second = start_with(works, go_on_together, before_shards=True, shard_rows=20)
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert all(one is None or isinstance(one, AdminError) for one in results)
        return await works.work_until_ended() if None in results else await works.runs(is_checked=False)

    assert_whole(works, run(story()))


def test_a_start_of_an_ended_run_that_wakes_up_changes_no_shard_of_a_later_one(tmp_path: Path):
    _, works = works_of(tmp_path)

    async def next_run() -> None:
        async with works.operated() as (_, reindex):
            await reindex.cancel()
            await reindex.start(RunPlan(shard_rows=20, is_checked=False))

    async def story() -> RunReport:
        with pytest.raises(AdminError, match="another operator has started or changed a run meanwhile"):
            await start_with(works, next_run, before_shards=True, shard_rows=2)
        return await works.work_until_ended()

    report = run(story())
    assert (report.run.generation, report.counts) == (2, {"read": len(KEYS), "applied": len(KEYS)})
    assert sorted(works.content()) == KEYS


def test_no_worker_reads_a_shard_while_a_run_is_starting(tmp_path: Path):
    origin, works = works_of(tmp_path)

    async def story() -> None:
        await start_killed(works, shard_rows=5)
        async with works.working() as working:
            await works.app.send("shop", row("live", 1))
            await working.until_empty()
        entries = await works.shard_entries()
        assert all(entry.token == 0 and entry.mark is None for key, entry in entries.items() if shard_number(key))
        assert origin.scans == []

    run(story())
