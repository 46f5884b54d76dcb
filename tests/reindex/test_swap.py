"""A target is built beside the live one, catches up with live changes, and takes its place; and back again."""

import inspect
import itertools
import os

import pytest
from msgspec.structs import replace

from keywise.cli.run_text import run_facts
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Move, ReindexRun, RunState
from keywise.core.entry import LeaseTerms, RefusalReason
from keywise.core.errors import AdminError
from keywise.core.events import SwapRefused, TargetSwapped
from keywise.reindex.barrier import Barrier
from keywise.reindex.gate import Gate
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport
from keywise.reindex.run_state import replace_run
from keywise.reindex.shards import CatchUpProgress
from keywise.reindex.targets import NO_TOKEN
from reindex.catalogue import Catalogue, run_of
from running import run
from servers import shared

_numbers = itertools.count(1)
ROWS = {f"k{number}": 1 for number in range(30)}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))])
def catalogue(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'pages.db'}"
    else:
        url = shared.postgres().create_database(f"swap_{os.getpid()}_{next(_numbers)}")
    return Catalogue(url, f"{url}?table=pages", ROWS)


def test_a_target_built_beside_takes_the_place_of_the_live_one(catalogue):
    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
            await catalogue.build("pages_{generation}")
            await catalogue.change("k1", 2)
            await catalogue.delete("k2", 2)
            await catalogue.until_settled("k2", 2)
            controls = await catalogue.swap()
            await catalogue.change("k3", 3)
            await catalogue.until_settled("k3", 3)
        return controls, await catalogue.content()

    controls, content = run(story())
    assert (run_of(controls).state, controls.target, controls.move) == (RunState.COMPLETE, "pages_1", None)
    assert content == dict(sorted({**ROWS, "k1": 2, "k3": 3}.items() - {("k2", 1)}))
    assert len([one for one in catalogue.events if isinstance(one, TargetSwapped)]) == 1


def test_a_start_whose_target_is_refused_leaves_no_run_behind(catalogue):
    """Otherwise every later start would be refused, because one that was broken off has to be repeated first."""

    async def story():
        async with catalogue.working():
            refused = []
            for into in ("pages", "pages-{generation}"):
                with pytest.raises(AdminError) as caught:
                    await catalogue.build(into)
                refused.append(str(caught.value))
            async with catalogue.acting() as admin:
                store = admin.pipeline.control_store
                first = (await store.controls()).run
                await catalogue.build("pages_{generation}")
                await catalogue.swap()
                await admin.drop()
                before = (await store.controls()).run
                with pytest.raises(AdminError, match="is the live target"):
                    await admin.start(RunPlan(into="pages"))
                return refused, first, before, (await store.controls()).run

    refused, first, before, after = run(story())
    assert ["is the live target" in refused[0], "cannot be the name" in refused[1]] == [True, True]
    assert first is None
    assert before is not None
    assert (before.state, after) == (RunState.COMPLETE, before)


