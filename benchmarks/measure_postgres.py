"""Postgres: changes per second beside the raw loop, with two workers, and with a handler; delays; bytes per entry."""

import asyncio
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import msgspec

from benchmarks import workload
from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.fleet_postgres import drain_by
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_latency import percentiles

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.postgres import PostgresServer, postgres_server

TARGET = 0.85
TOGETHER = 0.8
"""Two workers beside one: the least. They share the CPUs of one machine with the server."""
LEASED_PER_S = 5_000
ENTRY_BYTES = 150
SIZE = "select pg_total_relation_size('keywise_marks')"
Turns = dict[str, list[Drained]]


def measure(scale: Scale) -> list[Figure]:
    """On a durable server with the settings that it comes with."""
    try:
        with durable_server() as server:
            return [
                *_ratio(scale, server),
                *_together(scale, server),
                _leased(scale, server),
                *_delays(scale, server),
                _entry(scale, server),
            ]
    except MissingServerError as error:
        return [Figure("keywise / raw on Postgres", None, "", str(error), at_least=TARGET)]


@contextmanager
def durable_server() -> Iterator[PostgresServer]:
    """On a disk, not in memory."""
    with postgres_server(None) as server:
        yield server


def drained(server: PostgresServer, what: str, name: str, job: Job, *more: str) -> Drained:
    """One drain in a fresh process and a fresh database."""
    url = server.create_database(name)
    arguments = [what, "--url", url, *job.arguments(), *more]
    return msgspec.convert(run_module("benchmarks.drain_postgres", arguments), Drained)


def _ratio(scale: Scale, server: PostgresServer) -> list[Figure]:
    """The ratio for even keys, turn by turn."""
    job = Job(scale.changes, scale.keys, scale.batch)
    turns: Turns = {"raw": [], "keywise": []}
    with Bystander() as bystander:
        for number in range(scale.rounds):
            for what, done in turns.items():
                done.append(drained(server, what, f"{what}_{number}", job))
    raw, keywise = (statistics.median(one.changes_per_s for one in done) for done in turns.values())
    raw_cpu, keywise_cpu = (statistics.median(one.cpu_us_per_change for one in done) for done in turns.values())
    paired = [k.changes_per_s / r.changes_per_s for r, k in zip(turns["raw"], turns["keywise"], strict=True)]
    return [
        Figure("raw loop on Postgres", raw, "changes/s", f"{raw_cpu:.1f} µs of CPU a change in the client"),
        Figure("keywise on Postgres", keywise, "changes/s", f"{keywise_cpu:.1f} µs of CPU a change in the client"),
        Figure(
            "keywise / raw on Postgres",
            keywise / raw,
            "",
            f"medians of {scale.rounds}, turn by turn {min(paired):.2f} to {max(paired):.2f}",
            at_least=TARGET,
            # The server is no child of this process, so its own work counts as that of others.
            detail={"job": job, "turns": turns, "others": bystander.others},
        ),
    ]


def _together(scale: Scale, server: PostgresServer) -> list[Figure]:
    """One queue drained by one process and by two, turn by turn."""
    bodies = workload.changes(scale.changes, scale.keys)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    before = server.log.count("deadlock detected")
    for number in range(min(3, scale.rounds)):
        for workers, speed in speeds.items():
            url = server.create_database(f"by_{workers}_{number}")
            speed.append(drain_by(workers, bodies, url, scale.batch)[0])
    one, two = (statistics.median(speed) for speed in speeds.values())
    deadlocks = server.log.count("deadlock detected") - before
    return [
        Figure("two workers on Postgres", two, "changes/s", f"one: {one:,.0f}", detail={"speeds": speeds}),
        Figure("two workers / one", two / one, "", at_least=TOGETHER),
        Figure("deadlocks", deadlocks, "", at_most=0),
    ]


def _leased(scale: Scale, server: PostgresServer) -> Figure:
    job = Job(scale.changes // 2, scale.keys, scale.batch)
    turns = [drained(server, "leased", f"leased_{number}", job) for number in range(min(3, scale.rounds))]
    speed = statistics.median(one.changes_per_s for one in turns)
    note = "a handler that awaits 1 ms per change, one process"
    return Figure("leased on Postgres", speed, "changes/s", note, at_least=LEASED_PER_S, detail={"turns": turns})


def _delays(scale: Scale, server: PostgresServer) -> list[Figure]:
    figures = []
    for what in ("raw", "keywise"):
        url = server.create_database(f"delays_{what}")
        figures += percentiles(scale, "benchmarks.latency_postgres", [what, "--url", url], f"{what} on Postgres")
    return figures


def _entry(scale: Scale, server: PostgresServer) -> Figure:
    """A ledger that knows many keys, each seen once; its index counts too."""
    job = Job(1, scale.ledger_keys, scale.batch)
    drained(server, "keywise", "entries", job, "--known")
    size = asyncio.run(_size(server.url.removesuffix("postgres") + "entries"))
    note = f"{scale.ledger_keys:,} uuid keys, table and index"
    return Figure("idle ledger entry on Postgres", size / scale.ledger_keys, "bytes/key", note, at_most=ENTRY_BYTES)


async def _size(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(SIZE))
    finally:
        await connection.close()
