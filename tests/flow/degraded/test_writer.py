"""While the ledger is down, wait holds everything and write-anyway writes what it has noted; then all is put right."""

from typing import Any

import pytest

from flow.degraded.outage_rig import Outage, body
from flow.rig import LEASED_CONDITIONAL, Running
from keywise import App, Change, Claim
from keywise.core import events
from keywise.core.controls import Pause
from keywise.core.errors import SettingsError
from keywise.core.limits import Rate
from keywise.flow.degraded.worker import CAUSE
from running import run


@pytest.mark.parametrize("work", [True, False])
def test_a_pipeline_is_told_what_it_cannot_do_without_its_ledger(tmp_path, work):
    app = App("memory://")
    settings = {"key": "id", "on_ledger_down": "write-anyway", "journal": str(tmp_path / "journal")}
    app.pipeline("atomic", **settings).source("memory://").sink("memory://?grade=atomic")
    claimed = app.pipeline("claimed", **settings).source("memory://")
    plain = app.pipeline("plain", **settings).source("memory://")

    @claimed.apply
    def with_claim(change: Change[Any], claim: Claim) -> None: ...

    @plain.apply
    def without(change: Change[Any]) -> None: ...

    async def journal_store_of(name: str) -> Any:
        async with app.open(name, work=work) as pipeline:
            return pipeline.journal_store

    with pytest.raises(SettingsError, match="its sink is in the ledger's database"):
        run(journal_store_of("atomic"))
    with pytest.raises(SettingsError, match="asks for the claim"):
        run(journal_store_of("claimed"))
    assert (run(journal_store_of("plain")) is not None, (tmp_path / "journal").is_dir()) == (work, work)


def test_wait_holds_everything_and_costs_nothing():
    outage = Outage("wait")
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            await rig.send(body("a", 1), body("b", 1))
            await rig.pass_s(600.0)
            assert (rig.written, len(rig.queue)) == ([], 2)
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert sorted(rig.written) == [("a", 1), ("b", 1)]
    [down], [back] = rig.of(events.LedgerDown), rig.of(events.LedgerBack)
    assert (down.mode, down.cause, down.since) == ("wait", "the ledger is away", back.since)
    assert back.seconds >= 600
    assert (rig.of(events.Failed), rig.letters) == ([], [])


def test_an_outage_costs_a_running_change_no_attempt():
    outage = Outage("wait", attempts_max=1)
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(1.0)
            outage.ledger.only = ("renew", "claim", "commit", "controls")
            rig.sink.behaviour = go_away
            await rig.send(body("a", 1))
            await rig.until(lambda: len(rig.sink.tries) == 1)
            await rig.pass_s(200.0)
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    async def go_away(change: Any) -> None:
        if len(rig.sink.tries) == 1:
            outage.ledger.is_away = True
            await rig.pass_s(100.0)

    rig.play(story())
    assert (rig.written, rig.letters, rig.of(events.Failed)) == ([("a", 1)], [], [])


def test_write_anyway_notes_writes_acks_and_makes_suspect():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await rig.send(body("a", 5))
            await rig.until(lambda: not rig.queue)
            await outage.goes_down()
            await rig.send(body("a", 4), body("b", 1, gone=True))
            await rig.until(lambda: not rig.queue)
            [sheet] = outage.paper.sheets
            assert sheet.contents().headers.keys() == {"a", "b"}
            assert sheet.contents().since == rig.of(events.LedgerDown)[0].since
            assert rig.stored == {"a": 4}
            outage.truth["a"] = b'{"id": "a", "v": 5}'
            outage.comes_back()
            await rig.until(lambda: rig.of(events.MarkedSuspect))
            assert (outage.suspicions("a"), outage.suspicions("b"), outage.paper.sheets) == (1, 1, [])
            await rig.until(lambda: not outage.suspicions("a") and not outage.suspicions("b"))

    rig.play(story())
    assert rig.stored == {"a": 5}
    assert [line.split(" ")[0] for line in outage.paper.log] == ["durably", "soon"]
    assert rig.of(events.MarkedSuspect)[0].keys == 2
    assert rig.outcomes["applied"] == 3


def test_a_conditional_sink_stays_right_and_has_no_suspects():
    outage = Outage(way=LEASED_CONDITIONAL)
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await rig.send(body("a", 5))
            await rig.until(lambda: not rig.queue)
            await outage.goes_down()
            await rig.send(body("a", 4), body("b", 2))
            await rig.until(lambda: not rig.queue)
            outage.comes_back()
            await rig.until(lambda: not outage.paper.sheets)

    rig.play(story())
    assert (rig.stored, outage.suspicions("a")) == ({"a": 5, "b": 2}, 0)
    assert rig.outcomes["superseded"] == 1


def test_the_newest_goes_first_and_its_followers_end_with_it():
    outage = Outage(concurrency=1)
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            await rig.send(*(body("a", version) for version in (2, 3, 1)))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert (rig.written, rig.outcomes) == ([("a", 3)], {"applied": 1, "superseded": 2})


def test_a_pause_that_was_seen_is_heeded_without_the_ledger():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        await rig.ledger.pause(Pause("a"))
        async with Running(rig):
            await rig.pass_s(2.0)
            await outage.goes_down()
            await rig.send(body("a", 1), body("b", 1))
            await rig.pass_s(60.0)
            assert rig.stored == {"b": 1}

    rig.play(story())
    assert len(rig.queue) == 1


def test_a_rate_is_kept_by_each_worker_alone():
    outage = Outage()
    rig = outage.rig
    rig.more["rate"] = Rate(1, per="10s")

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            for version in (1, 2, 3):
                await rig.send(body("a", version))
                await rig.until(lambda: rig.stored.get("a") == version)  # noqa: B023
        assert rig.sink.tries[2][0] - rig.sink.tries[0][0] >= 20.0

    rig.play(story())


def test_more_keys_than_can_be_noted_make_a_full_resync_due():
    outage = Outage(journal_keys_max=2)
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            await rig.send(*(body(key, 1) for key in "abcd"))
            await rig.until(lambda: not rig.queue)
            await rig.send(body("a", 2), body("d", 2))
            await rig.until(lambda: not rig.queue)
            outage.comes_back()
            await rig.until(lambda: rig.ledger.working_set.controls.resync_at)

    rig.play(story())
    assert [event.cause for event in rig.of(events.Alarmed)] == [CAUSE]
    assert rig.stored == {"a": 2, "b": 1, "c": 1, "d": 2}
    assert sum(outage.suspicions(key) for key in "abcd") == 2


def test_it_is_said_at_start_that_nobody_repairs():
    outage = Outage()
    outage.rig.refetch = None
    outage.rig.run(body("a", 1))
    assert len(outage.rig.of(events.Unrepairable)) == 1


def test_one_lost_connection_is_no_outage():
    outage = Outage()
    rig = outage.rig

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(1.0)
            outage.ledger.is_away = True
            await rig.send(body("a", 1))
            await rig.pass_s(4.0)
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert (rig.of(events.LedgerDown), rig.of(events.LedgerBack), outage.paper.log) == ([], [], [])
