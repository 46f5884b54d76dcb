"""A command in a terminal of its own: a test sees what a person at it would, and presses what they would."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from running import scaled

LIMIT_S = 60
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class Terminal:
    """A pseudo terminal, the process in it, and all that it wrote."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], *, columns: int = 80
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        sizes = {"COLUMNS", "LINES", "NO_COLOR"}
        settings = {name: value for name, value in environment.items() if name not in sizes} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=settings,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # Tests that run in the background ignore Ctrl-C, and what they start would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no thread runs here
        )
        os.close(theirs)
        self._written = b""

    @property
    def raw(self) -> str:
        return self._written.decode("utf-8", "replace").replace("\r\n", "\n")

    @property
    def text(self) -> str:
        """Without what the terminal obeys."""
        return ESCAPES.sub("", self.raw).replace("\r", "")

    @property
    def shows_cursor(self) -> bool:
        return self.raw.rfind(HIDE) <= self.raw.rfind(SHOW)

    def wait_for(self, is_there: Callable[[str], object]) -> None:
        """Read until the text has something."""
        until = time.monotonic() + scaled(LIMIT_S)
        while not is_there(self.text):
            assert self._read(until - time.monotonic()), f"it ended, or took too long:\n{self.text}"

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read until the process has ended; its exit status."""
        until = time.monotonic() + scaled(LIMIT_S)
        while self._read(until - time.monotonic()):
            pass
        os.close(self._ours)
        return self.process.wait(scaled(LIMIT_S))

    def _read(self, limit_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, limit_s))
        if not ready:
            self.process.kill()
            return False
        try:
            read = os.read(self._ours, 65536)
        except OSError:
            # Linux says so when nobody has the other side open any more.
            return False
        self._written += read
        return bool(read)
