"""Looking again and again: how often, what happens when a look fails, and what each look prints where."""

import io
import json
import sys
from contextlib import redirect_stdout

import pytest
import typer

from keywise.cli.live.watch import watch_or_once
from keywise.core.errors import DatabaseError, UnavailableError


class Looks:
    """Prints the next page at each look, or raises it; Ctrl-C comes after the last."""

    def __init__(self, *pages: str | Exception) -> None:
        self.left = list(pages)
        self.waits: list[float] = []

    def look(self) -> None:
        page = self.left.pop(0)
        if isinstance(page, Exception):
            raise page
        print(page)

    def wait(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        if not self.left:
            raise KeyboardInterrupt


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(*pages: str | Exception, every: str | None = None, json: bool = False) -> list[float]:
    looks = Looks(*pages)
    watch_or_once(looks.look, watch=True, every=every, json=json, wait=looks.wait)
    return looks.waits


def test_without_watch_there_is_one_look(capsys):
    looks = Looks("one", "two")
    watch_or_once(looks.look, watch=False, every=None, json=False, wait=looks.wait)
    assert (capsys.readouterr().out, looks.waits) == ("one\n", [])


@pytest.mark.parametrize(("every", "wait_s"), [(None, 1.0), ("2s", 2.0), ("100ms", 0.1)])
def test_looks_are_as_often_as_said_and_ctrl_c_is_no_error(every, wait_s):
    assert watch("one", "two", every=every) == [wait_s, wait_s]


@pytest.mark.parametrize(
    ("every", "watched", "said"),
    [("2s", False, "add --watch"), ("soon", True, "--every: duration 'soon'"), ("0s", True, "too often")],
)
def test_what_cannot_be_meant_is_wrong_usage(capsys, every, watched, said):
    with pytest.raises(typer.Exit) as refused:
        watch_or_once(Looks("one").look, watch=watched, every=every, json=False)
    assert refused.value.exit_code == 2
    assert said in capsys.readouterr().err


def test_in_a_pipe_each_look_follows_with_its_time(capsys):
    watch("one", "two")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["one", ""] and lines[4:] == ["two", ""]
    assert lines[0].endswith(" UTC")


def test_as_json_each_look_is_one_line(capsys):
    watch(json.dumps({"a": [1, 2]}, indent=2), '{"a": []}', json=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["a"] for one in told] == [[1, 2], []]
    assert all(one["at"] for one in told)


def test_in_a_terminal_a_look_takes_the_place_of_the_one_before():
    with redirect_stdout(Screen()) as screen:
        watch("one\nmore", "two")
    before, first, second = screen.getvalue().split("\x1b[H")
    assert before.strip("\n") == ""
    assert "every 1 s" in first and "\none\x1b[K\nmore\x1b[K\n" in first
    assert "\ntwo\x1b[K\n\x1b[J" in second and "more" not in second


def test_a_look_that_is_too_high_is_cut_at_the_end_of_the_screen(monkeypatch):
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("COLUMNS", "80")
    with redirect_stdout(Screen()) as screen:
        watch("\n".join(map(str, range(100))))
    page = screen.getvalue().partition("\x1b[H")[2]
    assert page.count("\n") == 9
    assert "…" in page


def test_a_look_prints_as_it_would_to_the_real_stream():
    shapes = []
    for stream in (Screen(), io.StringIO()):
        with redirect_stdout(stream):
            watch_or_once(
                lambda: shapes.append(sys.stdout.isatty()), watch=True, every=None, json=False, wait=Looks().wait
            )
    assert shapes == [True, False]


def test_what_cannot_be_reached_for_a_while_does_not_end_it(capsys):
    assert len(watch("one", UnavailableError("locked"), "two")) == 3
    told = capsys.readouterr()
    assert "two" in told.out
    assert "Error: locked; nothing is lost, try again" in told.err


@pytest.mark.parametrize(
    "pages", [(UnavailableError("no"),), ("one", DatabaseError("no"))], ids=["at first", "for good"]
)
def test_what_cannot_be_looked_at_is_an_error(pages):
    with pytest.raises((UnavailableError, DatabaseError)):
        watch(*pages)
