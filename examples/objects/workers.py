"""Worker processes that are killed without warning and started again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.objects.place import Place

HERE = Path(__file__).parent
KEYWISE_COMMAND = [sys.executable, "-m", "keywise", "run", f"{HERE / 'pipeline.py'}:app", "--plain"]
NAIVE_COMMAND = [sys.executable, str(HERE / "naive.py")]


class Workers:
    """Processes of one command, as many as at the start at all times."""

    def __init__(self, command: list[str], place: Place) -> None:
        self._command = command
        self._environment = {**os.environ, **place.variables, "PYTHONPATH": str(HERE.parents[1])}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.killed = 0

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, count: int) -> None:
        for _ in range(count):
            self._processes.append(
                subprocess.Popen(
                    self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )

    def kill(self, pid: int) -> None:
        """Kill a worker by SIGKILL, which no process can handle, and start another one."""
        [victim] = [process for process in self._processes if process.pid == pid]
        victim.kill()
        victim.wait()
        self._processes.remove(victim)
        self.killed += 1
        self.start(1)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


@contextmanager
def started_workers(command: list[str], count: int, place: Place) -> Iterator[Workers]:
    workers = Workers(command, place)
    try:
        workers.start(count)
        yield workers
    finally:
        workers.stop()