def test_a_rollback_loses_nothing_that_was_written_since_the_swap(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.change("k1", 1)
            await catalogue.build("pages_1")
            await catalogue.swap()
            await catalogue.change("k1", 5)
            await catalogue.delete("k4", 5)
            await catalogue.until_settled("k4", 5)
            controls = await catalogue.roll_back()
        return controls, await catalogue.content()

    controls, content = run(story())
    assert (run_of(controls).state, controls.spare, controls.target_epoch) == (RunState.COMPLETE, "pages_1", 2)
    assert content == dict(sorted(({**ROWS, "k1": 5}).items() - {("k4", 1)}))


def test_a_worker_that_learns_late_of_a_swap_leaves_both_targets_and_the_way_back_alone(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            async with catalogue.acting() as admin:
                before = run_of(await admin.pipeline.control_store.controls())
            await catalogue.swap()
            await catalogue.change("k1", 5)
            await catalogue.until_settled("k1", 5)
            await catalogue.run_late(before)
            controls = await catalogue.roll_back()
        return controls, await catalogue.content()

    controls, content = run(story())
    assert (run_of(controls).state, controls.target) == (RunState.COMPLETE, "pages_0")
    assert content == dict(sorted({**ROWS, "k1": 5}.items()))


def test_a_rollback_goes_to_rows_of_an_earlier_shape(catalogue):
    """The rows of the origin have got another content at the same versions, which is why the target was built again."""

    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
                catalogue.origin.put(key, 1, words="a new field")
            await catalogue.until_settled("k29", 1)
            await catalogue.build("pages_1")
            await catalogue.swap()
            return await catalogue.roll_back()

    controls = run(story())
    assert [one.cause for one in catalogue.events if isinstance(one, SwapRefused)] == []
    assert (run_of(controls).state, controls.target) == (RunState.COMPLETE, "pages_0")


def test_a_rollback_to_a_target_with_a_missing_or_an_older_row_is_refused_by_name(catalogue):
    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 2)
            await catalogue.until_settled("k29", 2)
            await catalogue.build("pages_1")
            await catalogue.swap()
            for statement in (
                "delete from pages_0 where key = 'k7'",
                "update pages_0 set version = 1 where key = 'k8'",
            ):
                async with catalogue.acting() as admin, admin.pipeline.ledger.transaction() as transaction:
                    done = transaction.connection.execute(statement)
                    if inspect.isawaitable(done):
                        await done
            controls = await catalogue.roll_back()
            async with catalogue.acting() as admin:
                return controls, await admin.verify()

    controls, gate = run(story())
    assert (run_of(controls).state, controls.target) == (RunState.CATCHING_UP, "pages_1")
    keys, sample = gate.failing
    assert keys.value == "29 in the target, 30 by the ledger"
    assert "'k7' (missing)" in sample.value and "'k8' (older)" in sample.value


def test_a_target_with_a_missing_or_an_older_row_is_refused_by_name(catalogue):
    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 2)
            await catalogue.build("pages_1")
            for statement in (
                "delete from pages_1 where key = 'k7'",
                "update pages_1 set version = 1 where key = 'k8'",
            ):
                async with catalogue.acting() as admin, admin.pipeline.ledger.transaction() as transaction:
                    done = transaction.connection.execute(statement)
                    if inspect.isawaitable(done):
                        await done
            controls = await catalogue.swap()
            async with catalogue.acting() as admin:
                return controls, await admin.verify()

    controls, gate = run(story())
    [refused] = [one for one in catalogue.events if isinstance(one, SwapRefused)]
    assert (run_of(controls).state, controls.target) == (RunState.CATCHING_UP, "")
    assert "29 in the target, 30 by the ledger" in refused.cause
    assert gate.is_refused
    _, sample = gate.failing
    assert "'k7' (missing)" in sample.value and "'k8' (older)" in sample.value


def test_the_worker_compares_the_sample_that_the_swap_asks_for(catalogue):
    """A wrong row that was found with all keys must not go live because the swap looks at 500 of them."""
    samples = []

    async def counted(keys):
        samples.append(len(keys))

    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
            await catalogue.until_empty()
            await catalogue.build("pages_1")
            catalogue.origin.before_fetch = counted
            await catalogue.swap(sample_keys=7)
            asked, samples[:] = set(samples), []
            async with catalogue.acting() as admin:
                await admin.rollback(sample_keys=3)
                await catalogue.until(admin.pipeline, lambda controls: not run_of(controls).swaps)
            return asked, set(samples)

    assert run(story()) == ({7}, {3})


