"""What can be watched: which events a person reads later, what is counted, and how an event looks as a line."""

import logging

import msgspec
import pytest

from keywise.core import events
from keywise.core.change import Change, Outcome, order_of
from keywise.observe.counters import Counters
from keywise.observe.log import Log, described

LEVELS = {
    events.Started(pipeline="p", strategy="leased", grade="plain", source="queue"): logging.INFO,
    events.BatchOpened(pipeline="p", changes=3): logging.DEBUG,
    events.BatchClosed(pipeline="p", changes=3): logging.DEBUG,
    events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=3): logging.DEBUG,
    events.Ignored(pipeline="p", reason="locale", changes=1): logging.DEBUG,
    events.Refused(pipeline="p", key="a", reason="busy", wait_s=1.0): logging.DEBUG,
    events.Failed(pipeline="p", key="a", cause="no", attempts=1, retry_s=1.0): logging.WARNING,
    events.DeadLettered(pipeline="p", key="a", cause="no"): logging.WARNING,
    events.TookOver(pipeline="p", key="a", crashes=0): logging.WARNING,
    events.ClaimLost(pipeline="p", key="a"): logging.WARNING,
    events.Snoozed(pipeline="p", key="a", wait_s=1.0): logging.DEBUG,
    events.Handled(pipeline="p", keys=("a",), seconds=1.0): logging.DEBUG,
    events.Advanced(pipeline="p", key="a", records=10, read=1000, size=4000): logging.DEBUG,
    events.ReindexMoved(pipeline="p", generation=1, stage="scanning", shards=3): logging.INFO,
    events.ShardAdvanced(pipeline="p", shard="shard 000001", generation=1, rows=500, page_rows=250): logging.DEBUG,
    events.SweepHeld(pipeline="p", generation=1, keys=3, delete_max=1): logging.WARNING,
    events.Repaired(pipeline="p", key="a"): logging.INFO,
    events.Waiting(pipeline="p", live=1, bulk=2, busy=1, held=1): logging.DEBUG,
    events.Paused(pipeline="p"): logging.INFO,
    events.Resumed(pipeline="p"): logging.INFO,
    events.TargetSwapped(pipeline="p", before="pages-1", after="pages-2", seconds=0.5): logging.INFO,
    events.SwapRefused(pipeline="p", generation=2, cause="suspect: 1 keys"): logging.WARNING,
    events.Pruned(pipeline="p", keys=3): logging.INFO,
    events.Alarmed(pipeline="p", cause="no", advice="do"): logging.WARNING,
    events.AlarmCleared(pipeline="p", cause="fresh again"): logging.INFO,
    events.Unavailable(pipeline="p", what="ledger", cause="no", retry_s=1.0): logging.WARNING,
    events.Unavailable(pipeline="p", what="ledger", cause="no", retry_s=1.0, calls=2): logging.DEBUG,
    events.Available(pipeline="p", what="ledger", seconds=5.0, calls=2): logging.INFO,
    events.LedgerDown(pipeline="p", since=1.0, cause="no", mode="wait"): logging.WARNING,
    events.LedgerBack(pipeline="p", since=1.0, seconds=5.0): logging.INFO,
    events.MarkedSuspect(pipeline="p", keys=3): logging.WARNING,
    events.Unrepairable(pipeline="p"): logging.WARNING,
    events.SinkEmpty(pipeline="p", keys=3, advice="do"): logging.WARNING,
    events.Misdirected(pipeline="p", cause="no", advice="do"): logging.WARNING,
    events.SessionLost(pipeline="p", losses=1): logging.WARNING,
    events.CallEnded(pipeline="p", key="a", outcome="done", waited_s=1.0, ran_s=1.0): logging.DEBUG,
    events.CallRefused(pipeline="p", key="a", cause="no"): logging.WARNING,
    events.Overlapped(pipeline="p", key="a", overlaps=1): logging.WARNING,
    events.TurnLost(pipeline="p", key="a"): logging.WARNING,
    events.Draining(pipeline="p"): logging.DEBUG,
    events.Draining(pipeline="p", changes=1, keys=("a",), left_s=5.0): logging.INFO,
    events.Stopped(pipeline="p"): logging.INFO,
    events.Stopped(pipeline="p", changes=1, keys=("a",)): logging.WARNING,
}


TRIED = [
    *LEVELS.items(),
    # An event with a mapping cannot be a key.
    (events.ReindexEnded(pipeline="p", generation=1, seconds=5.0, counts={"read": 3}, gone=0), logging.INFO),
]


def test_every_event_is_tried_here():
    assert {type(event) for event, _ in TRIED} == set(events.Event.__subclasses__())


@pytest.mark.parametrize(("event", "level"), TRIED, ids=lambda value: type(value).__name__)
def test_a_log_tells_what_a_person_should_read_later(event: events.Event, level: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="keywise")
    Log()(event)
    assert [("keywise", level, described(event))] == caplog.record_tuples


