"""The process of a server for tests: it has started once it answers, and is stopped by its process id."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

START_S = 110
LOOK_S = 0.02


class ServerProcess:
    """At most one process at a time, which works and logs in a scratch folder."""

    def __init__(self, folder: Path, answers: Callable[[], bool], environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._answers = answers
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        """Return once the server answers; raises RuntimeError with the end of its log if it does not."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if _has_ended(self._process) or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{command[0]} does not answer: {self.log[-2000:]}")

    def stop(self, *, gently: bool = False) -> None:
        """At once, as a crash would, or gently, as an administrator does it."""
        if self._process is not None:
            self._process.terminate() if gently else self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ends within a moment."""
    try:
        process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True
