"""How a look is drawn: in lines that fit, with nothing in them that a terminal would obey."""

import pytest
from rich.cells import cell_len

from keywise.cli.live.draw import frame, line, rate, span
from keywise.core import events
from keywise.core.change import Outcome
from keywise.observe.run_view import PipelineView, View

EVIL = "\x1b[2J\x1b]0;mine\x07[bold red]x[/]\r\n\u202e\x00日本語" * 3
SENT_AT = 1_000_000.0


def views(*names: str, key: str = "home", cause: str = "no such address") -> list[PipelineView]:
    """Pipelines where everything that can be shown has happened."""
    now = [100.0]
    view = View(names, clock=lambda: now[0], wall=lambda: SENT_AT + now[0])
    for name in names:
        view(events.Started(pipeline=name, strategy="leased", grade="plain", source="queue"))
        view(events.Settled(pipeline=name, outcome=Outcome.APPLIED, changes=12_000, sent_at=SENT_AT + 99.2))
        view(events.Settled(pipeline=name, outcome=Outcome.DEAD, changes=1))
        view(events.Waiting(pipeline=name, live=12, bulk=1_300, busy=8, held=4))
        view(events.Handled(pipeline=name, keys=(key,), seconds=1.234))
        view(events.Handled(pipeline=name, keys=("about", "b", "c"), seconds=0.04))
        view(events.Failed(pipeline=name, key=key, cause=cause, attempts=2, retry_s=0.5))
        view(events.DeadLettered(pipeline=name, key=key, cause=cause))
        view(events.TookOver(pipeline=name, key=key, crashes=0))
        view(events.Alarmed(pipeline=name, cause=cause, advice="ask somebody"))
    now[0] += 2
    return view.look()


def drawn(found: list[PipelineView], width: int, height: int = 100) -> list[str]:
    return frame(found, width, height).plain.split("\n")


def test_everything_is_in_the_frame():
    assert drawn(views("mails"), 80) == [
        "mails  running  plain  leased  2 s",
        "  rate     now 6,000/s  average 6,000/s  lag 800 ms",
        "  changes  applied 12,000  stale 0  duplicate 0  superseded 0  dead 1",
        "           failed attempts 1",
        "  lanes    live 12  bulk 1,300  busy 8  held 4",
        "  ALARM    2 s ago: no such address; ask somebody",
        "  slowest  1.2 s home  40 ms about and 2 more",
        "  warning  2 s ago: home failed, attempt 2, again in 500 ms: no such address",
        "  warning  2 s ago: home became a dead letter: no such address",
        "  warning  2 s ago: home was taken over from a worker whose lease has expired",
        "",
    ]


def reading(*objects: tuple[str, int, int]) -> list[PipelineView]:
    view = View(["logs"], clock=lambda: 100.0)
    view(events.Started(pipeline="logs", strategy="leased", grade="plain", source="queue"))
    for uri, records, read in objects:
        view(events.Advanced(pipeline="logs", key=uri, records=records, read=read, size=4_000_000))
    return view.look()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, "25 % of 4.0 MB, 12,000 records s3://uploads/2026/a.ndjson"),
        (50, "25 % of 4.0 MB, 12,000 records ….ndjson"),
    ],
)
def test_an_object_is_shown_with_the_end_of_its_uri(width: int, shown: str):
    assert f"  objects  {shown}" in drawn(reading(("s3://uploads/2026/a.ndjson", 12_000, 1_000_000)), width)


def test_a_long_key_is_cut_in_its_middle_because_uris_differ_at_their_ends():
    folder = "file:///tmp/pytest-of-somebody/pytest-7/uploads/in"
    view = View(["logs"], clock=lambda: 100.0)
    view(events.Started(pipeline="logs", strategy="leased", grade="plain", source="queue"))
    view(events.Handled(pipeline="logs", keys=[f"{folder}/large.ndjson"], seconds=1.0))
    view(events.Advanced(pipeline="logs", key=f"{folder}/small.ndjson", records=1, read=1, size=4))
    [found] = view.look()
    assert "slowest 1.0 s file:///tmp/pytest-o…ads/in/large.ndjson" in line(found)
    assert "1 record file:///tm…est-7/uploads/in/small.ndjson" in line(found)


def test_of_many_objects_five_are_drawn_in_lines_that_fit():
    found = reading(*[(f"s3://uploads/{EVIL}{number}", number, number) for number in range(8)])
    for width in (20, 60, 100):
        lines = drawn(found, width)
        assert all(cell_len(line) <= width and line.isprintable() for line in lines)
    assert sum("% of 4.0 MB" in line for line in drawn(found, 100)) == 5
    assert any(line.endswith("and 3 more") for line in drawn(found, 100))
    assert "reading 0 % of 4.0 MB" in line(found[0])


def test_an_object_of_unknown_size_is_drawn():
    view = View(["logs"], clock=lambda: 100.0)
    view(events.Started(pipeline="logs", strategy="leased", grade="plain", source="queue"))
    view(events.Advanced(pipeline="logs", key="a", records=1, read=5, size=0))
    assert "  objects  0 % of 0 B, 1 record a" in drawn(view.look(), 80)


