"""The command line as an operator uses it, and the workers: processes of their own."""

import asyncio
import os
import shlex
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from examples.reindex.place import Place
from rich.console import Console

HERE = Path(__file__).parent
APP = f"{HERE / 'pipeline.py'}:app"
LOG = "workers.log"


class Workers:
    """Processes of `keywise run`, which are stopped and started as a deployment does it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[Process] = []

    async def start(self, place: Place) -> None:
        with (Path(place.folder) / LOG).open("ab") as log:
            for _ in range(self._count):
                self._processes.append(await _started(place, ["run", APP, "--plain"], stdout=log))

    async def stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        for process in self._processes:
            await process.wait()
        self._processes = []


class Operator:
    """Runs commands, prints them with what they say, and compares their exit status with the expected one."""

    def __init__(self, console: Console, place: Place) -> None:
        self._console = console
        self._place = place
        self.surprises: list[str] = []
        """Commands that ended otherwise than the story expects."""

    async def run(self, *words: str, status: int = 0) -> str:
        """Run `keywise reindex …`; return what it has printed."""
        shown = shlex.join(["keywise", "reindex", *words])
        self._console.print(f"\n$ {shown}", style="cyan", markup=False)
        process = await _started(self._place, ["reindex", *words, "--app", APP], stdout=PIPE)
        output, _ = await process.communicate()
        text = output.decode()
        for line in text.splitlines():
            self._console.print(f"  {line}", markup=False)
        if process.returncode != status:
            self.surprises.append(f"{shown} ended with status {process.returncode}, and not {status}")
        return text


async def _started(place: Place, words: Sequence[str], *, stdout: int | BinaryIO) -> Process:
    environment = {**os.environ, **place.variables, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "keywise", *words]
    return await asyncio.create_subprocess_exec(*command, env=environment, stdin=DEVNULL, stdout=stdout, stderr=STDOUT)
