"""The machine that measures: what it is, and how busy it was with other work."""

import os
import platform
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

ROOT = Path(__file__).parents[1]


class Machine(msgspec.Struct, frozen=True):
    """What a figure depends on."""

    cpus: int
    processor: str
    system: str
    python: str
    sqlite: str
    date: str


def this_machine() -> Machine:
    return Machine(
        cpus=os.cpu_count() or 1,
        processor=_processor(),
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        date=datetime.now(UTC).date().isoformat(),
    )


class Bystander:
    """Measures how much of the machine others used meanwhile; its own process and ended children do not count.

    What the kernel does on our behalf, such as writing to the disk, counts as others' work.
    """

    others = 0.0
    """The share of all CPUs, from 0 to 1; NaN where it cannot be told."""

    def __enter__(self) -> Self:
        self._wall, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()
        return self

    def __exit__(self, *error: object) -> None:
        capacity_s = (time.monotonic() - self._wall) * (os.cpu_count() or 1)
        others_s = _busy_s() - self._busy - (_own_s() - self._own)
        self.others = max(0.0, others_s / capacity_s)


def load() -> str:
    """The load averages of 1, 5 and 15 minutes."""
    try:
        return " ".join(f"{one:.2f}" for one in os.getloadavg())
    except OSError:
        return "unknown"


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    limit_s: float = 900,
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run one of our modules in a fresh process and return what its last line says as JSON."""
    command = [str(python), "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1])


def _busy_s() -> float:
    """Seconds that all CPUs together have worked since the boot."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return float("nan")
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, words[1:])
    return (user + nice + system + irq + softirq + steal) / float(os.sysconf("SC_CLK_TCK"))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
