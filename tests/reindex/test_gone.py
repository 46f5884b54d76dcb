"""Keys that the origin does not have any more: believed twice, deleted within limits, and else a question."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.core import events
from keywise.core.controls import RunState
from keywise.core.errors import AdminError
from reindex.reindex_rig import Catalogue, Works, row
from running import run

KEYS = [f"k{number:03d}" for number in range(150)]
FEW = KEYS[:10]


async def filled(works: Works, keys: Sequence[str]) -> None:
    await works.handles(*(row(key, 1) for key in keys))


def test_a_hundredth_of_the_keys_is_deleted_without_a_question(tmp_path: Path):
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in KEYS[1:])))

    async def story() -> None:
        await filled(works, KEYS)
        report = await works.runs()
        assert (report.run.state, report.swept["gone"], report.gone) == (RunState.COMPLETE, 1, 0)
        assert works.content() == dict.fromkeys(KEYS[1:], 1)
        [ended] = works.emitted(events.ReindexEnded)
        assert ended.gone == 1
        await works.handles(row("k000", 1))
        assert "k000" not in works.content(), "its old messages are stale"
        await works.handles(row("k000", 2))
        assert works.content()["k000"] == 2

    run(story(), limit_s=60)


def test_more_are_a_question_and_nothing_is_deleted_before_the_answer(tmp_path: Path):
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in KEYS[2:])))

    async def story() -> None:
        await filled(works, KEYS)
        report = await works.runs()
        assert (report.run.state, report.gone, len(works.content())) == (RunState.SWEEPING, 2, 150)
        [held] = works.emitted(events.SweepHeld)
        assert (held.keys, held.delete_max) == (2, 1)
        for allowed in (None, 1):
            with pytest.raises(
                AdminError,
                match=r"2 keys are gone from the origin, more .* allow it with --delete-max 2, or end the run",
            ):
                await works.resume(allowed)
        await works.resume(2)
        report = await works.work_until_ended()
        assert (report.run.state, report.swept["gone"]) == (RunState.COMPLETE, 2)
        assert works.content() == dict.fromkeys(KEYS[2:], 1)

    run(story(), limit_s=60)


def test_an_operator_who_does_not_agree_cancels_and_every_key_stays(tmp_path: Path):
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in FEW[:5])))

    async def story() -> None:
        await filled(works, FEW)
        assert (await works.runs(delete_max=4)).gone == 5
        await works.cancel()
        assert works.content() == dict.fromkeys(FEW, 1)

    run(story(), limit_s=60)


def test_a_key_that_is_back_when_it_is_asked_for_again_stays(tmp_path: Path):
    """The origin was being restored, for example."""
    origin = Catalogue(*(row(key, 1) for key in FEW[1:]))
    works = Works(tmp_path, origin)

    async def before_fetch(keys: Sequence[str]) -> None:
        if origin.fetched:
            origin.put(row("k000", 1))

    async def story() -> None:
        await filled(works, FEW)
        origin.before_fetch = before_fetch
        report = await works.runs(delete_max=1, is_checked=False)
        assert origin.fetched == [["k000"], ["k000"]], "it was asked for twice"
        assert (report.run.state, report.swept.get("gone", 0)) == (RunState.COMPLETE, 0)
        assert works.content() == dict.fromkeys(FEW, 1)

    run(story(), limit_s=60)


def test_a_key_that_has_moved_between_the_two_questions_stays(tmp_path: Path):
    """Its row is not committed yet, or the origin is behind."""
    origin = Catalogue(*(row(key, 1) for key in FEW[1:]))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await filled(works, FEW)
        async with works.working() as working:

            async def before_fetch(keys: Sequence[str]) -> None:
                if len(origin.fetched) == 1:
                    await works.app.send("shop", row("k000", 2))
                    await working.until_empty()

            origin.before_fetch = before_fetch
            await works.start(delete_max=1, is_checked=False)
            report = await working.until_ended()
        assert len(origin.fetched) == 2
        assert (report.run.state, report.swept["stale"]) == (RunState.COMPLETE, 1)
        assert works.content() == dict.fromkeys(FEW, 1) | {"k000": 2}

    run(story(), limit_s=60)


def test_an_origin_that_may_lag_deletes_nothing(tmp_path: Path):
    origin = Catalogue(*(row(key, 1) for key in FEW[1:]))
    origin.is_consistent = False
    works = Works(tmp_path, origin)

    async def story() -> None:
        await filled(works, FEW)
        report = await works.runs(delete_max=1)
        assert (report.run.state, report.swept) == (RunState.COMPLETE, {"lagging": 1})
        assert works.content() == dict.fromkeys(FEW, 1)

    run(story(), limit_s=60)


def test_what_an_operator_has_removed_stays_removed_unless_the_operator_says_else(tmp_path: Path):
    works = Works(tmp_path, Catalogue(*(row(key, 1) for key in FEW)))

    async def story() -> None:
        await filled(works, FEW)
        await works.remove("k000", "k001")
        for _ in range(2):
            report = await works.runs()
            assert report.counts == {"read": 10, "applied": 8, "removed": 2}
            assert works.content() == dict.fromkeys(FEW[2:], 1)
        works.origin.put(row("k001", 2))
        report = await works.runs()
        assert works.content() == dict.fromkeys(FEW[2:], 1) | {"k001": 2}, "its next version brings it back"
        report = await works.runs(also_removed=True)
        assert report.counts == {"read": 10, "applied": 10}
        assert works.content() == dict.fromkeys(FEW, 1) | {"k001": 2}

    run(story(), limit_s=60)
