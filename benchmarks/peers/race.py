"""One turn of one contender: a fresh database, a filled queue, its processes started, watched, stopped and checked."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import asyncpg
import msgspec

from benchmarks.machine import ROOT
from benchmarks.peers import processes, store
from benchmarks.peers.checker import Verdict, check, check_calls
from benchmarks.peers.contenders import Contender
from benchmarks.peers.place import Handler, Place
from benchmarks.peers.record import Line, Reader

WARM_UP = 0.1
"""The first tenth of the changes is not measured, for anybody."""
LOOK_S = 0.05
START_S = 60.0
QUIET_S = 60.0
"""A contender that settles nothing for so long has failed."""
STOP_S = 15.0


class Turn(msgspec.Struct, frozen=True):
    """How it went."""

    changes_per_s: float
    cpu_s_per_1000: float
    """Of all processes of the contender; servers are apart."""
    server_cpu_s_per_1000: float
    """Of Postgres and Redis."""
    peak_mb: float
    verdict: Verdict
    shares: dict[str, float] = {}
    """Where the CPU time of its process went, if that was asked for."""


class Cost(msgspec.Struct, frozen=True):
    """CPU seconds up to a moment."""

    settled: int
    own_s: float
    server_s: float


class FailedContenderError(Exception):
    """A contender stopped, or settled nothing any more; the message shows its last words."""


def run_turn(contender: Contender, place: Place, servers: set[int]) -> Turn:
    """Fill, work, check."""
    asyncio.run(store.create(place.postgres))
    subprocess.run(contender.command("fill"), cwd=ROOT, env=place.environment(), check=True, timeout=600)
    asyncio.run(store.refresh(place.postgres))
    reader = Reader(Path(place.log))
    with _working(contender, place) as (sessions, words):
        warm = _until(reader, int(WARM_UP * place.changes), sessions, words, servers)
        done = _until(reader, place.changes, sessions, words, servers)
        peak = processes.peak_bytes(sessions)
    # In a small trial all may be settled in one go.
    settled = max(1, done.settled - warm.settled)
    return Turn(
        changes_per_s=speed(reader.lines, place.changes),
        cpu_s_per_1000=1000 * (done.own_s - warm.own_s) / settled,
        server_cpu_s_per_1000=1000 * (done.server_s - warm.server_s) / settled,
        peak_mb=peak / 1e6,
        verdict=_verdict(place, reader.lines),
        shares=msgspec.json.decode(Path(place.shares).read_bytes()) if place.is_sampled else {},
    )


def _verdict(place: Place, lines: list[Line]) -> Verdict:
    if place.handler is Handler.NOOP:
        return check_calls(place.bodies(), lines)
    stored, rewrites = asyncio.run(store.read(place.postgres))
    return check(place.bodies(), lines, rewrites, stored)


def speed(lines: list[Line], changes: int) -> float:
    """Changes per second after the warm-up, until the last one was settled."""
    ends = sorted((line.ended_ns, line.settled) for line in lines if line.settled)
    totals = list(accumulate(settled for _, settled in ends))
    first = next(index for index, total in enumerate(totals) if total >= WARM_UP * changes)
    last = next(index for index, total in enumerate(totals) if total >= changes)
    return max(1, totals[last] - totals[first]) / max(1, ends[last][0] - ends[first][0]) * 1e9


@contextmanager
def _working(contender: Contender, place: Place) -> Iterator[tuple[set[int], Path]]:
    """The contender's processes, each a session of its own, and the file with what they say."""
    words = Path(place.log).with_suffix(".txt")
    with words.open("wb") as output:
        started = [
            subprocess.Popen(
                contender.command("work"),
                cwd=ROOT,
                env=place.environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for _ in range(contender.processes)
        ]
    try:
        yield {process.pid for process in started}, words
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            _await_end(process)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # The whole session, which is ours alone: a worker that was started by it must not outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(reader: Reader, settled: int, sessions: set[int], words: Path, servers: set[int]) -> Cost:
    """Wait until so many changes are settled, and tell what it has cost up to then."""
    seen, since = reader.settled, time.monotonic()
    while reader.read_on() < settled:
        if reader.settled > seen:
            seen, since = reader.settled, time.monotonic()
        if time.monotonic() - since > QUIET_S:
            raise FailedContenderError(f"only {seen} of {settled} changes are settled: {words.read_text()[-2000:]}")
        time.sleep(LOOK_S)
    own_s = processes.cpu_s(sessions)
    return Cost(reader.settled, own_s, sum(map(processes.family_cpu_s, servers)))


async def postmaster_of(url: str) -> int:
    """The process that started the one which serves us."""
    connection = await asyncpg.connect(url)
    try:
        return processes.parent_of(await connection.fetchval("select pg_backend_pid()"))
    finally:
        await connection.close()


@contextmanager
def log_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="keywise-bench-") as folder:
        yield str(Path(folder) / "log")
