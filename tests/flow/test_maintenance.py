"""A consumer writes its history while it works and when it stops, and tidies up in turns with others."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from flow.rig import WAYS, Rig, Running
from keywise.core import events
from keywise.core.controls import Controls, ReindexRun, RunState
from keywise.core.errors import UnavailableError
from keywise.observe.history import HistoryRecorder


def rig_with_history(way: str = "leased", **settings: Any) -> Rig:
    rig = Rig(way, **settings)
    rig.more["reporters"] = [HistoryRecorder("w1", keeps=rig.settings.history, clock=rig.loop.time)]
    return rig


def lines(rig: Rig) -> list[tuple[str, str, int | None]]:
    """The history, oldest first."""
    kept = sorted(rig.database.scope("test").lines.items())
    return [(line.what, line.key, line.version) for _, line in kept]


@pytest.mark.parametrize("way", WAYS)
def test_refused_versions_are_in_the_history_after_a_run(way):
    rig = rig_with_history(way)
    rig.run({"id": "a", "v": 5})
    rig.run({"id": "a", "v": 3}, {"id": "b", "v": 1})
    assert lines(rig) == [("stale", "a", 3)]


@pytest.mark.parametrize("way", WAYS)
def test_every_application_is_kept_if_all_is(way):
    rig = rig_with_history(way, history="all")
    rig.run({"id": "a", "v": 5}, {"id": "b", "v": 1})
    assert sorted(lines(rig)) == [("applied", "a", 5), ("applied", "b", 1)]


def test_only_failures_are_told_by_default():
    rig = rig_with_history(attempts_max=2)
    tries: list[int] = []

    def behave(change: Any) -> None:
        tries.append(change.version)
        if len(tries) == 1:
            raise ValueError("first")

    rig.sink.behaviour = behave
    rig.run({"id": "a", "v": 1})
    assert [line for line in lines(rig) if line[0] != "waits"] == [("failed", "a", 1)]


def test_lines_are_written_while_the_consumer_works():
    rig = rig_with_history()

    async def story() -> None:
        await rig.work({"id": "a", "v": 5})
        await rig.send({"id": "a", "v": 4})
        async with Running(rig):
            await rig.until(lambda: lines(rig), limit_s=5.0)

    rig.play(story())


def test_a_ledger_that_cannot_be_reached_only_delays_the_history():
    rig = rig_with_history()

    class Cut:
        until = 20.0

        async def record(self, some: Any) -> None:
            if rig.loop.time() < self.until:
                raise UnavailableError("cut off")
            await rig.ledger.record(some)

        async def trim(self, age_s: float, records_max: int) -> int:
            return 0

    rig.more["history_store"] = Cut()

    async def story() -> None:
        await rig.work({"id": "a", "v": 5})
        await rig.send({"id": "a", "v": 4})
        async with Running(rig):
            await rig.until(lambda: lines(rig), limit_s=60.0)

    rig.play(story())
    assert lines(rig) == [("stale", "a", 4)]
    assert rig.loop.time() >= Cut.until


def test_keys_are_pruned_when_a_retention_is_declared():
    rig = rig_with_history(retention_s=400.0, maintenance_s=60.0)

    async def story() -> None:
        await rig.work({"id": "a", "v": 5})
        async with Running(rig):
            await rig.until(lambda: rig.entry("a") is None, limit_s=2000.0)

    rig.play(story())
    assert [event.keys for event in rig.of(events.Pruned)] == [1]
    assert lines(rig) == [("pruned", "", None)]
    assert 700.0 < rig.loop.time() < 900.0, "retention and redelivery have passed, and not much more"


def test_nothing_is_pruned_while_another_target_is_built_beside():
    """A key that one of the two targets forgets would look as if it were missing there."""
    rig = rig_with_history(retention_s=400.0, maintenance_s=60.0)
    run = ReindexRun(7, RunState.CATCHING_UP, into="pages-7")

    async def story() -> None:
        await rig.work({"id": "a", "v": 5})
        assert await rig.ledger.replace_controls(Controls(), Controls(run=run))
        async with Running(rig):
            await rig.pass_s(3000.0)
            assert rig.entry("a") is not None
            complete = Controls(run=replace(run, state=RunState.COMPLETE))
            assert await rig.ledger.replace_controls(Controls(run=run), complete)
            await rig.until(lambda: rig.entry("a") is None, limit_s=100.0)

    rig.play(story())


def test_nothing_is_pruned_without_a_retention():
    rig = rig_with_history()

    async def story() -> None:
        await rig.work({"id": "a", "v": 5})
        async with Running(rig):
            await rig.pass_s(3000.0)

    rig.play(story())
    assert rig.entry("a") is not None


def test_the_history_is_trimmed_by_age_and_count():
    rig = rig_with_history(history_age_s=500.0, history_lines_max=3, maintenance_s=60.0)

    async def story() -> None:
        await rig.work({"id": "a", "v": 9})
        for version in range(6):
            await rig.work({"id": "a", "v": version})
        async with Running(rig):
            await rig.until(lambda: len(lines(rig)) == 3, limit_s=100.0)
            assert lines(rig) == [("stale", "a", version) for version in (3, 4, 5)]
            await rig.until(lambda: not lines(rig), limit_s=700.0)

    rig.play(story())
    assert rig.loop.time() > 500.0


def test_two_consumers_share_the_maintenance():
    rig = rig_with_history(maintenance_s=60.0)
    trims: list[float] = []

    class Counted:
        async def record(self, some: Any) -> None: ...

        async def trim(self, age_s: float, records_max: int) -> int:
            trims.append(rig.loop.time())
            return 0

    rig.more["history_store"] = Counted()

    async def story() -> None:
        async with Running(rig, "w1"), Running(rig, "w2"):
            await rig.pass_s(599.0)

    rig.play(story())
    assert 8 <= len(trims) <= 10
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(trims))


def test_maintenance_goes_on_after_an_outage():
    rig = rig_with_history(maintenance_s=60.0)
    asked: list[str] = []

    class Cut:
        async def controls(self) -> Any:
            return await rig.ledger.controls()

        async def acquire(self, task: str, every_s: float) -> bool:
            asked.append(task)
            raise UnavailableError("cut off")

    rig.more["control_store"] = Cut()

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(170.0)

    rig.play(story())
    assert asked == ["trim history"] * 3
    assert {event.what for event in rig.of(events.Unavailable)} == {"maintenance"}


def test_numbering_that_restarts_is_noticed_and_its_end_too():
    rig = rig_with_history()
    keys = [f"k{number}" for number in range(120)]

    async def story() -> None:
        await rig.work(*({"id": key, "v": 1000} for key in keys))
        async with Running(rig):
            await rig.pass_s(700.0)
            await rig.send(*({"id": key, "v": 1} for key in keys))
            await rig.until(lambda: rig.of(events.Alarmed), limit_s=10.0)
            await rig.send(*({"id": key, "v": 2000} for key in keys))
            await rig.send(*({"id": f"new {key}", "v": 1} for key in keys))
            await rig.until(lambda: rig.of(events.AlarmCleared), limit_s=10.0)

    rig.play(story())
    assert [what for what, _, _ in lines(rig) if what.startswith("alarm")] == ["alarm", "alarm over"]
