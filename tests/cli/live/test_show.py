"""A view that is shown while something runs: it draws, keeps lines of others whole, and never disturbs."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
from rich.console import Console

from keywise.cli.live import show as showing
from keywise.cli.live.show import LineBuffer, StreamRedirect, live_view
from keywise.core import events
from keywise.core.change import Outcome
from keywise.observe.run_view import View
from running import scaled

LIMIT_S = 20.0
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and remembers; a test can wait for what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._written:
            self._written.notify_all()
            return super().write(text)

    def wait_for(self, is_there: Callable[[str], bool]) -> None:
        with self._written:
            assert self._written.wait_for(lambda: is_there(self.getvalue()), scaled(LIMIT_S)), self.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(showing, "DRAW_S", 0.01)
    return Terminal()


@contextmanager
def shown_on(terminal: Terminal, view: View) -> Iterator[None]:
    """Shown while both streams are the terminal; afterwards they are again."""
    with redirect_stdout(terminal), redirect_stderr(terminal):
        try:
            with live_view(view, console_on(terminal), never):
                yield
        finally:
            assert sys.stdout is terminal and sys.stderr is terminal


@pytest.fixture
def view() -> View:
    made = View(["p"])
    made(events.Started(pipeline="p", strategy="leased", grade="plain", source="queue"))
    return made


def console_on(terminal: io.StringIO) -> Console:
    return Console(file=terminal, force_terminal=True, width=80, height=24, color_system=None, markup=False)


def settle(view: View, changes: int) -> None:
    view(events.Settled(pipeline="p", outcome=Outcome.APPLIED, changes=changes))


def never(text: str) -> None:
    pytest.fail(f"told {text!r} though there is a terminal")


def test_the_view_is_drawn_again_while_it_lasts_and_its_end_stays(terminal, view):
    with shown_on(terminal, view):
        terminal.wait_for(lambda text: "applied 0" in text)
        settle(view, 5)
        terminal.wait_for(lambda text: "applied 5" in text)
        settle(view, 1)
    last = terminal.getvalue().rpartition("p  running")[2]
    assert "applied 6" in last
    assert last.endswith("\n" + SHOW)


def test_the_cursor_is_visible_as_soon_as_the_first_frame_is(terminal, view):
    """So it is there also for the next prompt if the process is killed."""
    with shown_on(terminal, view):
        terminal.wait_for(lambda text: "applied 0" in text and SHOW in text)
        now = terminal.getvalue()
        assert now.rfind(SHOW) > now.rfind(HIDE)


def test_the_terminal_is_left_in_order_after_an_error(terminal, view):
    with pytest.raises(ValueError, match="mine"), shown_on(terminal, view):
        print("before", flush=True)
        raise ValueError("mine")
    written = terminal.getvalue()
    assert "before\n" in written and written.rfind(SHOW) > written.rfind(HIDE)
    assert "keywise-view" not in [thread.name for thread in threading.enumerate()]


def test_prints_and_logs_are_whole_lines_above_the_view(terminal, view):
    logger = logging.getLogger("a user's")
    logger.addHandler(handler := logging.StreamHandler(terminal))
    try:
        with shown_on(terminal, view):
            sys.stdout.write("half")
            sys.stdout.write(" and [bold]half[/bold]\n")
            logger.warning("logged")
            terminal.wait_for(lambda text: "logged" in text)
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    lines = terminal.getvalue().split("\n")
    assert [line for line in lines if line.endswith("half and [bold]half[/bold]")]
    assert "logged" in lines


def test_the_view_goes_on_while_lines_come_all_the_time(terminal, view, monkeypatch):
    monkeypatch.setattr(LineBuffer, "taken", lambda self: ["again"])
    with shown_on(terminal, view):
        terminal.wait_for(lambda text: "again" in text)
        settle(view, 5)
        terminal.wait_for(lambda text: "applied 5" in text)


def test_a_console_that_would_write_to_its_own_stand_in_is_refused(terminal, view):
    refused = pytest.raises(AssertionError, match="file of its own")
    with redirect_stdout(terminal), refused, live_view(view, Console(force_terminal=True), never):
        pass


def test_what_is_written_without_an_end_of_line_is_not_lost(terminal, view):
    with shown_on(terminal, view):
        sys.stdout.write("no end")
        stale = sys.stdout
    stale.write(", and late")
    assert terminal.getvalue().endswith("no end, and late")


def test_whoever_prints_does_not_wait_for_a_terminal_that_takes_nothing(monkeypatch, view):
    """As after Ctrl-S."""
    monkeypatch.setattr(showing, "LEAVE_S", 0.1)
    resumed, tried = threading.Event(), threading.Event()

    class Stopped(Terminal):
        def write(self, text: str) -> int:
            tried.set()
            resumed.wait(scaled(LIMIT_S))
            return super().write(text)

    stopped = Stopped()
    with shown_on(stopped, view):
        assert tried.wait(scaled(LIMIT_S))
        for number in range(showing.LINES_MAX + 5):
            print(number)
        # Else the end of the block would wait for it, as any print after it would.
        resumed.set()
    stopped.wait_for(lambda text: "(5 lines were too many)" in text)


def test_a_view_that_cannot_be_drawn_does_not_stop_what_is_watched(terminal, view, monkeypatch, caplog):
    printed = threading.Event()

    def broken(*_: object) -> None:
        printed.wait(scaled(LIMIT_S))
        raise ZeroDivisionError("no frame")

    monkeypatch.setattr(showing, "frame", broken)
    with shown_on(terminal, view):
        print("the work")
        printed.set()
        terminal.wait_for(lambda text: "the work\n" in text)
    assert "the view failed" in caplog.text


def test_a_line_does_not_wait_for_the_next_drawing(terminal, view, monkeypatch):
    monkeypatch.setattr(showing, "DRAW_S", 10 * LIMIT_S)
    with shown_on(terminal, view):
        for text in ("one", "two"):
            print(text)
            terminal.wait_for(lambda written, text=text: f"{text}\n" in written)
        settle(view, 7)
    assert "applied 7" in terminal.getvalue(), "nor does the end"


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
def test_without_a_terminal_there_are_lines_whatever_is_forced(view, monkeypatch, forced):
    for name, value in forced.items():
        monkeypatch.setenv(name, value)
    file, told = io.StringIO(), []
    with live_view(view, Console(file=file), told.append):
        settle(view, 3)
    assert file.getvalue() == ""
    assert len(told) == 1 and told[0].startswith("p: 3 changes, ")


def test_lines_can_be_asked_for_in_a_terminal(terminal, view):
    told: list[str] = []
    with redirect_stdout(terminal), live_view(view, console_on(terminal), told.append, plain=True):
        print("as it is")
    assert (len(told), terminal.getvalue()) == (1, "as it is\n")


def test_a_pipeline_has_a_line_when_something_happened_and_none_while_it_is_idle(view, monkeypatch):
    monkeypatch.setattr(showing, "LINE_S", 0.01)
    looks, told = threading.Semaphore(0), []

    class Looked(View):
        def look(self):
            looks.release()
            return super().look()

    view.__class__ = Looked
    with live_view(view, Console(file=io.StringIO()), told.append):
        for _ in range(20):
            assert looks.acquire(timeout=scaled(LIMIT_S))
        assert len(told) == 1, "that it runs"
        settle(view, 3)
        for _ in range(20):
            assert looks.acquire(timeout=scaled(LIMIT_S))
        assert len(told) == 2
    assert len(told) == 3, "and the last one"


def test_lines_that_were_taken_are_no_news():
    lines = LineBuffer()
    assert (lines.arrived.is_set(), lines.taken()) == (False, [])
    lines.add("a")
    assert (lines.arrived.is_set(), lines.taken()) == (True, ["a"])
    assert (lines.arrived.is_set(), lines.taken()) == (False, [])


def test_a_stand_in_is_like_the_stream_it_stands_for():
    terminal = Terminal()
    diversion = StreamRedirect(terminal, LineBuffer())
    assert diversion.isatty() and not diversion.closed
    diversion.writelines(["a\n", "b"])
    diversion.flush()
    assert terminal.getvalue() == ""
