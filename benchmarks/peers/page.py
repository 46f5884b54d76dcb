"""The part of docs/benchmarks.md about the peers, and its plots, made from the data of a run."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.peers.place import Handler
from benchmarks.peers.report import Group, Report, Row
from benchmarks.plot import Bar, bars, shown
from benchmarks.section import replace_section

SECTION = "peers"
BUSY = 0.1
HEADS = (
    "contender",
    "promise for one key",
    "changes/s",
    "CPU s per 1,000",
    "of servers",
    "peak MB",
    "messages",
    "handler calls",
    "order violations",
    "overlaps",
    "wrong in the end",
    "out of turn",
)
PLOTTED = {Handler.NOOP: "peers-noop", Handler.UPSERT: "peers"}
"""How the names of the plots begin; only the first number of keys is plotted."""


def write_page(path: Path, report: Report) -> None:
    """Renew the part of the page, and the plots beside it."""
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    for group in _plotted(report):
        for name, text in plots(group).items():
            (folder / name).write_text(text, "utf-8")
    replace_section(path, SECTION, "\n".join(_lines(report, folder.name)))


def plots(group: Group) -> dict[str, str]:
    """The plots of a group, by the names of their files."""
    begin, name = PLOTTED[group.handler], group.name
    return {
        f"{begin}-speed.svg": bars(
            f"Changes per second, {name} (more is better)",
            [Bar(row.contender.name, row.speed, row.contender.is_ours) for row in group.rows],
        ),
        f"{begin}-cpu.svg": bars(
            f"CPU milliseconds per change, {name}, servers included (less is better)",
            [Bar(row.contender.name, row.cpu_s, row.contender.is_ours) for row in group.rows],
        ),
    }


def _plotted(report: Report) -> list[Group]:
    """The first group of each handler."""
    found: dict[Handler, Group] = {}
    for group in report.groups:
        found.setdefault(group.handler, group)
    return list(found.values())


def _lines(report: Report, folder: str) -> Iterator[str]:
    machine = report.machine
    yield "## keywise beside its peers"
    yield ""
    yield (
        f"Measured {machine.date} on {machine.cpus} CPUs ({machine.processor}), {machine.system}, "
        f"Python {machine.python}: {', '.join(f'{name} {version}' for name, version in report.versions.items())}."
    )
    yield (
        f"Keys are {report.distribution}; medians of {report.rounds} rounds, all contenders by turns; "
        f"other work used {report.others:.0%} of the CPUs meanwhile."
    )
    if report.others > BUSY:
        yield "The machine was busy: trust the ratios and the CPU times more than the speeds."
    yield ""
    plotted = _plotted(report)
    for group in report.groups:
        yield from _group(group, folder, is_plotted=group in plotted)
    yield "### Ratios"
    yield ""
    yield "How many times as fast keywise is, and how many times as much CPU time the peer needs, servers included."
    yield ""
    yield "| ratio | handler | keys | of speeds | target | | spread | of CPU time |"
    yield "|---|---|--:|--:|--:|---|---|--:|"
    for group in report.groups:
        for figure in group.ratios():
            what = (figure.name, group.handler, f"{group.keys:,}", figure.shown, figure.target, _met(figure))
            yield "| " + " | ".join((*what, figure.note, figure.detail["of_cpu_time"])) + " |"
    yield ""
    if report.shares:
        yield from _shares(report.shares)
    yield from _settings(report)


def _group(group: Group, folder: str, *, is_plotted: bool) -> Iterator[str]:
    yield f"### {group.name[0].upper()}{group.name[1:]}"
    yield ""
    if is_plotted:
        yield f"![Changes per second, {group.name}]({folder}/{PLOTTED[group.handler]}-speed.svg)"
        yield ""
    yield "| " + " | ".join(HEADS) + " |"
    yield "|---|---|" + "--:|" * (len(HEADS) - 2)
    for row in group.rows:
        yield "| " + " | ".join(cells(row)) + " |"
    yield ""
    if is_plotted:
        yield f"![CPU time per change, {group.name}]({folder}/{PLOTTED[group.handler]}-cpu.svg)"
        yield ""


def _shares(shares: dict[str, float]) -> Iterator[str]:
    yield "### Where the time of the one-change handler goes"
    yield ""
    yield "With the upsert, in a turn of its own, by looking every two milliseconds at what the worker of keywise runs."
    yield "[Where the time goes](profile.md) has the same for the no-op handler, in microseconds."
    yield ""
    yield "| part | share of its CPU time |"
    yield "|---|--:|"
    for part, share in shares.items():
        yield f"| {part} | {share:.0%} |"
    yield ""


def _settings(report: Report) -> Iterator[str]:
    yield "### Settings"
    yield ""
    yield "The fastest that were found; a setting of 0 means no limit, and all else is as it comes."
    yield "Postgres and Redis have the settings that they come with, and write to a disk."
    yield ""
    yield "| contender | handler | messages | settings | tried too |"
    yield "|---|---|--:|---|---|"
    for group in _plotted(report):
        for row in group.rows:
            contender = row.contender
            settings = ", ".join(f"`{name}={value}`" for name, value in contender.settings.items())
            count = f"{contender.processes} process{'es' if contender.processes > 1 else ''}"
            what = (contender.name, group.handler, f"{contender.changes:,}", f"{count}; {settings}", contender.tried)
            yield f"| {' | '.join(what)} |"


def cells(row: Row) -> list[str]:
    """A row of the table, on the page and on the terminal."""
    return [
        row.contender.name,
        row.contender.promise,
        shown(row.speed),
        shown(row.median("cpu_s_per_1000")),
        shown(row.median("server_cpu_s_per_1000")),
        shown(row.median("peak_mb")),
        _count(row.contender.changes),
        _count(row.calls),
        _count(row.worst("backwards")),
        _count(row.worst("overlaps")),
        _count(row.worst("wrong")),
        _count(row.worst("out_of_turn")),
    ]


def _count(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _met(figure: Figure) -> str:
    return {None: "", True: "met", False: "missed"}[figure.is_met]