def test_a_wrong_row_says_that_a_swap_compares_a_sample_of_its_own(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            async with catalogue.acting() as admin:
                async with admin.pipeline.ledger.transaction() as transaction:
                    done = transaction.connection.execute("update pages_1 set version = 0 where key = 'k8'")
                    if inspect.isawaitable(done):
                        await done
                failing = {line.name: line.text for line in (await admin.verify(2**62)).failing}
                return failing["sample"], (await admin.pipeline.control_store.controls()).run

    text, going = run(story())
    assert "a swap compares a sample of its own, of 500 keys unless --sample says how many" in text
    assert going.sample_keys == 500, "a verification is not remembered"


def test_only_a_swap_that_was_called_off_reads_like_a_try():
    other = CatchUpProgress(passes=1, seconds=4.4, unwritten=2, refused=("called off: k1 lags", "pause: about 8.8 s"))
    going = ReindexRun(1, RunState.CATCHING_UP, into="pages_1", live="pages_0", swaps=True)
    shown = run_facts("pages", RunReport(going, 1, 0, {}, None, 60.0, catch_up=other))
    assert ("tried again", "called off: k1 lags") in shown
    assert ("waiting for the gate", "pause: about 8.8 s") in shown


@pytest.mark.parametrize("is_rollback", [False, True])
def test_a_rollback_gets_no_advice_that_it_cannot_follow(tmp_path, is_rollback):
    async def story():
        async with catalogue.acting() as admin:
            gate = Gate(admin.pipeline, admin.pipeline, catalogue.origin, 5)
            going = ReindexRun(1, RunState.CATCHING_UP, into="pages_1", live="pages_0", is_rollback=is_rollback)
            last = CatchUpProgress(passes=1, seconds=4.4, unwritten=2, failed={"k1": "the claim has ended"})
            return {
                line.name: line.text for line in gate._passes(RunReport(going, 1, 0, {}, None, 60.0, catch_up=last))
            }

    url = f"sqlite:///{tmp_path / 'pages.db'}"
    catalogue = Catalogue(url, f"{url}?table=pages", ROWS)
    lines = run(story())
    assert lines["pause"] == "pause: about 8.8 s, and changes may wait 5 s; allow more with --pause-max"
    assert ("--accept-dead" in lines["not written"]) is not is_rollback


def test_a_worker_that_was_stopped_cannot_write_into_a_new_target_with_the_name_of_a_dropped_one(catalogue):
    """It filled the dropped target, and goes on in the scope of that one."""

    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            async with catalogue.acting() as admin:
                await admin.cancel()
                await admin.drop()
            await catalogue.build("pages_1")
            async with catalogue.acting() as admin:
                assert admin.pipeline.open_target is not None
                async with admin.pipeline.open_target("pages_1", 1) as late:
                    terms = LeaseTerms("a worker that was stopped", 2.0)
                    return await late.ledger.claim([ChangeHeader("k1", order_of(1))], terms)

    results = run(story())
    assert not results.granted and results.refused["k1"].reason is RefusalReason.PAUSED


def test_no_rollback_begins_to_a_target_whose_drop_was_killed(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            controls = await catalogue.swap()
        async with catalogue.acting() as admin:
            spare = controls.spare
            async with admin.pipeline.open_target(spare, controls.spare_generation) as other:
                # As far as the killed command came: nothing is claimed in its scope any more.
                before = await other.control_store.controls()
                closed = replace(before, move=Move(spare, spare, NO_TOKEN))
                assert await other.control_store.replace_controls(before, closed)
            with pytest.raises(AdminError, match=f"a drop of {spare} was interrupted"):
                await admin.rollback()
            return spare, await admin.drop()

    spare, dropped = run(story())
    assert spare == dropped != ""


def test_no_run_begins_behind_the_barrier_of_one_that_was_ended(catalogue):
    """Workers look after the barrier of the run that is stored, so nobody would lift it."""

    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            await catalogue.swap()
        async with catalogue.acting() as admin:
            store = admin.pipeline.control_store
            back = await admin.rollback()
            raised = replace(before := await store.controls(), move=Move(back.live, back.into, 1))
            assert await store.replace_controls(before, raised)
            await admin.cancel()
            for begin in (lambda: admin.start(RunPlan(is_checked=False)), admin.rollback, admin.drop):
                with pytest.raises(AdminError, match="the barrier of the last swap is still up; a worker lifts it"):
                    await begin()

    run(story())


def test_a_run_is_not_cancelled_once_the_store_was_asked_to_move_the_name(catalogue):
    """The worker may note that just before the cancellation is stored."""

    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
        async with catalogue.acting() as admin:
            store = admin.pipeline.control_store
            going = (before := await store.controls()).run
            called = replace(before, move=Move(going.live, going.into, 1, is_called=True))
            assert await store.replace_controls(before, called)
            with pytest.raises(AdminError, match="the swap to pages_1 can no longer be called off"):
                await replace_run(admin.pipeline, going, replace(going, state=RunState.CANCELLED))
            assert (await store.controls()).run == going

    run(story())


def test_no_barrier_is_raised_for_a_run_that_was_ended(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
        async with catalogue.acting() as admin:
            pipeline = admin.pipeline
            ended = await admin.cancel()
            async with pipeline.open_target(ended.into, ended.generation) as other:
                return await Barrier(pipeline, other, 1).set_live(ended.live, ended.into)

    assert run(story()).move is None


def test_the_old_target_is_dropped_with_its_scope_and_then_there_is_no_way_back(catalogue):
    async def story():
        async with catalogue.working():
            await catalogue.build("pages_1")
            await catalogue.swap()
            async with catalogue.acting() as admin:
                with pytest.raises(AdminError, match="can still go back to pages_0"):
                    await catalogue.build("pages_2")
                assert await admin.drop() == "pages_0"
                with pytest.raises(AdminError, match="no target to go back to"):
                    await admin.rollback()

    run(story())
