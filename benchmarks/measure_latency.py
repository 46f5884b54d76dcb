"""Milliseconds from sending to committed at a steady rate, beside the raw loop measured in the same way."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain

import msgspec

from benchmarks.figure import Figure, Scale
from benchmarks.latency import READY, Commits
from benchmarks.machine import ROOT, Bystander, run_module


def measure(scale: Scale) -> list[Figure]:
    """The median and the 99th percentile of both."""
    messages = round(scale.rate * scale.latency_s)
    figures = []
    for what in ("raw", "keywise"):
        with Bystander() as bystander:
            delays_ms, sends = _delays_ms(what, messages, scale.rate)
        percentiles = statistics.quantiles(delays_ms, n=100)
        note = f"{scale.rate}/s for {scale.latency_s:g} s; others used {bystander.others:.0%} of the CPUs"
        detail = {"messages": messages, "commits": sends, "max_ms": max(delays_ms), "others": bystander.others}
        figures.append(Figure(f"send to committed, {what}, p50", percentiles[49], "ms", note, detail=detail))
        figures.append(Figure(f"send to committed, {what}, p99", percentiles[98], "ms", f"{sends:,} commits"))
    return figures


def _delays_ms(what: str, messages: int, rate: int) -> tuple[list[float], int]:
    """The delay of each message, and how many commits there were."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [what, "--folder", folder, "--messages", str(messages), "--rate", str(rate)]
        command = [sys.executable, "-m", "benchmarks.latency", "work", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            try:
                if worker.stdout.readline().strip() != READY:
                    raise RuntimeError(f"the {what} worker did not start")
                due: Sequence[float] = run_module("benchmarks.latency", ["send", *arguments])
                commits = msgspec.json.decode(worker.stdout.readline(), type=Commits)
            finally:
                worker.terminate()
    committed = chain.from_iterable([at] * count for at, count in commits)
    return [1000 * (at - when) for at, when in zip(committed, due, strict=True)], len(commits)
