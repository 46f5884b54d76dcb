"""Postgres: a handler of one change that does nothing, beside the raw loop of claims; and the memory of its worker."""

import statistics
import sys

from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_postgres import drained, durable_server
from benchmarks.memory import memory_figures

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.postgres import PostgresServer

PER_S, STRETCH_PER_S = 10_000, 14_000
FEW_KEYS, FEW_KEYS_PER_S = 1_000, 13_000
RAW_BATCH = 512
"""What the raw loop claims at once; keywise has the settings that it comes with."""


def measure(scale: Scale) -> list[Figure]:
    """In the strategy `leased`, one process, on a durable server with the settings that it comes with."""
    try:
        with durable_server() as server:
            return [*_speeds(scale, server), *_memory(scale, server)]
    except MissingServerError as error:
        return [Figure("handler that does nothing, distinct keys", None, "changes/s", str(error), at_least=PER_S)]


def _speeds(scale: Scale, server: PostgresServer) -> list[Figure]:
    """By turns: the raw loop, a key for each change, and few keys."""
    job = Job(scale.changes // 2, FEW_KEYS, RAW_BATCH)
    raw, noop, few = list[Drained](), list[Drained](), list[Drained]()
    with Bystander() as bystander:
        for number in range(scale.rounds):
            raw.append(drained(server, "raw_leased", f"raw_leased_{number}", job, "--distinct"))
            noop.append(drained(server, "noop", f"noop_{number}", job, "--distinct"))
            few.append(drained(server, "noop", f"few_{number}", job))
    paired = [ours.changes_per_s / theirs.changes_per_s for theirs, ours in zip(raw, noop, strict=True)]
    detail = {"job": job, "raw": raw, "noop": noop, "few": few, "others": bystander.others}
    return [
        Figure("raw loop of claims, distinct keys", _speed(raw), "changes/s", f"no handler; {_cpu(raw)}"),
        Figure(
            "handler that does nothing, distinct keys",
            _speed(noop),
            "changes/s",
            f"{_calls(noop, job)}; {_cpu(noop)}; stretch {STRETCH_PER_S:,}",
            at_least=PER_S,
            detail=detail,
        ),
        Figure(
            "handler that does nothing / raw loop of claims",
            _speed(noop) / _speed(raw),
            "",
            f"medians of {scale.rounds}, turn by turn {min(paired):.2f} to {max(paired):.2f}",
        ),
        Figure(
            f"handler that does nothing, {FEW_KEYS:,} keys",
            _speed(few),
            "changes/s",
            f"{_calls(few, job)}; {_cpu(few)}",
            at_least=FEW_KEYS_PER_S,
        ),
    ]


def _memory(scale: Scale, server: PostgresServer) -> list[Figure]:
    arguments = ["--url", server.create_database("memory"), "--changes", str(scale.memory_changes)]
    run_module("benchmarks.memory_postgres", ["send", *arguments])
    samples: list[float] = run_module("benchmarks.memory_postgres", ["work", *arguments])
    return memory_figures("memory, handler that does nothing", samples, scale.memory_changes)


def _speed(turns: list[Drained]) -> float:
    return statistics.median(one.changes_per_s for one in turns)


def _cpu(turns: list[Drained]) -> str:
    return f"{statistics.median(one.cpu_us_per_change for one in turns):.0f} µs of CPU a change in the client"


def _calls(turns: list[Drained], job: Job) -> str:
    return f"{statistics.median(one.calls for one in turns):,.0f} handler calls for {job.changes:,} messages"
