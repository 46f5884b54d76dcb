"""How long live changes take beside a backlog of bulk changes, and idle keys beside a hot one."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from benchmarks.figure import Figure, Scale
from benchmarks.flow import Job, Seen
from benchmarks.latency import READY
from benchmarks.machine import ROOT, Bystander, run_module

RATE = 100
SLOWER_AT_MOST = 3.0
IDLE_KEYS = 1000
ROUNDS_MAX = 3
HOT_EVERY = 5
"""With 100 changes of idle keys a second, 20 of the hot key: four times as many as its handler can do."""


class Round(msgspec.Struct):
    """One run of a sender and a worker."""

    p50_ms: float
    p99_ms: float
    live_per_s: float
    bulk_per_s: float
    messages: int
    others: float
    """The share of the CPUs that other work used meanwhile."""


def measure(scale: Scale) -> list[Figure]:
    figures: list[Figure] = []
    for way in ("transaction", "leased"):
        figures += _beside_bulk(scale, way, scale.bulk)
    return figures + _beside_hot(scale)


def _beside_bulk(scale: Scale, way: str, bulk: int) -> list[Figure]:
    """By turns without and with a backlog; the figures are medians of all turns."""
    job = Job("", way, live=round(RATE * scale.flow_s), rate=RATE)
    without: list[Round] = []
    beside: list[Round] = []
    for _ in range(min(scale.rounds, ROUNDS_MAX)):
        without.append(_round(job))
        beside.append(_round(msgspec.structs.replace(job, bulk=bulk)))
    alone_ms, beside_ms = _median(without, "p99_ms"), _median(beside, "p99_ms")
    detail = {"without": without, "beside": beside}
    others = max(one.others for one in (*without, *beside))
    note = f"{RATE} live changes/s, {bulk:,} bulk changes; others used up to {others:.0%} of the CPUs"
    live, bulk_speed = _median(beside, "live_per_s"), _median(beside, "bulk_per_s")
    return [
        Figure(f"live p50, {way}, no backlog", _median(without, "p50_ms"), "ms"),
        Figure(f"live p50, {way}, backlog", _median(beside, "p50_ms"), "ms"),
        Figure(f"live p99, {way}, no backlog", alone_ms, "ms"),
        Figure(f"live p99, {way}, backlog", beside_ms, "ms", note, detail=detail),
        Figure(f"live p99, {way}, backlog / none", beside_ms / alone_ms, "×", at_most=SLOWER_AT_MOST),
        Figure(f"bulk meanwhile, {way}", bulk_speed, "changes/s", f"live meanwhile: {live:,.0f} changes/s"),
    ]


def _beside_hot(scale: Scale) -> list[Figure]:
    job = Job("", "leased", live=round(RATE * scale.flow_s), rate=RATE, idle_keys=IDLE_KEYS)
    without: list[Round] = []
    beside: list[Round] = []
    for _ in range(min(scale.rounds, ROUNDS_MAX)):
        without.append(_round(job))
        beside.append(_round(msgspec.structs.replace(job, hot_every=HOT_EVERY)))
    alone_ms, beside_ms = _median(without, "p99_ms"), _median(beside, "p99_ms")
    note = f"{IDLE_KEYS:,} idle keys, {RATE}/s; the hot one {RATE // HOT_EVERY}/s with a handler of 200 ms"
    detail = {"without": without, "beside": beside}
    return [
        Figure("idle keys p99, leased, no hot key", alone_ms, "ms"),
        Figure("idle keys p99, leased, hot key", beside_ms, "ms", note, detail=detail),
    ]


def _round(job: Job) -> Round:
    """Only what was due while the backlog lasted counts."""
    with Bystander() as bystander, tempfile.TemporaryDirectory() as folder:
        due, seen = _run(msgspec.structs.replace(job, folder=folder))
    end = _end_of_backlog(job, seen)
    delays_ms = [1000 * (at - when) for at, when in zip(seen.live, due, strict=True) if when < end]
    if len(delays_ms) < 2:
        raise RuntimeError(f"the backlog of {job.bulk} bulk changes was gone before {RATE} live changes were sent")
    percentiles = statistics.quantiles(delays_ms, n=100, method="inclusive")
    bulk = [done for at, done in seen.bulk if due[0] <= at <= end]
    times = [at for at, _ in seen.bulk if due[0] <= at <= end]
    bulk_per_s = (bulk[-1] - bulk[0]) / (times[-1] - times[0]) if len(bulk) > 1 else 0.0
    live_per_s = len(delays_ms) / (min(end, due[-1]) - due[0])
    return Round(percentiles[49], percentiles[98], live_per_s, bulk_per_s, len(delays_ms), bystander.others)


def _end_of_backlog(job: Job, seen: Seen) -> float:
    """The moment at which the last bulk change but a few batches was done."""
    if not seen.bulk:
        return float("inf")
    nearly = seen.bulk[-1][1] * 0.98  # Not all are worked on, for some are superseded while they wait.
    return next(at for at, done in seen.bulk if done >= nearly)


def _run(job: Job) -> tuple[Sequence[float], Seen]:
    command = [sys.executable, "-m", "benchmarks.flow", "work", *job.arguments()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            if worker.stdout.readline().strip() != READY:
                raise RuntimeError("the worker did not start")
            due: Sequence[float] = run_module("benchmarks.flow", ["send", *job.arguments()])
            return due, msgspec.json.decode(worker.stdout.readline(), type=Seen)
        finally:
            worker.terminate()


def _median(rounds: Sequence[Round], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in rounds))
