"""Numbering that restarted is noticed by what it does: nearly everything that is new is stale."""

from keywise.core import events
from keywise.core.change import Outcome
from keywise.observe.alarms import (
    AGAIN_S,
    CLEARED_MIN,
    FIRSTS_ENOUGH,
    FIRSTS_MIN,
    WINDOW_S,
    LedgerLossAlarm,
    RenumberingAlarm,
)


class Bench:
    """What is counted, and what is said about it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.renumbering_alarm = RenumberingAlarm()

    def settle(self, outcome: Outcome, firsts: int, changes: int | None = None) -> None:
        changes = firsts if changes is None else changes
        settled = events.Settled(pipeline="p", outcome=outcome, changes=changes, firsts=firsts)
        self.renumbering_alarm.count(settled, self.now)

    def said(self) -> str | None:
        event = self.renumbering_alarm.look("p", self.now)
        return None if event is None else type(event).__name__


def test_an_alarm_is_raised_when_nearly_everything_new_is_stale():
    bench = Bench()
    bench.settle(Outcome.STALE, FIRSTS_MIN - 1)
    assert bench.said() is None, "that may be chance"
    bench.settle(Outcome.STALE, 1)
    assert bench.said() == "Alarmed"


def test_the_advice_names_the_commands():
    bench = Bench()
    bench.settle(Outcome.STALE, FIRSTS_MIN)
    event = bench.renumbering_alarm.look("p", 0.0)
    assert isinstance(event, events.Alarmed)
    for command in ("keywise pause --all", "keywise reset --era", "keywise resume --all"):
        assert command in event.advice


def test_some_stale_changes_are_nothing_to_say():
    bench = Bench()
    bench.settle(Outcome.STALE, 940)
    bench.settle(Outcome.APPLIED, 60)
    assert bench.said() is None


def test_duplicates_superseded_ones_and_redeliveries_do_not_count():
    bench = Bench()
    bench.settle(Outcome.DUPLICATE, 1000)
    bench.settle(Outcome.SUPERSEDED, 1000)
    bench.settle(Outcome.STALE, 0, changes=1000)
    assert bench.said() is None


def test_what_is_long_ago_does_not_count():
    bench = Bench()
    bench.settle(Outcome.STALE, FIRSTS_MIN - 1)
    bench.now += WINDOW_S
    bench.settle(Outcome.STALE, 1)
    assert bench.said() is None


def test_a_busy_pipeline_notices_it_as_soon_as_a_quiet_one():
    bench = Bench()
    for _ in range(1000):
        bench.settle(Outcome.APPLIED, 1000)
    bench.settle(Outcome.STALE, FIRSTS_ENOUGH)
    assert bench.said() == "Alarmed"


def test_an_alarm_is_said_again_after_some_minutes_and_not_before():
    bench = Bench()
    said = []
    for _ in range(int(2.5 * AGAIN_S)):
        bench.settle(Outcome.STALE, 200)
        said.append(bench.said())
        bench.now += 1.0
    assert said.count("Alarmed") == 3


def test_an_alarm_is_over_when_changes_are_applied_again():
    bench = Bench()
    bench.settle(Outcome.STALE, FIRSTS_MIN)
    assert bench.said() == "Alarmed"
    bench.settle(Outcome.APPLIED, CLEARED_MIN - 1)
    assert bench.said() is None, "that may be chance"
    bench.settle(Outcome.STALE, CLEARED_MIN)
    assert bench.said() is None, "half of them are no end"
    bench.settle(Outcome.APPLIED, CLEARED_MIN)
    assert [bench.said(), bench.said()] == ["AlarmCleared", None]
    bench.now += WINDOW_S
    bench.settle(Outcome.STALE, FIRSTS_MIN)
    assert bench.said() == "Alarmed", "the next one is said at once"


def test_silence_is_no_end_and_nothing_to_repeat():
    bench = Bench()
    bench.settle(Outcome.STALE, 2 * FIRSTS_MIN)
    assert bench.said() == "Alarmed"
    bench.now += AGAIN_S + 1.0
    assert bench.said() is None, "an operator may have paused it meanwhile"
    bench.now += 10 * WINDOW_S
    assert bench.said() is None


def test_each_loss_of_a_ledger_is_told_once():
    alarm = LedgerLossAlarm()
    assert alarm.look("p", 0) is None
    event = alarm.look("p", 2)
    assert isinstance(event, events.Alarmed)
    assert "send everything again" in event.advice
    assert alarm.look("p", 2) is None
    assert alarm.look("p", 3) is not None
