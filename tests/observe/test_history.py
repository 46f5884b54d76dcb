"""The history tells what an operator will ask for, costs little in a flood, and loses nothing without saying so."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core import events
from keywise.core.change import Change, Outcome, order_of
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import UnavailableError
from keywise.core.history import HistoryRecord
from keywise.observe.history import LINES_MAX, REFUSALS_MAX, REFUSALS_PER_S, WAIT_AGAIN_S, HistoryRecorder
from keywise.operate.inspect import active_alarm

STORE_AHEAD_S = 1000.0


class Bench:
    """A history on a clock that a test moves, and the ledger that it is written to."""

    def __init__(self, keeps: str = "events") -> None:
        self.now = 50.0
        self.history = HistoryRecorder("w1", keeps=keeps, clock=lambda: self.now)
        self.ledger = Reachable(MemoryDatabase(clock=lambda: self.now + STORE_AHEAD_S), "test", LedgerPolicy())

    def settle(self, outcome: Outcome, *versions: int | None, key: str = "a", deleted: bool = False) -> None:
        headers = [Change(key, order_of(version), deleted) for version in versions]
        self.history(events.Settled(pipeline="p", outcome=outcome, changes=len(headers), headers=headers))

    def wait(self, key: str, answer: str) -> None:
        self.history(events.Refused(pipeline="p", key=key, version=1, reason=answer, wait_s=1.0))

    def flushed(self, *, is_last: bool = False) -> list[HistoryRecord]:
        """What is written from now on, oldest first."""
        self.ledger.written.clear()
        asyncio.run(self.history.flush(self.ledger, self.ledger, is_last=is_last))
        return list(self.ledger.written)


class Reachable(MemoryLedger):
    """A ledger that can be cut off."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.is_cut = False
        self.writes = 0
        self.written: list[HistoryRecord] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def record(self, lines: Sequence[HistoryRecord]) -> None:
        self.writes += 1
        self.meanwhile()
        if self.is_cut:
            raise UnavailableError("cut off")
        self.written += lines


def told(lines: list[HistoryRecord]) -> list[tuple[str, str, int | None]]:
    return [(line.what, line.key, line.version) for line in lines]


def test_a_row_of_a_removed_key_is_not_recorded_as_a_removal():
    bench = Bench()
    bench.settle(Outcome.REMOVED, 5)
    assert [(line.what, line.version) for line in bench.flushed()] == [("kept removed", 5)]


@pytest.mark.parametrize("outcome", [Outcome.STALE, Outcome.DUPLICATE, Outcome.SUPERSEDED])
def test_refused_versions_are_told_one_by_one(outcome):
    bench = Bench()
    bench.settle(outcome, 3, None, -4, deleted=True)
    lines = bench.flushed()
    assert told(lines) == [(outcome.value, "a", 3), (outcome.value, "a", None), (outcome.value, "a", -4)]
    assert {(line.by, line.detail) for line in lines} == {("w1", "a deletion")}


def test_lines_have_the_time_of_the_store_when_they_happened():
    bench = Bench()
    bench.settle(Outcome.STALE, 1)
    bench.now += 7.0
    bench.settle(Outcome.STALE, 2)
    bench.now += 3.0
    assert [line.at for line in bench.flushed()] == [STORE_AHEAD_S + 50.0, STORE_AHEAD_S + 57.0]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            events.Failed(pipeline="p", key="a", version=2, cause="no\0\udcff", attempts=3, retry_s=1.25),
            ("failed", "a", 2, "attempt 3, again in 1.25 s: no\\x00\\udcff"),
        ),
        (events.DeadLettered(pipeline="p", key="a", version=2, cause="bad"), ("dead letter", "a", 2, "bad")),
        (events.TookOver(pipeline="p", key="a", version=2, crashes=0), ("taken over", "a", 2, "")),
        (
            events.TookOver(pipeline="p", key="a", version=2, crashes=1),
            ("taken over", "a", 2, "1 worker died alone with it"),
        ),
        (
            events.TookOver(pipeline="p", key="a", version=2, crashes=2),
            ("taken over", "a", 2, "2 workers died alone with it"),
        ),
        (events.ClaimLost(pipeline="p", key="a"), ("claim lost", "a", None, "")),
        (events.Snoozed(pipeline="p", key="a", version=2, wait_s=5.0), ("snoozed", "a", 2, "for 5 s")),
        (events.Repaired(pipeline="p", key="a"), ("repaired", "a", None, "")),
        (events.Paused(pipeline="p"), ("pause seen", "", None, "")),
        (events.Resumed(pipeline="p"), ("resume seen", "", None, "")),
        (
            events.LedgerDown(pipeline="p", since=1.0, cause="no\0", mode="wait"),
            ("ledger down", "", None, "wait: no\\x00"),
        ),
        (events.LedgerBack(pipeline="p", since=1.0, seconds=61.2), ("ledger back", "", None, "after 61 s")),
        (
            events.MarkedSuspect(pipeline="p", keys=1234),
            ("marked suspect", "", None, "1,234 keys were written without the ledger"),
        ),
        (events.Pruned(pipeline="p", keys=1234), ("pruned", "", None, "1,234 keys")),
        (events.Alarmed(pipeline="p", cause="bad", advice="act"), ("alarm", "", None, "bad; act")),
        (events.AlarmCleared(pipeline="p", cause="good"), ("alarm over", "", None, "good")),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, events.Event) else one[0],
)
def test_what_went_wrong_is_told_unless_nothing_is(event: events.Event, line: tuple[Any, ...]):
    for keeps, wanted in (("events", [line]), ("all", [line]), ("none", [])):
        bench = Bench(keeps)
        bench.history(event)
        assert [(one.what, one.key, one.version, one.detail) for one in bench.flushed()] == wanted


