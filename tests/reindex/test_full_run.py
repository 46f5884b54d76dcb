"""A schedule repeats one command: it builds, verifies, swaps and tidies up, and goes on after a crash in between."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.core.events import ReindexEnded, TargetSwapped
from keywise.reindex import full_run
from keywise.reindex.admin import ReindexAdmin
from keywise.reindex.full_run import FullPlan, FullResult, FullRun
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.run_state import replace_run
from reindex.catalogue import Catalogue, run_of
from running import run

ROWS = {f"k{number}": 1 for number in range(30)}
INTO = "pages_{generation}"


class Schedule(Catalogue):
    """A catalogue that is rebuilt by a schedule."""

    async def rebuild(
        self,
        into: str = INTO,
        show: Callable[[RunReport], None] = lambda report: None,
        patience_s: float = 60.0,
        **limits: Any,
    ) -> FullResult:
        """What the command does, in an app of its own. The rows of a test are not older than a minute."""
        limits = {"run": RunPlan(into=into, is_checked=False), **limits}
        async with self.acting() as admin:
            rebuild = FullRun(admin._admin, admin._audit_note, FullPlan(**limits), show, patience_s=patience_s)
            return await rebuild.run()

    async def tables(self) -> list[str]:
        async with self.acting() as admin, admin.pipeline.ledger.transaction() as transaction:
            found = transaction.connection.execute("select name from sqlite_master where name like 'pages%'")
            return sorted(name for (name,) in found)

    async def until_stuck(self, admin: ReindexAdmin) -> None:
        """Wait until a key of the new target has waited for the origin for longer than the horizon."""
        while True:
            report = await report_run(admin.pipeline, admin._shards)
            if report is not None and report.catch_up.stuck:
                return
            await self._look()


@pytest.fixture
def schedule(tmp_path):
    url = f"sqlite:///{tmp_path / 'pages.db'}"
    return Schedule(url, f"{url}?table=pages", ROWS)


def swaps(schedule: Schedule) -> list[tuple[str, str]]:
    return [(one.before, one.after) for one in schedule.events if isinstance(one, TargetSwapped)]


def test_each_time_it_builds_a_target_swaps_it_in_and_drops_the_oldest(schedule):
    async def story():
        async with schedule.working():
            first = await schedule.rebuild()
            second = await schedule.rebuild()
            return first, second, await schedule.tables(), await schedule.content()

    first, second, tables, content = run(story(), limit_s=60)
    assert (first.target, first.spare, first.dropped) == ("pages_1", "pages_0", [])
    assert (second.target, second.spare, second.dropped) == ("pages_2", "pages_1", ["pages_0"])
    assert first.swapped.startswith("from pages_0 to pages_1; changes waited ")
    assert tables == ["pages", "pages_1"]
    assert content == dict(sorted(ROWS.items()))
    assert swaps(schedule) == [("pages_0", "pages_1"), ("pages_1", "pages_2")]


def test_a_target_that_an_operator_has_kept_stays_after_every_later_run(schedule):
    async def story():
        async with schedule.working():
            await schedule.rebuild()
            await schedule.rebuild()
            async with schedule.acting() as admin:
                assert await admin.drop(keeps_always=True) == "pages_1"
            return await schedule.rebuild(), await schedule.rebuild(keep=2), await schedule.tables()

    third, fourth, tables = run(story(), limit_s=90)
    assert (third.spare, third.dropped, fourth.spare, fourth.dropped) == ("pages_2", [], "pages_3", [])
    assert tables == ["pages", "pages_1", "pages_2", "pages_3"]


def test_a_name_that_was_kept_once_is_not_kept_again(schedule):
    """The operator has deleted the table since then, and a run has built it again."""

    async def story():
        async with schedule.working():
            await schedule.build("pages_next")
            await schedule.swap()
            async with schedule.acting() as admin:
                await admin.drop()
            await schedule.build("pages_other")
            await schedule.swap()
            async with schedule.acting() as admin:
                assert await admin.drop(keeps_always=True) == "pages_next"
                async with admin.pipeline.ledger.transaction() as transaction:
                    transaction.connection.execute("drop table pages_next")
            await schedule.build("pages_next")
            async with schedule.acting() as admin:
                return (await admin.pipeline.control_store.controls()).kept

    assert run(story(), limit_s=60) == ()


def test_it_does_nothing_before_it_is_due(schedule):
    async def story():
        async with schedule.working():
            await schedule.rebuild(if_older_than_s=3600)
            again = await schedule.rebuild(if_older_than_s=3600)
            return again, await schedule.rebuild(if_older_than_s=again.ended_s_ago)

    again, later = run(story(), limit_s=60)
    assert (again.is_due, again.run.generation, again.target) == (False, 1, "pages_1")
    assert (later.is_due, later.run.generation) == (True, 2)


def test_after_a_crash_it_goes_on_with_the_same_run(schedule):
    """Killed while rows are read, while the target catches up, and right after the swap was asked for."""

    async def story():
        async with schedule.working():
            for stage in (RunState.SCANNING, RunState.CATCHING_UP):
                await killed_at(schedule, lambda run, stage=stage: run.state is stage)
            await killed_at(schedule, lambda run: run.swaps)
            return await schedule.rebuild(if_older_than_s=3600)

    result = run(story(), limit_s=60)
    assert (result.run.generation, result.target) == (1, "pages_1")
    assert swaps(schedule) == [("pages_0", "pages_1")]


async def killed_at(schedule: Schedule, is_there: Callable[[ReindexRun], bool]) -> None:
    """Start the command, and cancel it as soon as it has seen the run there."""
    seen = asyncio.Event()
    command = asyncio.create_task(schedule.rebuild(show=lambda report: seen.set() if is_there(report.run) else None))
    await seen.wait()
    command.cancel()
    with suppress(asyncio.CancelledError):
        await command


def test_two_at_once_follow_the_same_run(schedule):
    async def story():
        async with schedule.working():
            return await asyncio.gather(schedule.rebuild(), schedule.rebuild())

    results = run(story(), limit_s=60)
    assert [(result.run.generation, result.target) for result in results] == [(1, "pages_1")] * 2
    assert swaps(schedule) == [("pages_0", "pages_1")]


def test_a_start_that_was_interrupted_is_finished(schedule, monkeypatch):
    monkeypatch.setattr(full_run, "STARTING_S", 0.5)

    async def story():
        async with schedule.acting() as admin:
            at = await admin.pipeline.admin.now()
            begun = ReindexRun(1, RunState.STARTING, into="pages_1", live="pages_0", started_at=at)
            assert await replace_run(admin.pipeline, None, begun)
        async with schedule.working():
            return await schedule.rebuild()

    result = run(story(), limit_s=60)
    assert (result.run.generation, result.target) == (1, "pages_1")


def test_a_target_that_was_planted_with_a_fault_is_refused_and_the_live_one_stays(schedule):
    async def story():
        async with schedule.working():
            await schedule.build(INTO)
            async with schedule.acting() as admin, admin.pipeline.ledger.transaction() as transaction:
                transaction.connection.execute("delete from pages_1 where key = 'k7'")
            with pytest.raises(AdminError, match=r"refuses pages_1.*pages_0 stays live.*29 in the target, 30 by the"):
                await schedule.rebuild()

    run(story(), limit_s=60)
    assert swaps(schedule) == []


def test_a_line_that_may_hold_after_another_pass_gets_time(schedule):
    """The origin is behind the live target at first: its row comes while the command waits for the gate."""

    async def story():
        async with schedule.working():
            await schedule.app.send("pages", {**schedule.origin.rows["k1"], "v": 2})
            await schedule.until_settled("k1", 2)
            command = asyncio.create_task(schedule.rebuild())
            async with schedule.acting() as admin:
                await schedule.until_stuck(admin)
            schedule.origin.put("k1", 2)
            return await command, await schedule.content()

    result, content = run(story(), limit_s=90)
    assert (result.target, content["k1"]) == ("pages_1", 2)


def test_it_gives_up_when_a_line_does_not_hold_for_too_long(schedule):
    async def story():
        async with schedule.working():
            await schedule.app.send("pages", {**schedule.origin.rows["k1"], "v": 2})
            await schedule.until_settled("k1", 2)
            await schedule.build(INTO)
            async with schedule.acting() as admin:
                await schedule.until_stuck(admin)
            with pytest.raises(AdminError, match=r"the gate refuses pages_1.*lagging: 1 key \(.k1.\)"):
                await schedule.rebuild(patience_s=0.0)

    run(story(), limit_s=60)
    assert swaps(schedule) == []


def test_it_needs_a_worker_and_says_so(schedule):
    async def story():
        async with schedule.acting() as admin:
            started_at = await admin.pipeline.admin.now() - 700
            begun = ReindexRun(1, RunState.SCANNING, into="pages_1", live="pages_0", started_at=started_at)
            assert await replace_run(admin.pipeline, None, begun)
        with pytest.raises(AdminError, match="no worker has taken part in reindex 1 of pages for 70"):
            await schedule.rebuild(patience_s=600.0)

    run(story(), limit_s=60)


def test_what_an_operator_does_meanwhile_ends_it(schedule):
    async def story():
        async with schedule.working():
            await schedule.build(INTO)
            async with schedule.acting() as admin:
                await admin.pause()
                with pytest.raises(AdminError, match="reindex 1 of pages is paused"):
                    await schedule.rebuild()
                await admin.cancel()
            with pytest.raises(AdminError, match="left pages_1 beside the live target; drop it first"):
                await schedule.rebuild(into="")
            result = await schedule.rebuild()
            return result, await schedule.tables()

    result, tables = run(story(), limit_s=60)
    assert (result.run.generation, result.target, result.dropped) == (2, "pages_2", ["pages_1"])
    assert tables == ["pages", "pages_0"]


def test_it_does_not_touch_a_run_of_another_kind(schedule):
    async def story():
        async with schedule.working():
            await schedule.build("other_1")
            with pytest.raises(
                AdminError, match="reindex 1 of pipeline 'pages' is catching up, and one runs at a time"
            ):
                await schedule.rebuild()

    run(story(), limit_s=60)


def test_a_start_that_was_broken_off_is_repeated_only_for_the_same_target(schedule):
    async def story():
        async with schedule.acting() as admin:
            started = ReindexRun(1, into="pages_1", live="pages_0", started_at=await admin.pipeline.admin.now())
            assert await replace_run(admin.pipeline, None, started)
        async with schedule.working():
            with pytest.raises(AdminError, match="reindex 1 of pipeline 'pages' is starting"):
                await schedule.rebuild(into="other_{generation}")
            return await schedule.rebuild()

    result = run(story(), limit_s=60)
    assert (result.run.generation, result.target) == (1, "pages_1")


def test_without_a_target_it_is_a_run_in_place_that_waits(schedule):
    async def story():
        async with schedule.working():
            result = await schedule.rebuild(into="")
            again = await schedule.rebuild(into="", if_older_than_s=3600)
            return result, again, await schedule.content()

    result, again, content = run(story(), limit_s=60)
    assert (result.is_due, result.run.state, result.target, result.swapped) == (True, RunState.COMPLETE, "", "")
    assert not again.is_due
    assert content == dict(sorted(ROWS.items()))
    assert [one.generation for one in schedule.events if isinstance(one, ReindexEnded)] == [1]


def test_a_run_over_some_rows_does_not_count_as_one_over_all(schedule):
    async def story():
        async with schedule.working():
            async with schedule.acting() as admin:
                await admin.start(RunPlan(keys=["k1"], is_checked=False))
                await schedule.until(admin.pipeline, lambda controls: run_of(controls).state is RunState.COMPLETE)
            return await schedule.rebuild(into="", if_older_than_s=3600)

    assert run(story(), limit_s=60).run.generation == 2


def test_a_rollback_counts_as_the_last_run(schedule):
    """An operator who has gone back does not want the same thing again the next night."""

    async def story():
        async with schedule.working():
            await schedule.rebuild()
            await schedule.roll_back()
            return await schedule.rebuild(if_older_than_s=3600)

    result = run(story(), limit_s=60)
    assert (result.is_due, result.target, result.spare) == (False, "pages_0", "pages_1")


def test_keys_that_are_gone_need_the_operator(schedule):
    async def story():
        async with schedule.working():
            for key in ("k1", "k2"):
                await schedule.change(key, 1)
            await schedule.until_settled("k2", 1)
            del schedule.origin.rows["k1"]
            with pytest.raises(AdminError, match="--delete-max 1"):
                await schedule.rebuild()
            async with schedule.acting() as admin:
                await admin.resume(delete_max=1)
            return await schedule.rebuild(), await schedule.content()

    result, content = run(story(), limit_s=60)
    assert result.target == "pages_1"
    assert "k1" not in content and content["k2"] == 1


def test_limits_of_the_plan_reach_the_swap(schedule):
    async def story():
        async with schedule.working():
            return await schedule.rebuild(accept_dead=2, pause_max_s=7.0, sample_keys=9)

    result = run(story(), limit_s=60)
    assert (result.run.accept_dead, result.run.pause_max_s, result.run.sample_keys) == (2, 7.0, 9)
