"""Worker processes that can be killed, stopped, woken and started again, and what they leave behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from chaos.store import Store
from chaos.witness import FLAGS_BYTES, INSIDE, OPEN, OPEN_AT, STARTED, Assignment
from keywise.core.clock import boot_time
from running import scaled

SCRIPT = Path(__file__).with_name("worker.py")
LOOK_S = 0.005
LIMIT_S = 30.0


class Worker:
    """One place for a worker: a process, and after its death another one."""

    def __init__(self, store: Store, way: str, name: str, *, gate: str = "", **options: Any) -> None:
        self._folder, self.name = store.folder, name
        visibility, more = options.pop("visibility", "60s"), options.pop("environment", {})
        self._flags, self._notes = self._path("flags"), self._path("notes")
        shelf, files = store.shelf, (str(self._flags), str(self._notes))
        ledger, url = options.pop("ledger", shelf.ledger), options.pop("url", shelf.url)
        queue = getattr(shelf, "queue", "")
        self._assignment = Assignment(shelf.on, ledger, url, way, *files, options, visibility, queue, gate)
        self._environment = os.environ | more
        self._process: subprocess.Popen | None = None
        self._asleep_until = 0.0

    @property
    def process(self) -> subprocess.Popen:
        assert self._process is not None, f"worker {self.name} was never started"
        return self._process

    def start(self, *, wait: bool = True) -> "Worker":
        """Start a process; with `wait`, return once its pipeline runs."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._flags.write_bytes(bytes(FLAGS_BYTES))
        told = self._path("assignment")
        told.write_bytes(msgspec.json.encode(self._assignment))
        with self._path("errors").open("wb") as errors:
            command = [sys.executable, str(SCRIPT), str(told)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, env=self._environment)
        if wait:
            until(lambda: self.is_started, f"worker {self.name} to start", self.check)
        return self

    @property
    def is_started(self) -> bool:
        return self._flags.read_bytes()[STARTED] == 1

    @property
    def is_inside(self) -> bool:
        """Whether it has a batch open, or had when it died."""
        return self._flags.read_bytes()[INSIDE] == 1

    @property
    def open_changes(self) -> int:
        """How many changes it has claimed and not concluded."""
        return int(OPEN.unpack_from(self._flags.read_bytes(), OPEN_AT)[0])

    @property
    def notes(self) -> str:
        """All that it said, over all its lives."""
        return self._notes.read_text() if self._notes.exists() else ""

    @property
    def cpu_wait_s(self) -> float | None:
        """How long its event loop could have run so far, but other processes had the CPU; None if Linux is not here."""
        statistics = Path(f"/proc/{self.process.pid}/schedstat")
        return int(statistics.read_text().split()[1]) / 1e9 if statistics.exists() else None

    def said(self, text: str) -> int:
        """How many notes begin with a text."""
        return sum(note.startswith(text) for note in self.notes.splitlines())

    def check(self) -> None:
        """Raise if it has died though nobody killed it."""
        status = self.process.poll()
        assert status is None, f"worker {self.name} ended with {status}: {self.errors}"

    def start_again_if_it_could_not(self) -> None:
        """As a supervisor does: without a server, a worker that starts ends with an error."""
        if not self.is_started and self.process.poll() is not None and "UnavailableError" in self.errors:
            self.start(wait=False)

    def kill(self) -> bool:
        """`kill -9`; whether it was inside a batch then."""
        self.check()
        self.process.kill()
        self.process.wait(scaled(LIMIT_S))
        return self.is_inside

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def sleep(self, seconds: float) -> None:
        """Stop it, and wake it up later, whoever may wait meanwhile for a file that it holds."""
        self.signal(signal.SIGSTOP)
        self._asleep_until = boot_time() + seconds
        threading.Timer(seconds, self.process.send_signal, [signal.SIGCONT]).start()

    @property
    def is_awake(self) -> bool:
        """Whether it runs its pipeline, and was not sent to sleep."""
        return self.is_started and boot_time() > self._asleep_until

    def open_gate(self, times: int = 1) -> None:
        self.process.stdin.write(b"." * times)
        self.process.stdin.flush()

    def end(self) -> int:
        """The status that it ends with."""
        return self.process.wait(scaled(LIMIT_S))

    def close(self) -> None:
        """End whatever is left of it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(scaled(LIMIT_S))
        self._process.stdin.close()

    @property
    def errors(self) -> str:
        """What its last life said on stderr."""
        return self._path("errors").read_text()[-2000:]

    def _path(self, what: str) -> Path:
        return self._folder / f"{self.name}.{what}"


def until(
    condition: Callable[[], bool], what: str, check: Callable[[], None] = lambda: None, *, limit_s=LIMIT_S
) -> None:
    """Return when a condition holds; one that never does raises TimeoutError."""
    give_up_at = boot_time() + scaled(limit_s)
    while not condition():
        check()
        if boot_time() > give_up_at:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        pause(LOOK_S)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def drained(*workers: Worker) -> None:
    """Let them finish what they have begun; each must end well."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        assert worker.end() == 0, worker.notes[-2000:]
