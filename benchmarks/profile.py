"""Where the time of a change goes: on SQLite beside the raw loop, and in a handler call on Postgres.

Can renew docs/profile.md, each of the two parts alone.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import leased_profile, machine
from benchmarks.drain import Job, add_job_arguments
from benchmarks.layers import Profile
from benchmarks.leased_profile import Comparison
from benchmarks.section import replace_section
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
    parser.add_argument("--only", choices=["sqlite", "leased"], help="just this part")
    parser.add_argument("--before", metavar="REVISION", help="of handler calls: an earlier revision, by turns")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew the parts of a page such as docs/profile.md")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    parts = {"sqlite": profile_sqlite, "leased": profile_leased}
    for name, profile in parts.items():
        if options.only in (None, name):
            lines = profile(console, options)
            if options.write is not None:
                replace_section(options.write, name, "\n".join(lines))


def profile_sqlite(console: Console, options: argparse.Namespace) -> list[str]:
    """Every layer of the strategy `queue_transaction`; returns the part of the page."""
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    with machine.Bystander() as bystander:
        sections = [measure(job, options.rounds, cpu=False), measure(job, options.rounds, cpu=True)]
    for section in sections:
        show(console, section)
    console.print(f"others used {bystander.others:.0%} of the CPUs")
    return list(page(job, options.rounds, sections, bystander.others))


def profile_leased(console: Console, options: argparse.Namespace) -> list[str]:
    """Every part of a handler call in the strategy `leased`; returns the part of the page."""
    # Half of the changes take about as long as all of them in one transaction for each batch.
    changes = options.changes // 2
    with machine.Bystander() as bystander:
        comparison = leased_profile.measure(changes, options.rounds, options.before)
    lines = list(leased_page(changes, options.rounds, comparison, bystander.others))
    console.print("\n".join(lines))
    return lines


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
    """The part of the page, one sentence a line."""
    one, [wall, _] = machine.this_machine(), sections
    versions = f"{one.system}, Python {one.python}, SQLite {one.sqlite}"
    size = f"{job.changes:,} changes to {job.keys:,} keys ({job.distribution}), {job.batch:,} a batch"
    yield "## Changes in one transaction, on SQLite\n"
    yield "What a change costs in each layer on SQLite, in the strategy `queue_transaction`, beside a bare loop.\n"
    yield f"Measured on {one.date}: {one.cpus} CPUs ({one.processor}), {versions}."
    yield f"{size}, `synchronous=FULL`."
    yield f"Medians of {rounds} turns, raw and keywise by turns, each in a fresh process."
    yield f"Other work used {others:.0%} of the CPUs meanwhile: the more that is, the less the figures say.\n"
    for section in sections:
        yield from _section_lines(section)
    yield "### How to read it\n"
    yield "Microseconds per change; each is counted for one layer only."
    yield "Stopwatches measure every adapter call and every call into SQLite; the product itself is unchanged."
    yield "They cost something themselves, so `make bench` shows higher speeds."
    yield "The raw loop decodes and coalesces amid its other Python; *decode* is what decoding costs by itself."
    yield f"keywise commits in a thread of its own, {wall.elsewhere:.2f} µs per change, and reads ahead meanwhile."
    yield "On the wall, *commit* is the part of it that is waited for; of the CPU time it is all of it."


def leased_page(changes: int, rounds: int, comparison: Comparison, others: float) -> Iterable[str]:
    """The part of the page about handler calls, one sentence a line."""
    one, now, before = machine.this_machine(), comparison.now, comparison.before
    yield "## Handler calls, on Postgres\n"
    yield "What a call of a no-op handler costs in the strategy `leased`: one process, and a key for each change."
    yield "Each change is received, claimed, handled, committed and acked.\n"
    yield f"Measured on {one.date}: {one.cpus} CPUs ({one.processor}), {one.system}, Python {one.python}."
    yield f"{changes:,} changes, medians of {rounds} turns, each in a fresh process and a fresh database."
    if before is not None:
        yield f"*Before* is revision {comparison.revision}, by turns with the present one."
    yield f"Other work, the server included, used {others:.0%} of the CPUs meanwhile.\n"
    yield "### CPU time of the client\n"
    yield from _leased_table("part", now.client, before.client if before is not None else None)
    yield ""
    yield "The worker looks at its own stack every two milliseconds of CPU time."
    yield "The innermost file of keywise on the stack says which part runs; asyncpg counts for its caller.\n"
    yield "### The server\n"
    of_before = f", before {before.server:.1f} µs" if before is not None else ""
    yield f"All processes of the server together need {now.server:.1f} µs of CPU time for a change{of_before}."
    yield "The table shows the time inside its statements on the wall: waits for a CPU or a disk count too."
    yield "The commit of a transaction is no part of a statement.\n"
    yield from _leased_table("statement", now.statements, before.statements if before is not None else None)


def _leased_table(head: str, now: Mapping[str, float], before: Mapping[str, float] | None) -> Iterable[str]:
    """Microseconds per change, the largest first; the last row is their sum."""
    yield f"| {head} | now |" if before is None else f"| {head} | before | now |"
    yield "|---|--:|" if before is None else "|---|--:|--:|"
    parts = sorted({*now, *(before or {})}, key=lambda part: -now.get(part, 0.0))
    for part in parts:
        yield f"| {part} | {_cells(now.get(part, 0.0), None if before is None else before.get(part, 0.0))} |"
    yield f"| all | {_cells(sum(now.values()), None if before is None else sum(before.values()))} |"


def _cells(now: float, before: float | None) -> str:
    return f"{now:.1f}" if before is None else f"{before:.1f} | {now:.1f}"


def _section_lines(section: Section) -> Iterable[str]:
    *rows, total = section.rows
    yield f"### {section.title.capitalize()}\n".replace("Cpu", "CPU")
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
