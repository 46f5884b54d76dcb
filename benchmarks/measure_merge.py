"""The merge queue: calls per second for each store, beside a bare loop with advisory locks and beside DBOS; delays."""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import msgspec

from benchmarks.callers import Called, Load
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_postgres import durable_server
from benchmarks.peers.contenders import THEIRS

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.postgres import PostgresServer
from servers.redis import RedisServer, redis_server

TARGET, TIMES_DBOS = 0.5, 10.0
CALLERS, KEY_COUNTS = 64, (1, 100)
ROUNDS_MAX = 3
PAUSE_S = 0.02
"""Of the only caller, between its calls, where there is little to do."""
BARE, DBOS, MEMORY = "bare", "dbos", "memory"
ON_POSTGRES = ("postgres-lock", "postgres-queue")
ON_FILE, ON_REDIS = ("bare-sqlite", "sqlite"), ("bare-redis", "redis")
BESIDE = {**dict.fromkeys(ON_POSTGRES, BARE), ON_FILE[1]: ON_FILE[0], ON_REDIS[1]: ON_REDIS[0]}
"""The bare loop that does the same by hand, on the same store."""
SHOWN = {
    BARE: "bare loop with advisory locks",
    "bare-sqlite": "bare loop on SQLite",
    "bare-redis": "bare loop with locks in Redis",
    DBOS: "DBOS, partitioned queue",
}
NOT_HERE = "the peers are not installed; make build/peers/.ready does it"

Turns = dict[str, list[Called]]


def measure(scale: Scale) -> list[Figure]:
    """On a durable server with the settings that it comes with, on a file, and on Redis with an append-only file."""
    try:
        with ExitStack() as stack:
            server = stack.enter_context(durable_server())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            course = Course(scale, server, folder, _redis(stack))
            figures = [figure for keys in KEY_COUNTS for figure in _speeds(course, keys)]
            return [*figures, *_delays(course)]
    except MissingServerError as error:
        return [Figure("serial function / bare loop", None, "", str(error), at_least=TARGET)]


class Course:
    """Runs everybody by turns, each time in a fresh process and a fresh database."""

    def __init__(self, scale: Scale, server: PostgresServer, folder: Path, redis: RedisServer | None) -> None:
        self.rounds = min(ROUNDS_MAX, scale.rounds)
        self.seconds = scale.calls_s
        self._server = server
        self._folder = folder
        self._redis = redis
        self._databases = 0
        others = [*(ON_REDIS if redis is not None else ()), *([DBOS] if THEIRS.exists() else [])]
        self.names = [BARE, *ON_POSTGRES, *ON_FILE, MEMORY, *others]

    def run(self, load: Load) -> tuple[Turns, float]:
        """How it went for each, and how much of the machine others used."""
        turns: Turns = {name: [] for name in self.names}
        with Bystander() as bystander:
            for _ in range(self.rounds):
                for name, done in turns.items():
                    done.append(self._called(name, load))
        return turns, bystander.others

    def _called(self, name: str, load: Load) -> Called:
        with ExitStack() as stack:
            self._databases += 1
            if name in ON_FILE:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder))
                url = f"sqlite:///{quote(folder)}/calls.db"
            elif name in ON_REDIS and self._redis is not None:
                url = self._redis.url
            elif name == MEMORY:
                url = "memory://"
            else:
                url = self._server.create_database(f"calls_{self._databases}")
            arguments = [name, "--url", url, *load.arguments()]
            if name == DBOS:
                told = run_module("benchmarks.peers.calls_dbos", arguments, python=THEIRS)
            else:
                told = run_module("benchmarks.serial_calls", arguments)
        return msgspec.convert(told, Called)


def _speeds(course: Course, keys: int) -> Iterator[Figure]:
    load = Load(CALLERS, keys, course.seconds)
    turns, others = course.run(load)
    speeds = {name: statistics.median(one.calls_per_s for one in done) for name, done in turns.items()}
    on = f"on {keys} key{'s' if keys > 1 else ''}"
    for name, done in turns.items():
        p99_ms = statistics.median(one.p99_ms for one in done)
        cpu_us = statistics.median(one.cpu_us_per_call for one in done)
        note = f"{CALLERS} callers, p99 {p99_ms:,.0f} ms, {cpu_us:,.0f} µs of CPU a call in the client"
        # Servers are no children of this process, so that their own work counts as that of others.
        detail = {"load": load, "turns": done, "others": others}
        yield Figure(f"{_shown(name)}, {on}", speeds[name], "calls/s", note, detail=detail)
    for name, by_hand in BESIDE.items():
        if name in turns:
            each = [ours.calls_per_s / bare.calls_per_s for ours, bare in zip(turns[name], turns[by_hand], strict=True)]
            note = f"medians of {course.rounds}, turn by turn {min(each):.2f} to {max(each):.2f}"
            ratio = speeds[name] / speeds[by_hand]
            yield Figure(f"{name} / bare loop, {on}", ratio, "", note, at_least=TARGET)
    for name in ON_POSTGRES:
        times = speeds[name] / speeds[DBOS] if DBOS in speeds else None
        yield Figure(f"{name} / DBOS, {on}", times, "×", "" if times else NOT_HERE, at_least=TIMES_DBOS)


def _delays(course: Course) -> Iterator[Figure]:
    """One caller that takes its time: what a call costs when nobody else wants anything."""
    load = Load(1, KEY_COUNTS[-1], course.seconds, PAUSE_S)
    turns, others = course.run(load)
    delays_ms = {name: statistics.median(one.p50_ms for one in done) for name, done in turns.items()}
    for name, done in turns.items():
        note = f"one caller, {1000 * PAUSE_S:g} ms between its calls"
        if name in BESIDE:
            note += f"; {delays_ms[name] - delays_ms[BESIDE[name]]:+.2f} ms beside the bare loop"
        detail = {"load": load, "turns": done, "others": others}
        yield Figure(f"one call, {_shown(name)}, p50", delays_ms[name], "ms", note, detail=detail)


def _redis(stack: ExitStack) -> RedisServer | None:
    """If there is one."""
    try:
        return stack.enter_context(redis_server(None))
    except MissingServerError:
        return None


def _shown(name: str) -> str:
    return SHOWN.get(name, f"serial function, {name}")
