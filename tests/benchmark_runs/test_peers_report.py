"""What the benchmarks derive from the log of a run: speeds, a page with its plots, and nothing else of the page."""

import uuid
from pathlib import Path

import pytest
from benchmarks.machine import this_machine
from benchmarks.memory import MemorySamples, memory_figures
from benchmarks.peers import page as peers_page
from benchmarks.peers.checker import Verdict
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.place import Handler
from benchmarks.peers.race import Turn, speed
from benchmarks.peers.record import Kind, Line, Reader, Recorder
from benchmarks.peers.report import Report, Row
from benchmarks.plot import Bar, bars
from benchmarks.section import replace_section

from keywise.core.change import Outcome
from keywise.core.events import BatchClosed, Settled

KEY = str(uuid.UUID(int=1))


def row(name: str, handler: Handler, *speeds: float, keys: int = 10_000, calls: int | None = 700) -> Row:
    [contender] = [one.with_handler(handler) for one in CONTENDERS if one.name == name]
    assert contender is not None
    verdict = Verdict(None, None, None, 0, calls, None)
    return Row(contender, handler, keys, [Turn(one, 0.1, 0.2, 50.0, verdict) for one in speeds])


def report(*rows: Row) -> Report:
    return Report(this_machine(), {}, "uniform", 3, 0.0, "", list(rows))


def test_the_speed_is_that_after_the_first_tenth():
    second = 10**9
    slow_start = [Line(Kind.WROTE, b"", 1, 0, 50 * second)]
    lines = slow_start + [Line(Kind.WROTE, b"", 1, 0, 50 * second + number * second) for number in range(1, 10)]
    assert speed(lines, 10) == 1.0


def test_changes_that_are_settled_in_one_go_count_and_calls_do_not():
    second = 10**9
    lines = [Line(Kind.SETTLED, b"", 50, 0, number * second) for number in (1, 2, 3)]
    calls = [Line(Kind.CALLED, b"", 1, 0, number * second) for number in (1, 2)]
    assert speed(lines + calls, 150) == 50.0


def test_a_reader_goes_on_where_it_was(tmp_path: Path):
    recorder, reader = Recorder(str(tmp_path / "log")), Reader(tmp_path / "log")
    assert reader.read_on() == 0
    recorder.note(Kind.WROTE, KEY, 3, 1)
    assert reader.read_on() == 1
    recorder.note(Kind.SKIPPED, KEY, 2, 2)
    recorder.note_all(Kind.CALLED, [(KEY, 4), (KEY, 5)], 3)
    recorder.settled(7)
    assert reader.read_on() == 9
    assert [line.version for line in reader.lines] == [3, 2, 4, 5, 7]


def test_a_plot_has_a_bar_for_each_value_on_a_scale_of_powers_of_ten():
    drawn = bars("Speed & more", [Bar("ours", 50_000.0, True), Bar("<theirs>", 500.0, False)])
    assert "Speed &amp; more" in drawn and "&lt;theirs&gt;" in drawn
    assert ">50,000</text>" in drawn and ">500</text>" in drawn
    for tick in ("100", "1,000", "10,000", "100,000"):
        assert f">{tick}</text>" in drawn


def test_what_was_too_little_to_be_measured_has_no_bar():
    assert 'width="0.0"' in bars("CPU", [Bar("idle", 0.0, True), Bar("busy", 3.0, False)])
    assert 'width="0.0"' in bars("CPU", [Bar("idle", 0.0, True)])


def test_only_the_section_of_a_page_is_renewed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- peers: made by us -->\nold\n<!-- end of peers -->\n\nMine too.\n")
    replace_section(page, "peers", "new\n")
    replace_section(page, "peers", "newer\n")
    text = "# Mine\n\n<!-- peers: made by us -->\n\nnewer\n\n<!-- end of peers -->\n\nMine too.\n"
    assert page.read_text() == text


def test_a_page_without_the_markers_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    with pytest.raises(ValueError, match="end of peers"):
        replace_section(page, "peers", "new")


def test_ratios_hold_keywise_against_peers_with_the_same_handler_and_the_same_keys():
    ours = "keywise, one-change handler"
    noop, few, upsert = report(
        row(ours, Handler.NOOP, 1_300, 1_200, 9_000),
        row("PgQueuer", Handler.NOOP, 1_000, 1_000, 1_000),
        row("DBOS", Handler.NOOP, 100, 100, 100),
        row(ours, Handler.NOOP, 1_100, keys=1_000),
        row("PgQueuer", Handler.NOOP, 1_000, keys=1_000),
        row(ours, Handler.UPSERT, 1_100),
        row("keywise, table sink", Handler.UPSERT, 3_000, calls=None),
        row("PgQueuer", Handler.UPSERT, 1_000),
    ).groups
    assert [(one.name, one.value, one.at_least, one.is_met) for one in noop.ratios()] == [
        (f"{ours} / DBOS", 13, 20, False),
        (f"{ours} / PgQueuer", 1.3, 1.2, True),
    ]
    assert "turn by turn 1.20 to 9.00" in noop.ratios()[1].note
    assert [(one.value, one.at_least, one.is_met) for one in few.ratios()] == [(1.1, 1.2, False)]
    assert [(one.name, one.value, one.at_least) for one in upsert.ratios()] == [
        ("keywise, table sink / PgQueuer", 3, 20),
        (f"{ours} / PgQueuer", 1.1, 1.2),
    ]


def test_a_page_has_a_table_for_each_handler_and_number_of_keys_with_calls_beside_messages(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- peers: made by us -->\n<!-- end of peers -->\n")
    rows = [row("PgQueuer", handler, 1_000, keys=keys) for handler in Handler for keys in (10_000, 1_000)]
    peers_page.write_page(page, report(*rows))
    text = page.read_text()
    for head in ("No-op handler, 10,000", "No-op handler, 1,000", "Upsert handler, 10,000", "Upsert handler, 1,000"):
        assert f"### {head} keys\n" in text
    assert text.count("| 60,000 | 700 | – | – | 0 | – |") == 4
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "peers-noop-speed.svg",
        "peers-noop-cpu.svg",
        "peers-speed.svg",
        "peers-cpu.svg",
    }


def test_who_has_no_handler_takes_no_part_with_the_no_op():
    names = {one.name for one in CONTENDERS if one.with_handler(Handler.NOOP) is None}
    assert names == {
        "keywise, table sink",
        "keywise, batch handler",
        "keywise, one-change handler in its transaction",
    }


def test_memory_is_sampled_after_every_tenth_of_what_is_counted():
    samples = MemorySamples(100, Settled)
    samples(BatchClosed(pipeline="pages", changes=100))
    assert samples.mib == []
    samples(Settled(pipeline="pages", outcome=Outcome.APPLIED, changes=35))
    assert len(samples.mib) == 3 and min(samples.mib) > 0
    samples(Settled(pipeline="pages", outcome=Outcome.APPLIED, changes=65))
    assert len(samples.mib) == 10


def test_memory_that_grows_in_the_second_half_of_a_long_run_misses_its_target():
    *_, flat = memory_figures("memory", [50, *[100] * 9], 1_000_000)
    *_, grown = memory_figures("memory", [*[100] * 9, 106], 1_000_000)
    *_, short = memory_figures("memory", [*[100] * 9, 106], 1_000)
    assert (flat.is_met, grown.is_met, short.is_met) == (True, False, None)
