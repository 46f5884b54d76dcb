"""Worker processes of an object pipeline that can be killed and started again."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from chaos.fleet import LIMIT_S, until
from chaos.object_worker import ObjectAssignment
from running import scaled

SCRIPT = Path(__file__).with_name("object_worker.py")


class ObjectWorker:
    """One place for a worker: a process, and after its death another one."""

    def __init__(self, folder: Path, name: str, assignment: ObjectAssignment) -> None:
        self.name = name
        self._assignment = folder / f"{name}.assignment"
        self._assignment.write_bytes(msgspec.json.encode(assignment))
        self._notes = Path(assignment.notes)
        self._errors = folder / f"{name}.errors"
        self._process: subprocess.Popen[bytes] | None = None
        self._said_before = 0
        """How many notes earlier lives have left."""

    def start(self) -> "ObjectWorker":
        self._said_before = len(self.notes)
        with self._errors.open("wb") as errors:
            command = [sys.executable, str(SCRIPT), str(self._assignment)]
            self._process = subprocess.Popen(command, stderr=errors)
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"worker {self.name} was never started"
        return self._process

    @property
    def notes(self) -> list[str]:
        """All that it said, over all its lives."""
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    @property
    def is_started(self) -> bool:
        """Whether the pipeline of its last life runs, or ran."""
        return self._has_said("started")

    @property
    def has_written(self) -> bool:
        """Whether its last life has written a part of an object.

        Workers that die before that, again and again, make an object a dead letter: it may be what kills them.
        """
        return self._has_said("has written")

    def _has_said(self, line: str) -> bool:
        return self.notes[self._said_before :].count(line) > 0

    def check(self) -> None:
        """Raise if it has ended though no test ended it."""
        status = self.process.poll()
        assert status is None, f"worker {self.name} ended with {status}: {self._errors.read_text()[-2000:]}"

    def start_again_if_killed(self) -> bool:
        """Whether it had killed itself; it lives again then."""
        if self.process.poll() is None:
            return False
        assert self.process.returncode == -signal.SIGKILL, self._errors.read_text()[-2000:]
        self.start()
        return True

    def kill(self) -> None:
        self.check()
        self.process.kill()
        self.process.wait(scaled(LIMIT_S))

    def drain(self) -> None:
        """Let it finish what it has begun; it must end well."""
        until(lambda: self.is_started, f"worker {self.name} to start", self.check)
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(scaled(2 * LIMIT_S))
        assert status == 0, self._errors.read_text()[-2000:]

    def close(self) -> None:
        """End it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(scaled(LIMIT_S))
