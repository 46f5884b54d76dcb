"""Looks again and again: `--watch` of a command that otherwise tells something once."""

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

from keywise.cli.output import duration, iso, print_error, refuse, stamp
from keywise.core.errors import SettingsError, UnavailableError
from keywise.core.settings import seconds

EVERY_S = 1.0
EVERY_MIN_S = 0.1

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

WatchOption = Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")]
EveryOption = Annotated[
    str | None,
    typer.Option("--every", metavar="DURATION", help="How often --watch looks, as 500ms, 2s; 1s without it."),
]


def watch_or_once(
    look: Callable[[], None],
    *,
    watch: bool,
    every: str | None,
    json: bool,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Look once, or with `watch` until Ctrl-C; a look prints what it found, as one JSON document with `json`.

    In a terminal each look takes the place of the one before; elsewhere it follows, and JSON has a line for each.
    """
    every_s = _parse_every(every, watch)
    if not watch:
        look()
        return
    show = _show_json if json else _show_screen if sys.stdout.isatty() else _show_text
    try:
        found = _captured(look)
        if show is _show_screen:
            # What stands there moves up and away, and is not written over.
            sys.stdout.write("\n" * Console().height)
        show(found, every_s)
        while True:
            wait(every_s)
            _repeat(look, show, every_s)
    except KeyboardInterrupt:
        # That is how it is meant to end.
        print(file=sys.stderr)


def _repeat(look: Callable[[], None], show: Callable[[str, float], None], every_s: float) -> None:
    # Started in the background of a script, a process is deaf to Ctrl-C unless it asks for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = _captured(look)
    except UnavailableError as error:
        # It was there a moment ago, and whoever watches wants to see it come back.
        print_error(error)
    else:
        show(found, every_s)


def _parse_every(every: str | None, watch: bool) -> float:
    if every is None:
        return EVERY_S
    if not watch:
        refuse("--every says how often --watch looks; add --watch")
    try:
        every_s = seconds(every)
    except SettingsError as error:
        refuse(f"--every: {error}")
    if every_s < EVERY_MIN_S:
        refuse(f"--every: {every} is too often; write 100ms or more")
    return every_s


class _CapturedOutput(io.StringIO):
    """What a look prints, in the shape that the real stream would have."""

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
    """Written in one piece and over the last look, so that nothing flickers."""
    height = Console().height
    lines = [f"{stamp(time.time())}, every {duration(every_s)}", "", *found.splitlines()]
    if len(lines) >= height:
        lines = [*lines[: height - 2], "…"]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()
