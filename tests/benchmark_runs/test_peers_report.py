"""What the benchmarks derive from the log of a run: speeds, a page with its plots, and nothing else of the page."""

import uuid
from pathlib import Path

import pytest
from benchmarks.peers.race import speed
from benchmarks.peers.record import Kind, Line, Reader, Recorder
from benchmarks.plot import Bar, bars
from benchmarks.section import replace_section

KEY = str(uuid.UUID(int=1))


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
