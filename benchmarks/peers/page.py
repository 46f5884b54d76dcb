"""The part of docs/benchmarks.md about the peers, and its plots, made from the data of a run."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.peers.report import Report, Row
from benchmarks.plot import Bar, bars, shown
from benchmarks.section import replace_section

SECTION = "peers"
BUSY = 0.1


def write_page(path: Path, report: Report) -> None:
    """Renew the part of the page, and the plots beside it."""
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    for name, text in plots(report).items():
        (folder / name).write_text(text, "utf-8")
    replace_section(path, SECTION, "\n".join(_lines(report, folder.name)))


def plots(report: Report) -> dict[str, str]:
    """The plots, by the names of their files."""
    return {
        "peers-speed.svg": bars("Changes per second (more is better)", _bars(report, "changes_per_s")),
        "peers-cpu.svg": bars(
            "CPU milliseconds per change, servers included (less is better)",
            [Bar(row.contender.name, _cpu_s(row), row.contender.is_ours) for row in report.rows],
        ),
    }


def _bars(report: Report, name: str) -> list[Bar]:
    return [Bar(row.contender.name, row.median(name), row.contender.is_ours) for row in report.rows]


def _cpu_s(row: Row) -> float:
    return row.median("cpu_s_per_1000") + row.median("server_cpu_s_per_1000")


def _lines(report: Report, folder: str) -> Iterator[str]:
    machine = report.machine
    yield "## keywise beside its peers"
    yield ""
    yield (
        f"Measured {machine.date} on {machine.cpus} CPUs ({machine.processor}), {machine.system}, "
        f"Python {machine.python}: {', '.join(f'{name} {version}' for name, version in report.versions.items())}."
    )
    yield (
        f"{report.keys:,} {report.distribution} keys, medians of {report.rounds} rounds; "
        f"other work used {report.others:.0%} of the CPUs meanwhile."
    )
    if report.others > BUSY:
        yield "The machine was busy: trust the ratios and the CPU times more than the speeds."
    yield ""
    yield f"![Changes per second]({folder}/peers-speed.svg)"
    yield ""
    yield from _table(report)
    yield ""
    yield f"![CPU time per change]({folder}/peers-cpu.svg)"
    yield ""
    yield "### Ratios"
    yield ""
    yield "How many times as fast keywise is, and how many times as much CPU time the peer needs, servers included."
    yield ""
    yield "| ratio | of speeds | target | | of CPU time |"
    yield "|---|--:|--:|---|--:|"
    for figure in report.ratios():
        yield f"| {figure.name} | {figure.shown} | {figure.target} | {_met(figure)} | {figure.note} |"
    yield ""
    if report.shares:
        yield from _shares(report.shares)
    yield "### Settings"
    yield ""
    yield "The fastest that were found; a setting of 0 means no limit, and all else is as it comes."
    yield "Postgres and Redis have the settings that they come with, and write to a disk."
    yield ""
    yield "| contender | changes | settings | tried too |"
    yield "|---|--:|---|---|"
    for row in report.rows:
        contender = row.contender
        settings = ", ".join(f"`{name}={value}`" for name, value in contender.settings.items())
        count = f"{contender.processes} process{'es' if contender.processes > 1 else ''}"
        yield f"| {contender.name} | {contender.changes:,} | {count}; {settings} | {contender.tried} |"


def _table(report: Report) -> Iterator[str]:
    yield (
        "| contender | promise for one key | changes/s | CPU s per 1,000 | of servers | peak MB "
        "| order violations | overlaps | wrong in the end | out of turn | writes per 100 changes |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in report.rows:
        yield "| " + " | ".join(cells(row)) + " |"


def _shares(shares: dict[str, float]) -> Iterator[str]:
    yield "### Where the time of the one-change handler goes"
    yield ""
    yield "In a turn of its own, by looking every two milliseconds at what the worker of keywise runs."
    yield ""
    yield "| part | share of its CPU time |"
    yield "|---|--:|"
    for part, share in shares.items():
        yield f"| {part} | {share:.0%} |"
    yield ""


def cells(row: Row) -> list[str]:
    """A row of the table, on the page and on the terminal."""
    writes, changes = row.worst("writes"), row.contender.changes
    return [
        row.contender.name,
        row.contender.promise,
        shown(row.median("changes_per_s")),
        shown(row.median("cpu_s_per_1000")),
        shown(row.median("server_cpu_s_per_1000")),
        shown(row.median("peak_mb")),
        _count(row.worst("backwards")),
        _count(row.worst("overlaps")),
        _count(row.worst("wrong")),
        _count(row.worst("out_of_turn")),
        "–" if writes is None else f"{100 * writes / changes:.0f}",
    ]


def _count(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _met(figure: Figure) -> str:
    return {None: "", True: "met", False: "missed"}[figure.is_met]
