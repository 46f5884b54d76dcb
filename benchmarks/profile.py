"""Where the time of a change goes, layer by layer, in keywise and in the raw loop; can write docs/profile.md."""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import machine
from benchmarks.drain import Job, add_job_arguments
from benchmarks.layers import Profile
from benchmarks.stopwatch import REST, WAIT

LAYERS = {
    "look": "see whether there is a message",
    "begin": "begin the transaction",
    "queue read": "read a batch from the queue",
    "decode": "bodies to changes and tickets",
    "coalesce": "one change per key",
    "decide": "read the marks and compare",
    "sink write": "write the table",
    "mark": "raise the marks",
    "ack": "delete from the queue",
    "commit": "commit and fsync, or wait for it",
    REST: "outcomes, events, observers, asyncio; in the raw loop its own Python",
}


class Row(msgspec.Struct, frozen=True):
    """One layer; microseconds per change."""

    layer: str
    raw: float
    keywise: float
    in_sqlite: float
    """Of keywise's time: inside SQLite."""

    @property
    def more(self) -> float:
        return self.keywise - self.raw


class Section(msgspec.Struct, frozen=True):
    """All layers by one clock; the last row is their sum."""

    title: str
    rows: list[Row]
    elsewhere: float
    """How long the thread took that commits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_job_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the page there too")
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    with machine.Bystander() as bystander:
        sections = [measure(job, options.rounds, cpu=False), measure(job, options.rounds, cpu=True)]
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for section in sections:
        show(console, section)
    console.print(f"others used {bystander.others:.0%} of the CPUs")
    if options.write is not None:
        options.write.write_text("\n".join(page(job, options.rounds, sections, bystander.others)) + "\n")


def measure(job: Job, rounds: int, *, cpu: bool) -> Section:
    """Turn by turn, each in a fresh process; the medians of all turns."""
    raw, keywise = list[Profile](), list[Profile]()
    for _ in range(rounds):
        for what, profiles in (("raw", raw), ("keywise", keywise)):
            arguments = [what, *job.arguments(), *(["--cpu"] if cpu else [])]
            profiles.append(msgspec.convert(machine.run_module("benchmarks.layers", arguments), Profile))
    rows = [
        Row(
            layer,
            statistics.median(_raw_us(one, layer) for one in raw),
            statistics.median(_keywise_us(one, layer, cpu) for one in keywise),
            statistics.median(_in_sqlite_us(one, layer, cpu) for one in keywise),
        )
        for layer in LAYERS
    ]
    total = Row("all", *(sum(float(getattr(row, field)) for row in rows) for field in ("raw", "keywise", "in_sqlite")))
    elsewhere = statistics.median(one.elsewhere for one in keywise)
    return Section("CPU time" if cpu else "time on the wall", [*rows, total], elsewhere)


def show(console: Console, section: Section) -> None:
    title = f"µs per change, {section.title}"
    table = Table("layer", "raw", "keywise", "in SQLite", "more", "what", title=title, box=None)
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in section.rows:
        figures = (f"{figure:.2f}" for figure in (row.raw, row.keywise, row.in_sqlite))
        table.add_row(row.layer, *figures, f"{row.more:+.2f}", LAYERS.get(row.layer, ""))
    console.print(table)


def page(job: Job, rounds: int, sections: Sequence[Section], others: float) -> Iterable[str]:
    """The page for the docs, one sentence a line."""
    one, [wall, _] = machine.this_machine(), sections
    versions = f"{one.system}, Python {one.python}, SQLite {one.sqlite}"
    size = f"{job.changes:,} changes to {job.keys:,} keys ({job.distribution}), {job.batch:,} a batch"
    yield "# Where the time goes\n"
    yield "What a change costs in each layer on SQLite, in the strategy `queue_transaction`, beside a bare loop."
    yield "`benchmarks/profile.py --write docs/profile.md` makes this page.\n"
    yield f"Measured on {one.date}: {one.cpus} CPUs ({one.processor}), {versions}."
    yield f"{size}, `synchronous=FULL`."
    yield f"Medians of {rounds} turns, raw and keywise by turns, each in a fresh process."
    yield f"Other work used {others:.0%} of the CPUs meanwhile: the more that is, the less the figures say.\n"
    for section in sections:
        yield from _section_lines(section)
    yield "## How to read it\n"
    yield "Microseconds per change; each is counted for one layer only."
    yield "Stopwatches measure every adapter call and every call into SQLite; the product itself is unchanged."
    yield "They cost something themselves, so `make bench` shows higher speeds."
    yield "The raw loop decodes and coalesces amid its other Python; *decode* is what decoding costs by itself."
    yield f"keywise commits in a thread of its own, {wall.elsewhere:.2f} µs per change, and reads ahead meanwhile."
    yield "On the wall, *commit* is the part of it that is waited for; of the CPU time it is all of it."


def _section_lines(section: Section) -> Iterable[str]:
    *rows, total = section.rows
    yield f"## {section.title.capitalize()}\n".replace("Cpu", "CPU")
    yield "| layer | raw | keywise | of it in SQLite | more | what |"
    yield "|---|--:|--:|--:|--:|---|"
    for row in section.rows:
        what = LAYERS.get(row.layer, "")
        yield f"| {row.layer} | {row.raw:.2f} | {row.keywise:.2f} | {row.in_sqlite:.2f} | {row.more:+.2f} | {what} |"
    most = sorted(rows, key=lambda row: row.more, reverse=True)[:3]
    yield f"\nkeywise needs {total.keywise:.1f} µs for a change, the raw loop {total.raw:.1f} µs."
    yield f"Most of the difference: {', '.join(f'*{row.layer}* {row.more:+.2f}' for row in most)}.\n"


def _raw_us(profile: Profile, layer: str) -> float:
    """The raw loop decodes amid its other Python; what decoding costs is known."""
    if layer == "decode":
        return profile.decode
    if layer == REST:
        return profile.layers[REST] - profile.decode
    return profile.layers.get(layer, 0.0)


def _keywise_us(profile: Profile, layer: str, cpu: bool) -> float:
    found = profile.layers.get(layer, 0.0)
    if layer != "commit":
        return found
    return found + profile.layers.get(WAIT, 0.0) + (profile.elsewhere if cpu else 0.0)


def _in_sqlite_us(profile: Profile, layer: str, cpu: bool) -> float:
    return profile.in_sqlite.get(layer, 0.0) + (profile.elsewhere if cpu and layer == "commit" else 0.0)


if __name__ == "__main__":
    main()
