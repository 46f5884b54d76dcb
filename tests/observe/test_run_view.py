"""The figures of a run: what a look finds after events, by clocks that the tests set."""

import threading

import pytest

from keywise.core import events
from keywise.core.change import Outcome
from keywise.observe.run_view import NOTICES_MAX, OBJECTS_MAX, RECENT_S, SLOW_MAX, WINDOW_S, PipelineView, View

SENT_AT = 1_000_000.0


class Time:
    """Both clocks; they go only when told."""

    def __init__(self) -> None:
        self.passed = 0.0

    def clock(self) -> float:
        return 100.0 + self.passed

    def wall(self) -> float:
        return SENT_AT + self.passed


class Run:
    """One pipeline that has started, and its view."""

    def __init__(self) -> None:
        self.time = Time()
        self.view = View(["p"], clock=self.time.clock, wall=self.time.wall)
        self.emit(events.Started, strategy="leased", grade="plain", source="queue")

    def emit(self, kind: type[events.Event], **fields: object) -> None:
        self.view(kind(pipeline="p", **fields))

    def settle(self, changes: int = 1, outcome: Outcome = Outcome.APPLIED, sent_at: float = SENT_AT) -> None:
        self.emit(events.Settled, outcome=outcome, changes=changes, sent_at=sent_at)

    def handle(self, key: str, seconds: float, *others: str) -> None:
        self.emit(events.Handled, keys=(key, *others), seconds=seconds)

    def fail(self, key: str, cause: str = "no", attempts: int = 1) -> None:
        self.emit(events.Failed, key=key, cause=cause, attempts=attempts, retry_s=1.0)

    def look(self) -> PipelineView:
        [sight] = self.view.look()
        return sight


@pytest.fixture
def run() -> Run:
    return Run()


def advance(run: Run, key: str, records: int, size: int = 100) -> None:
    run.emit(events.Advanced, key=key, records=records, read=records, size=size)


def test_objects_are_followed_from_their_first_part_until_their_call_ends(run):
    advance(run, "small", 5, size=50)
    advance(run, "large", 10, size=900)
    advance(run, "large", 20, size=900)
    assert [(one.key, one.records, one.read, one.size) for one in run.look().objects] == [
        ("large", 20, 20, 900),
        ("small", 5, 5, 50),
    ]
    run.handle("other", 1.0)
    run.handle("large", 1.0)
    assert [one.key for one in run.look().objects] == ["small"]


def test_of_many_objects_those_with_the_oldest_parts_are_left_out(run):
    for number in range(OBJECTS_MAX + 5):
        run.time.passed += 1
        advance(run, str(number), 1)
    advance(run, "0", 2)
    assert {one.key for one in run.look().objects} == {"0", *map(str, range(6, OBJECTS_MAX + 5))}


def test_grade_sources_and_state_come_from_the_start(run):
    sight = run.look()
    assert (sight.state, sight.grade) == ("running", "plain")
    assert sight.sources == ({"source": "queue", "strategy": "leased"},)


def test_a_pipeline_that_has_not_started_is_starting():
    [sight] = View(["p"]).look()
    assert (sight.state, sight.sources) == ("starting", ())


def test_every_outcome_is_counted_and_named_also_if_it_never_happened(run):
    run.settle(3)
    run.settle(2, Outcome.DEAD)
    run.settle(1, Outcome.REMOVED)
    run.emit(events.Ignored, reason="locale", changes=4)
    outcomes = {"applied": 3, "stale": 0, "duplicate": 0, "superseded": 0, "removed": 1, "dead": 2, "ignored": 4}
    assert (run.look().outcomes, run.look().changes) == (outcomes, 10)


def test_the_rate_of_now_forgets_and_the_average_does_not(run):
    run.settle(1000)
    run.time.passed = WINDOW_S
    assert (run.look().rate_now, run.look().rate_average) == (200.0, 200.0)
    run.time.passed = 2 * WINDOW_S
    assert (run.look().rate_now, run.look().rate_average) == (0.0, 100.0)


def test_the_rate_of_now_covers_about_a_window_however_often_one_looks(run):
    looks = []
    for _ in range(100):
        run.time.passed += 0.25
        run.settle(10)
        looks.append(run.look().rate_now)
    assert looks[-1] == pytest.approx(40.0)
    run.time.passed += WINDOW_S / 2
    assert run.look().rate_now == pytest.approx(20.0, rel=0.1)


def test_two_looks_at_one_moment_do_not_divide_by_nothing(run):
    run.settle(10)
    assert (run.look().rate_now, run.look().rate_average) == (0.0, 0.0)


def test_lag_is_the_age_of_what_was_just_settled(run):
    run.time.passed = 7.0
    run.settle(sent_at=SENT_AT + 4.0)
    assert (run.look().lag_s, run.look().idle_s) == (3.0, 0.0)
    run.time.passed += 1.0
    assert run.look().lag_s == 3.0, "as it was then"
    run.time.passed += WINDOW_S
    assert (run.look().lag_s, run.look().idle_s) == (None, WINDOW_S + 1.0)


