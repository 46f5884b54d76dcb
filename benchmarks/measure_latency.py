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
    figures = []
    for what in ("raw", "keywise"):
        with tempfile.TemporaryDirectory() as folder:
            figures += percentiles(scale, "benchmarks.latency", [what, "--folder", folder], what)
    return figures


def percentiles(scale: Scale, module: str, arguments: Sequence[str], name: str) -> list[Figure]:
    """The median and the 99th percentile of one run of the module's two processes."""
    messages = round(scale.rate * scale.latency_s)
    with Bystander() as bystander:
        words = [*arguments, "--messages", str(messages), "--rate", str(scale.rate)]
        delays_ms, commits = delays(module, words)
    hundredths = statistics.quantiles(delays_ms, n=100)
    note = f"{scale.rate}/s for {scale.latency_s:g} s; others used {bystander.others:.0%} of the CPUs"
    detail = {"messages": messages, "commits": commits, "max_ms": max(delays_ms), "others": bystander.others}
    return [
        Figure(f"send to committed, {name}, p50", hundredths[49], "ms", note, detail=detail),
        Figure(f"send to committed, {name}, p99", hundredths[98], "ms", f"{commits:,} commits"),
    ]


def delays(module: str, arguments: Sequence[str]) -> tuple[list[float], int]:
    """The delay of each message in milliseconds, and how many commits there were."""
    command = [sys.executable, "-m", module, "work", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            if worker.stdout.readline().strip() != READY:
                raise RuntimeError(f"the worker did not start: {' '.join(command)}")
            due: Sequence[float] = run_module(module, ["send", *arguments])
            commits = msgspec.json.decode(worker.stdout.readline(), type=Commits)
        finally:
            worker.terminate()
    committed = chain.from_iterable([at] * count for at, count in commits)
    return [1000 * (at - when) for at, when in zip(committed, due, strict=True)], len(commits)
