"""Worker processes that take part in a reindex, and can be killed and started again."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from chaos.reindex_worker import PAGE
from running import scaled

DRAIN_S = 60.0
STARTED = "started "


class ReindexCrew:
    """Places for workers: each has a process, and after its death another one. They share one file of notes each."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str] = {}) -> None:
        self.killed: list[int] = []
        """The process ids of workers that were killed."""
        self.faults: list[str] = []
        self._folder = folder
        self._commands = commands
        self._environment = environment
        self._processes: list[asyncio.subprocess.Process] = []
        self._forgotten = [0] * len(commands)
        self._dying: set[int] = set()
        """Workers that are being killed, and have no process that lives."""
        self._born_at: list[int] = []
        """How long the notes of each worker were when its last life began."""

    async def start(self) -> None:
        for number in range(len(self._commands)):
            self._born_at.append(0)
            self._processes.append(await self._started(number))

    def able(self) -> list[int]:
        """The workers that have read a page in this life: others would die before they have begun."""
        return [number for number in range(len(self._processes)) if PAGE in self._said(number)]

    def notes_of(self, number: int) -> str:
        path = notes_path(self._folder, number)
        return path.read_text() if path.exists() else ""

    @property
    def notes(self) -> list[str]:
        """All that workers have said since `forget`, over all their lives."""
        said = (self.notes_of(number)[start:] for number, start in enumerate(self._forgotten))
        return [line for text in said for line in text.splitlines()]

    def forget(self) -> None:
        self._forgotten = [len(self.notes_of(number)) for number in range(len(self._commands))]

    async def kill(self, number: int) -> None:
        """`kill -9`, and start the next life."""
        self._check()
        victim = self._processes[number]
        self._dying.add(number)
        victim.kill()
        await victim.wait()
        self.killed.append(victim.pid)
        self._processes[number] = await self._started(number)
        self._dying.discard(number)

    async def drain(self) -> None:
        """Let all finish what they have begun; each has to end well."""
        self._check()
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(scaled(DRAIN_S)):
            for number, process in enumerate(self._processes):
                status = await process.wait()
                # One that was started a moment ago does not listen to signals yet.
                is_young = status == -signal.SIGTERM and STARTED not in self._said(number)
                if status != 0 and not is_young:
                    self.faults.append(f"worker {number} ended with {status}: {self._errors(number)}")

    async def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _said(self, number: int) -> str:
        """What a worker has said in this life."""
        return self.notes_of(number)[self._born_at[number] :]

    def _check(self) -> None:
        for number, process in enumerate(self._processes):
            assert number in self._dying or process.returncode is None, (
                number,
                process.returncode,
                self._errors(number),
            )

    def _errors(self, number: int) -> str:
        return self._log(number).read_text()[-2000:]

    def _log(self, number: int) -> Path:
        return self._folder / f"worker{number}.errors"

    async def _started(self, number: int) -> asyncio.subprocess.Process:
        self._born_at[number] = len(self.notes_of(number))
        with self._log(number).open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, *self._commands[number]), stdout=log, stderr=log, env=os.environ | self._environment
            )


def notes_path(folder: Path, number: int) -> Path:
    return folder / f"worker{number}.notes"