def test_a_pipeline_in_one_line_for_logs():
    [view] = views("mails")
    assert line(view) == (
        "mails: 12,001 changes, 6,000/s now, 6,000/s on average, lag 800 ms; 12,000 applied, 1 dead; 1 failed attempt; "
        "lanes live 12, bulk 1,300, busy 8, held 4; slowest 1.2 s home, 40 ms about and 2 more"
    )


def test_the_line_at_the_end_tells_how_long_it_took():
    now = [0.0]
    view = View(["p"], clock=lambda: now[0])
    view(events.Started(pipeline="p", strategy="leased", grade="plain", source="queue"))
    view(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=100))
    now[0] = 4.0
    view(events.Stopped(pipeline="p"))
    [view] = view.look()
    assert line(view) == "p: stopped, 100 changes in 4.0 s, 25/s; 100 applied"
    assert drawn([view], 80)[1] == "  rate     average 25/s"


def test_a_pipeline_that_has_not_started_is_not_drawn():
    assert drawn(View(["p"]).look(), 80) == [""]


def test_an_idle_pipeline_says_for_how_long():
    now = [0.0]
    view = View(["p"], clock=lambda: now[0])
    view(events.Started(pipeline="p", strategy="leased", grade="plain", source="queue"))
    view(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=1, sent_at=1.0))
    now[0] = 90.0
    view.look()
    assert "now 0/s  average 0/s  idle for 1 min 30 s" in drawn(view.look(), 80)[1]


@pytest.mark.parametrize("width", [120, 80, 40, 24])
@pytest.mark.parametrize(
    "key", ["home", EVIL, "x" * 100_000, "日" * 500, ""], ids=["plain", "evil", "long", "wide", "no"]
)
def test_no_line_is_wider_than_the_terminal(width, key):
    for text in drawn(views("mails", key=key, cause=key), width):
        assert cell_len(text) <= width


def test_a_warning_is_folded_and_takes_three_lines_at_most():
    found = views("mails", key="k" * 36, cause="why " * 100)
    lines = drawn(found, 40)
    start = next(number for number, text in enumerate(lines) if "warning" in text)
    warning = [text[11:] for text in lines[start : start + 3]]
    assert "k" * 36 in "".join(warning), "a word that is wider than the terminal is broken and not cut"
    assert warning[-1].endswith("…")
    assert lines[start + 3].startswith("  warning")


@pytest.mark.parametrize("width", [80, 40])
def test_control_characters_and_markup_of_keys_causes_and_names_are_shown_as_they_are(width):
    found = views(EVIL, key=EVIL, cause=EVIL)
    lines = drawn(found, width)
    assert all(text.isprintable() for text in lines)
    assert any("[bold red]x[/]" in text for text in lines)
    assert line(found[0]).isprintable()


def test_a_frame_that_is_too_high_leaves_out_what_is_long_and_then_cuts():
    found = views("a", "b", "c")
    assert len(drawn(found, 80, 100)) == 31
    brief = drawn(found, 80, 24)
    assert len(brief) <= 24
    assert [text for text in brief if "ALARM" in text] and not [text for text in brief if "warning" in text]
    for height in (10, 3, 2):
        cut = drawn(found, 80, height)
        assert len(cut) <= height
        assert cut[-2:] == ["…", ""]


@pytest.mark.parametrize(
    ("changes_a_second", "text"),
    [(0.0, "0/s"), (0.01, "0/s"), (0.25, "0.2/s"), (9.94, "9.9/s"), (10.0, "10/s"), (12_345.6, "12,346/s")],
)
def test_a_rate_is_exact_enough(changes_a_second, text):
    assert rate(changes_a_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "0 ms"), (0.04, "40 ms"), (1.234, "1.2 s"), (125.0, "2 min 5 s")]
)
def test_a_span_has_a_unit_that_fits(seconds, text):
    assert span(seconds) == text


def test_an_outage_is_told_since_when_and_what_followed():
    view = View(["pages"], clock=lambda: 0.0)
    view(events.Started(pipeline="pages", strategy="leased", grade="plain", source="queue"))
    view(events.Unrepairable(pipeline="pages"))
    view(events.LedgerDown(pipeline="pages", since=0.0, cause="refused", mode="write-anyway"))
    view(events.MarkedSuspect(pipeline="pages", keys=3))
    text = "\n".join(drawn(view.look(), 200))
    assert "ledger   down since 1970-01-01 00:00:00 UTC, write-anyway" in text
    assert "the ledger is down since 1970-01-01 00:00:00 UTC, write-anyway: refused" in text
    assert "3 keys had been written without the ledger" in text and "without an origin or a refetch function" in text
    assert line(view.look()[0]).endswith("down since 1970-01-01 00:00:00 UTC, write-anyway")


def test_what_hardly_any_pipeline_has_is_shown_once_it_happens():
    view = View(["p"], clock=lambda: 100.0)
    view(events.Started(pipeline="p", strategy="leased", grade="plain", source="queue"))
    assert "removed" not in "".join(drawn(view.look(), 80))
    view(events.Settled(pipeline="p", outcome=Outcome.REMOVED, changes=2))
    assert "  changes  applied 0  stale 0  duplicate 0  superseded 0  removed 2  dead 0" in drawn(view.look(), 80)