def test_a_log_may_go_to_a_logger_of_the_users(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="mine")
    Log(logging.getLogger("mine"))(events.Stopped(pipeline="p"))
    assert [record.name for record in caplog.records] == ["mine"]


def test_an_event_is_one_line_of_its_name_and_fields():
    event = events.Failed(pipeline="search", key="a", cause="no", attempts=2, retry_s=0.5)
    assert described(event) == "failed pipeline='search' key='a' version=None cause='no' attempts=2 retry_s=0.5"


def test_the_line_of_a_dead_letter_says_how_to_find_it():
    """The ledger numbers a letter when it stores it; a worker does not learn the number."""
    assert described(events.DeadLettered(pipeline="mails", key="a", version=1, cause="no")) == (
        "dead letter pipeline='mails' key='a' version=1 cause='no' (keywise dead list --pipeline 'mails')"
    )


def test_a_line_names_its_event_in_the_words_of_the_history():
    assert described(events.TookOver(pipeline="p", key="a", crashes=0)).startswith("taken over pipeline='p'")
    assert described(events.ClaimLost(pipeline="p", key="a")).startswith("claim lost pipeline='p'")


def test_the_log_names_the_changes_that_ended_without_their_bodies(caplog: pytest.LogCaptureFixture):
    """A body or a header may hold a secret; neither is in the line, nor in the fields that a JSON formatter prints."""
    caplog.set_level(logging.DEBUG, logger="keywise")
    changes = [Change(f"k{n}", order_of(n or None), body=b"s3cret", headers={"auth": "s3cret"}) for n in range(7)]
    Log()(events.Settled(pipeline="p", outcome=Outcome.STALE, changes=7, headers=changes))
    assert caplog.messages == [
        "settled pipeline='p' outcome='stale' changes=7 "
        "headers=[('k0', None), ('k1', 1), ('k2', 2), ('k3', 3), ('k4', 4), … 2 more] firsts=0 sent_at=0.000"
    ]
    [record] = caplog.records
    assert record.headers == [(change.key, change.version) for change in changes]
    assert "s3cret" not in repr(vars(record))


def test_a_long_list_of_keys_is_cut_in_the_line():
    event = events.Handled(pipeline="p", keys=tuple(f"k{number}" for number in range(100)), seconds=1.0)
    assert described(event) == "handled pipeline='p' keys=['k0', 'k1', 'k2', 'k3', 'k4', … 95 more] seconds=1"


def test_a_traceback_follows_its_line_indented(caplog: pytest.LogCaptureFixture):
    """A message inside of it must not look like another line of the log."""
    caplog.set_level(logging.INFO, logger="keywise")
    forged = "Traceback:\n2026-11-16 warning dead\x1b[31mlettered"
    Log()(events.Failed(pipeline="p", key="a", cause="no", attempts=1, retry_s=1.0, traceback=forged))
    assert caplog.messages == [
        "failed pipeline='p' key='a' version=None cause='no' attempts=1 retry_s=1\n"
        "  Traceback:\n  2026-11-16 warning dead\\x1b[31mlettered"
    ]


@pytest.mark.parametrize("event", LEVELS, ids=lambda event: type(event).__name__)
def test_a_record_of_the_log_carries_the_fields_of_its_event(event: events.Event, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="keywise")
    Log()(event)
    for record in caplog.records:
        fields = msgspec.structs.asdict(event) | {"event": type(event).__name__.lower()}
        assert fields == {name: getattr(record, name) for name in fields}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123456, "0.0123"), (1.0, "1"), (5.4321, "5.43"), (59.987, "60"), (4321.0, "4321")]
)
def test_a_duration_has_three_digits(seconds: float, text: str):
    event = events.LedgerBack(pipeline="p", since=1794835428.123456, seconds=seconds)
    assert described(event) == f"ledger back pipeline='p' since=1794835428.123 seconds={text}"


@pytest.mark.parametrize("evil", ["a\nfailed pipeline='x'", "\x1b[31mred", "a\0b", "\r", "\u2028", "\u202e", "\ud800"])
def test_control_characters_of_keys_and_causes_are_escaped(evil: str):
    """A key comes from outside: it must not forge a line of the log or colour a terminal."""
    line = described(events.DeadLettered(pipeline="p", key=evil, cause=evil))
    assert line.isprintable()
    assert line.encode()


def test_a_percent_sign_in_a_cause_is_no_format(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="keywise")
    Log()(events.DeadLettered(pipeline="p", key="100%s", cause="%d%n"))
    assert "100%s" in caplog.messages[0]


def test_figures_count_events_and_the_changes_of_each_outcome():
    figures = Counters()
    figures(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=3))
    figures(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=2))
    figures(events.Settled(pipeline="p", outcome=Outcome.DEAD, changes=1))
    figures(events.Stopped(pipeline="p"))
    assert figures.outcomes == {"applied": 5, "dead": 1}
    assert figures.events == {"Settled": 3, "Stopped": 1}
