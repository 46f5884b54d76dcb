"""Measures keywise beside a bare loop that does the same work, prints one table and writes build/bench.json."""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import (
    machine,
    measure_delays,
    measure_flow,
    measure_handlers,
    measure_keys,
    measure_latency,
    measure_ledger,
    measure_memory,
    measure_merge,
    measure_objects,
    measure_opensearch,
    measure_overhead,
    measure_postgres,
    measure_publishing,
    measure_rabbitmq,
    measure_redis,
    measure_reindex,
    measure_sqs,
    measure_throughput,
    page,
)
from benchmarks.drain import Drained, Job
from benchmarks.figure import FULL, QUICK, Figure, Scale

MEASURES: dict[str, Callable[[Scale], list[Figure]]] = {
    "throughput": measure_throughput.measure,
    "overhead": measure_overhead.measure,
    "latency": measure_latency.measure,
    "flow": measure_flow.measure,
    "ledger": measure_ledger.measure,
    "memory": measure_memory.measure,
    "postgres": measure_postgres.measure,
    "handlers": measure_handlers.measure,
    "delays": measure_delays.measure,
    "keys": measure_keys.measure,
    "redis": measure_redis.measure,
    "opensearch": measure_opensearch.measure,
    "rabbitmq": measure_rabbitmq.measure,
    "sqs": measure_sqs.measure,
    "objects": measure_objects.measure,
    "reindex": measure_reindex.measure,
    "publishing": measure_publishing.measure,
    "merge": measure_merge.measure,
}
SLOWER_AT_MOST = 0.05
BUSY = 0.1


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if options.compare is not None:
        return 0 if compare(console, options.compare, QUICK if options.quick else FULL) else 1
    scale = QUICK if options.quick else FULL
    found: dict[str, list[Figure]] = {}
    others: dict[str, float] = {}
    for name in options.only or MEASURES:
        started = time.monotonic()
        with machine.Bystander() as bystander:
            found[name] = MEASURES[name](scale)
        others[name] = bystander.others
        busy = f"others used {bystander.others:.0%} of the CPUs; load {machine.load()}"
        console.print(f"{name}: measured in {time.monotonic() - started:.0f} s; {busy}", style="dim")
        write(options.json, found, scale, others)
        if options.write is not None:
            page.write_page(options.write, {name: found[name]}, machine.this_machine(), others)
    show(console, found)
    console.print(_described(machine.this_machine()))
    if max(others.values()) > BUSY:
        console.print("The machine was busy with other work: measure again before you quote a figure.", style="yellow")
    return 0


def show(console: Console, found: Mapping[str, list[Figure]]) -> None:
    """One table; on a terminal with colours, elsewhere as plain lines."""
    table = Table("measure", "what", "value", "unit", "target", "", "note", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for name, figures in found.items():
        for figure in figures:
            met = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.is_met]
            table.add_row(name, figure.name, figure.shown, figure.unit, figure.target, met, figure.note)
    console.print(table)


def write(path: Path, found: Mapping[str, list[Figure]], scale: Scale, others: Mapping[str, float]) -> None:
    """Everything that was measured, single runs included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    what = {"machine": machine.this_machine(), "scale": scale, "others": others, "load": machine.load()}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(what | {"figures": found})) + b"\n")


def compare(console: Console, reference: Path, scale: Scale) -> bool:
    """Whether our raw loop keeps up with another one: a slow denominator would make a flattering ratio."""
    job = Job(scale.changes, scale.keys, scale.batch)
    speeds: dict[str, list[float]] = {"reference": [], "ours": []}
    with machine.Bystander() as bystander:
        for _ in range(scale.rounds):
            command = [sys.executable, str(reference), *job.arguments()]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            speeds["reference"].append(msgspec.json.decode(done.stdout.splitlines()[-1])["changes_per_s"])
            ours = machine.run_module("benchmarks.drain", ["raw", *job.arguments()])
            speeds["ours"].append(msgspec.convert(ours, Drained).changes_per_s)
    for name, turns in speeds.items():
        median, each = statistics.median(turns), " ".join(f"{turn:,.0f}" for turn in turns)
        console.print(f"{name}: {median:,.0f} changes/s, median of {each}")
    ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["reference"])
    console.print(f"ours / reference: {ratio:.3f}; others used {bystander.others:.0%} of the CPUs")
    return ratio >= 1 - SLOWER_AT_MOST


def _described(one: machine.Machine) -> str:
    return f"{one.cpus} CPUs ({one.processor}), {one.system}, Python {one.python}, SQLite {one.sqlite}, {one.date}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small figures in about 20 s, to see that it works")
    parser.add_argument("--only", action="append", choices=MEASURES, help="measure just this; can be given again")
    parser.add_argument("--json", type=Path, default=machine.ROOT / "build" / "bench.json", help="where the data goes")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="renew the parts of a page such as docs/benchmarks.md"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="PATH", help="only show that our raw loop is as fast as the one in this script"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