def test_a_source_whose_clock_is_ahead_has_no_negative_lag(run):
    run.settle(sent_at=SENT_AT + 60.0)
    assert run.look().lag_s == 0.0


def test_nothing_is_said_of_the_lag_of_messages_that_were_never_dated(run):
    run.settle(outcome=Outcome.DEAD, sent_at=0.0)
    assert run.look().lag_s is None


def test_lanes_are_those_that_were_told_last(run):
    assert run.look().lanes is None
    for live in (1, 2):
        run.emit(events.Waiting, live=live, bulk=3, busy=1, held=0)
    assert run.look().lanes.live == 2


def test_the_slowest_keys_come_first_with_their_last_call(run):
    run.handle("a", 3.0)
    run.handle("b", 2.0, "c", "d")
    run.handle("a", 1.0)
    assert [(call.key, call.others, call.seconds) for call in run.look().slowest] == [("b", 2, 2.0), ("a", 0, 1.0)]


def test_only_the_slowest_are_remembered_and_only_for_a_while(run):
    for number in range(SLOW_MAX + 5):
        run.handle(f"k{number}", 1.0 + number)
    run.handle("quick", 0.1)
    keys = [call.key for call in run.look().slowest]
    assert keys == [f"k{number}" for number in range(SLOW_MAX + 4, 4, -1)]
    run.handle(keys[0], 0.01)
    assert run.look().slowest[-1].key == keys[0], "its last call counts, though it was quick"
    run.time.passed = RECENT_S + 1.0
    assert run.look().slowest == []
    run.handle("quick", 0.1)
    assert [call.key for call in run.look().slowest] == ["quick"], "there is room again"


def test_the_last_warnings_are_kept_and_equal_ones_are_told_once(run):
    for key in ("a", "b", "c", "d"):
        run.fail(key)
    run.time.passed = 2.0
    run.fail("d", attempts=2)
    sight = run.look()
    assert [(notice.event.key, notice.times) for notice in sight.warnings] == [("b", 1), ("c", 1), ("d", 2)]
    assert (sight.warnings[-1].event.attempts, sight.now - sight.warnings[-1].at) == (2, 0.0)
    assert (len(sight.warnings), sight.failed_attempts) == (NOTICES_MAX, 5)


@pytest.mark.parametrize(
    "event",
    [
        events.DeadLettered(pipeline="p", key="a", cause="no"),
        events.TookOver(pipeline="p", key="a", crashes=1),
        events.ClaimLost(pipeline="p", key="a"),
        events.Unavailable(pipeline="p", what="ledger", cause="no", retry_s=1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_goes_wrong_is_a_warning_and_no_failed_try(run, event):
    run.view(event)
    assert [notice.event for notice in run.look().warnings] == [event]
    assert run.look().failed_attempts == 0


def test_an_alarm_is_no_warning_and_warnings_do_not_push_it_out(run):
    run.emit(events.Alarmed, cause="no", advice="do")
    for key in ("a", "b", "c", "d"):
        run.fail(key)
    assert [notice.event.advice for notice in run.look().alarms] == ["do"]


def test_a_pause_is_seen_until_it_is_over_or_the_pipeline_drains(run):
    run.emit(events.Paused)
    assert run.look().state == "paused"
    run.emit(events.Resumed)
    assert run.look().state == "running"
    run.emit(events.Paused)
    run.emit(events.Draining)
    assert run.look().state == "draining"


def test_the_time_stands_still_when_the_pipeline_has_stopped(run):
    run.settle(100)
    run.time.passed = 10.0
    run.emit(events.Stopped)
    run.time.passed = 1000.0
    assert (run.look().state, run.look().seconds, run.look().rate_average) == ("stopped", 10.0, 10.0)


def test_a_look_does_not_change_with_what_happens_later(run):
    run.fail("a")
    before = run.look()
    run.fail("a")
    run.settle(5)
    assert (before.warnings[0].times, before.changes) == (1, 0)


def test_what_is_held_is_told_also_while_nothing_happens(run):
    run.view.stirred = False
    run.emit(events.Waiting, live=0, bulk=0, busy=0, held=0)
    assert not run.view.stirred
    run.settle()
    assert run.view.stirred


def test_events_of_other_pipelines_are_not_counted(run):
    run.view(events.Settled(pipeline="q", outcome=Outcome.APPLIED, changes=3))
    assert run.look().changes == 0


def test_looks_from_another_thread_meet_no_half_told_event(run):
    over, found = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            found.append(run.look().changes % 7)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(2000):
        run.settle(7)
        run.handle(f"k{number % 50}", float(number % 13))
        run.fail(f"k{number % 5}")
    over.set()
    thread.join()
    assert set(found) <= {0}


def test_an_outage_is_seen_as_long_as_it_lasts(run):
    run.emit(events.LedgerDown, since=SENT_AT, cause="gone", mode="wait")
    down = run.look().ledger_down
    assert down is not None and down.since == SENT_AT
    run.emit(events.LedgerBack, since=SENT_AT, seconds=5.0)
    assert run.look().ledger_down is None
    assert [type(notice.event) for notice in run.look().warnings] == [events.LedgerDown]
