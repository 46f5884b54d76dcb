"""The option `--watch`: repeats a command that otherwise prints its result once."""

import io
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.console import Console

from keywise.cli.options import parse_duration
from keywise.cli.output import duration, iso, print_error, refuse, stamp
from keywise.core.errors import UnavailableError

EVERY_S = 1.0
EVERY_MIN_S = 0.1

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

WatchOption = Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")]
EveryOption = Annotated[
    str | None,
    typer.Option("--every", metavar="DURATION", help="How often --watch repeats, as 500ms, 2s; 1s without it."),
]


def watch_or_once(
    look: Callable[[], None],
    *,
    watch: bool,
    every: str | None,
    json: bool,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Call `look` once, or with `watch` until Ctrl-C. It prints its result, as one JSON document with `json`.

    In a terminal, each result replaces the one before. Elsewhere it follows, and JSON has one line for each.
    """
    every_s = _parse_every(every, watch)
    if not watch:
        look()
        return
    show = _show_json if json else _show_screen if sys.stdout.isatty() else _show_text
    try:
        found = _captured(look)
        if show is _show_screen:
            # Scroll the present text of the terminal up, so that it is not overwritten.
            sys.stdout.write("\n" * Console().height)
        show(found, every_s)
        while True:
            wait(every_s)
            _repeat(look, show, every_s)
    except KeyboardInterrupt:
        # Ctrl-C is the normal end.
        print(file=sys.stderr)


def _repeat(look: Callable[[], None], show: Callable[[str, float], None], every_s: float) -> None:
    # A process that a script has started in the background ignores SIGINT unless it installs a handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        show(_captured(look), every_s)
    except UnavailableError as error:
        # The first look succeeded, so this is an outage: continue, to show when it ends.
        print_error(error)


def _parse_every(every: str | None, watch: bool) -> float:
    if every is None:
        return EVERY_S
    if not watch:
        refuse("--every says how often --watch repeats; add --watch")
    every_s = parse_duration(every, "--every")
    if every_s < EVERY_MIN_S:
        refuse(f"--every: {every} is too often; write 100ms or more")
    return every_s


class _CapturedOutput(io.StringIO):
    """Captures the output of a look, formatted as for the real stream."""

    def __init__(self) -> None:
        super().__init__()
        self._is_terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        return self._is_terminal


def _captured(look: Callable[[], None]) -> str:
    with redirect_stdout(_CapturedOutput()) as page:
        look()
    return page.getvalue()


def _show_json(found: str, _: float) -> None:
    print(json.dumps({"at": iso(time.time())} | json.loads(found)), flush=True)


def _show_text(found: str, _: float) -> None:
    print(f"{stamp(time.time())}\n{found}", flush=True)


def _show_screen(found: str, every_s: float) -> None:
    """Write the whole screen over the last result, in one call, so that it does not flicker."""
    height = Console().height
    lines = [f"{stamp(time.time())}, every {duration(every_s)}", "", *found.splitlines()]
    if len(lines) >= height:
        lines = [*lines[: height - 2], "…"]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()
