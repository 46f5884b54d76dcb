"""Shows the figures during a run: redrawn in a terminal, or as lines of a log.

It runs in a thread, so that a slow terminal does not delay the event loop, and a busy event loop does not delay the
display.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from keywise.cli.live.draw import frame, line
from keywise.observe.run_view import View

DRAW_S = 0.25
GATHER_S = 0.02
"""How long a printed or logged line waits for more lines, so that they are shown together."""
LINE_S = 5.0
"""How often an active pipeline gets a line in a log."""
LEAVE_S = 2.0
"""How long the end of the run waits for a terminal that accepts no output."""
LINES_MAX = 10_000
"""The most printed and logged lines that wait for the next drawing; further ones are only counted."""


@contextmanager
def live_view(
    view: View, console: Console, write_line: Callable[[str], None], *, plain: bool = False
) -> Iterator[None]:
    """Show the view inside the block: drawn on the console if it is a terminal, else as lines."""
    over = awake = threading.Event()
    with ExitStack() as stack:
        # Ask the file, not the console: with FORCE_COLOR, the console takes a file for a terminal.
        if plain or not console.file.isatty() or console.is_dumb_terminal:
            work = partial(_write_lines, view, write_line, over)
        else:
            lines = stack.enter_context(redirected_output(console))
            work, awake = partial(_draw, view, console, lines, over), lines.arrived
        thread = threading.Thread(target=_guarded, args=(work, stack.close), name="keywise-view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            awake.set()
            thread.join(LEAVE_S)


class LineBuffer:
    """Lines that other code prints or logs while the view is shown. Adding a line never waits for the terminal."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        """Set when there are lines to take."""
        self._lock = threading.Lock()
        self._kept: deque[str] = deque()
        self._left_out = 0

    def add(self, text: str) -> None:
        with self._lock:
            if len(self._kept) < LINES_MAX:
                self._kept.append(text)
            else:
                self._left_out += 1
        self.arrived.set()

    def taken(self) -> list[str]:
        """Return the lines that were added since the last call."""
        self.arrived.clear()
        with self._lock:
            kept, self._kept = self._kept, deque()
            left_out, self._left_out = self._left_out, 0
        return [*kept, *([f"({left_out:,} lines were too many)"] if left_out else [])]


class StreamRedirect:
    """A replacement for stdout or stderr: complete lines go to a `LineBuffer`, all else to the real stream."""

    def __init__(self, stream: Any, lines: LineBuffer) -> None:
        self._stream, self._lines = stream, lines
        self._lock = threading.Lock()
        self._rest = ""
        self._is_over = False

    def write(self, text: str) -> int:
        with self._lock:
            if self._is_over:
                self._stream.write(text)
                return len(text)
            *whole, self._rest = (self._rest + text).split("\n")
            for one in whole:
                self._lines.add(one)
        return len(text)

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        if self._is_over:
            self._stream.flush()

    def end(self) -> None:
        """Stop redirecting: later writes go to the real stream."""
        with self._lock:
            self._is_over = True
            rest, self._rest = self._rest, ""
        if rest:
            self._stream.write(rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redirected_output(console: Console) -> Iterator[LineBuffer]:
    """Collect what other code prints and logs to the terminal, because it would break up the view."""
    lines = LineBuffer()
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                stack.enter_context(_redirected_stream(name, stream, lines))
        assert not isinstance(console.file, StreamRedirect), (
            "the console needs a file of its own: Console(file=sys.stderr)"
        )
        try:
            yield lines
        finally:
            # These lines arrived after the last drawing.
            console.file.writelines(f"{text}\n" for text in lines.taken())


@contextmanager
def _redirected_stream(name: str, stream: Any, lines: LineBuffer) -> Iterator[None]:
    redirect = StreamRedirect(stream, lines)
    handlers = [handler for handler in _stream_handlers() if handler.stream is stream]
    setattr(sys, name, redirect)
    for handler in handlers:
        handler.setStream(redirect)
    try:
        yield
    finally:
        setattr(sys, name, stream)
        for handler in handlers:
            if handler.stream is redirect:
                handler.setStream(stream)
        redirect.end()


def _stream_handlers() -> list[Any]:
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [one for one in known if isinstance(one, logging.Logger)]
    return [one for logger in loggers for one in logger.handlers if isinstance(one, logging.StreamHandler)]


def _draw(view: View, console: Console, lines: LineBuffer, over: threading.Event) -> None:
    def look() -> Text:
        return frame(view.look(), console.width, console.height)

    live = Live(look(), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with live:
        # Keep the cursor visible: a process that is killed could not show it again.
        console.show_cursor(True)
        is_over = False
        while not is_over:
            # Show a line soon after it arrives, because the process may end right after it; but let a burst of lines
            # gather.
            lines.arrived.wait(DRAW_S)
            is_over = over.wait(GATHER_S)
            if texts := lines.taken():
                console.print(Text.from_ansi("\n".join(texts)), soft_wrap=True)
            live.update(look(), refresh=True)


def _write_lines(view: View, write_line: Callable[[str], None], over: threading.Event) -> None:
    last_written: dict[str, object] = {}
    is_over = False
    while not is_over:
        is_over = over.wait(LINE_S)
        for one in view.look():
            records = sum(reading.records for reading in one.objects)
            figures = (one.changes, one.failed_attempts, one.state, len(one.alarms), one.ledger_down, records)
            # An idle pipeline gets no lines.
            if one.sources and (is_over or last_written.get(one.pipeline) != figures):
                last_written[one.pipeline] = figures
                write_line(line(one))


def _guarded(work: Callable[[], None], give_up: Callable[[], None]) -> None:
    """Run the display; an error in it is logged, and does not stop the worker."""
    try:
        work()
    except Exception:
        give_up()
        logging.getLogger("keywise").exception("the view failed; the work goes on without it")