def test_nothing_of_a_change_is_kept_if_nothing_is_to_be_kept():
    bench = Bench("none")
    bench.settle(Outcome.STALE, 1)
    bench.settle(Outcome.APPLIED, 2)
    bench.wait("a", "busy")
    assert bench.flushed(is_last=True) == []


def test_a_dead_letter_is_told_once():
    bench = Bench()
    bench.history(events.DeadLettered(pipeline="p", key="a", version=1, cause="bad"))
    bench.settle(Outcome.DEAD, 1)
    assert told(bench.flushed()) == [("dead letter", "a", 1)]


def test_what_goes_well_makes_no_line():
    bench = Bench()
    bench.history(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=5, firsts=5))
    bench.history(events.BatchOpened(pipeline="p", changes=5))
    bench.flushed(is_last=True)
    assert bench.ledger.writes == 0


def test_a_key_that_waits_is_told_when_the_answer_is_new_and_not_twice_a_second():
    bench = Bench()
    for _ in range(100):
        bench.wait("a", "busy")
        bench.wait("b", "busy")
        bench.wait("a", "limited")
        bench.now += 0.5
    lines = bench.flushed()
    assert told(lines) == [("waits", "a", 1), ("waits", "b", 1), ("waits", "a", 1)]
    assert [line.detail for line in lines] == ["busy", "busy", "limited"]
    bench.now += WAIT_AGAIN_S
    bench.wait("a", "busy")
    assert told(bench.flushed()) == [("waits", "a", 1)]


def test_a_flood_of_refusals_is_told_in_part_with_how_many_were_left_out():
    bench = Bench()
    for _ in range(3):
        bench.settle(Outcome.STALE, *range(REFUSALS_MAX // 2))
    bench.history(events.ClaimLost(pipeline="p", key="b"))
    *lines, last = bench.flushed()
    assert len(lines) == REFUSALS_MAX + 1
    assert lines[-1].what == "claim lost", "what is rare is told all the same"
    assert (last.what, last.key) == ("left out", "")
    assert last.detail.startswith(f"{REFUSALS_MAX // 2:,} lines")


def test_a_long_flood_costs_a_bounded_number_of_lines_a_second():
    bench = Bench()
    lines = []
    for _ in range(200):
        bench.settle(Outcome.STALE, *range(1000))
        bench.now += 0.5
        lines += bench.flushed()
    assert len(lines) <= REFUSALS_MAX + 100 * REFUSALS_PER_S + 12
    assert sum(line.what == "left out" for line in lines) <= 11


def test_all_is_told_if_all_is_to_be_kept():
    bench = Bench("all")
    bench.settle(Outcome.APPLIED, *range(REFUSALS_MAX + 100))
    assert len(bench.flushed()) == REFUSALS_MAX + 100


def test_what_cannot_be_written_waits_in_its_order():
    bench = Bench()
    bench.settle(Outcome.STALE, 1, 2)
    bench.ledger.is_cut = True
    with pytest.raises(UnavailableError):
        bench.flushed()
    bench.settle(Outcome.STALE, 3)
    bench.ledger.is_cut = False
    assert [line.version for line in bench.flushed()] == [1, 2, 3]
    assert bench.flushed() == []


def test_too_many_lines_push_out_the_oldest_and_their_number_is_told():
    bench = Bench("all")
    bench.settle(Outcome.APPLIED, *range(LINES_MAX + 7))
    *lines, last = bench.flushed()
    assert [lines[0].version, lines[-1].version, len(lines)] == [8, LINES_MAX + 6, LINES_MAX - 1]
    assert last.detail.startswith("7 lines")


def test_a_ledger_that_stays_away_does_not_fill_the_memory():
    bench = Bench("all")
    bench.ledger.is_cut = True
    bench.ledger.meanwhile = lambda: bench.settle(Outcome.APPLIED, 1, 2, 3)
    for _ in range(3):
        bench.settle(Outcome.APPLIED, *range(LINES_MAX))
        with pytest.raises(UnavailableError):
            bench.flushed()
    assert len(bench.history._lines) == LINES_MAX


def test_an_alarm_stands_until_it_is_over_or_old():
    alarm, calm, other = (
        HistoryRecord(100.0, "alarm"),
        HistoryRecord(110.0, "alarm over"),
        HistoryRecord(120.0, "pruned"),
    )
    assert active_alarm([other, alarm], since=100.0) == alarm
    assert active_alarm([other, alarm], since=100.1) is None
    assert active_alarm([calm, alarm], since=0.0) is None
    for act in ("era raised", "resynced"):
        assert active_alarm([HistoryRecord(110.0, act), alarm], since=0.0) is None
    assert active_alarm([alarm, calm], since=0.0) == alarm
    assert active_alarm([other], since=0.0) is None
