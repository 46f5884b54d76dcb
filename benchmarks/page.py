"""The parts of docs/benchmarks.md about keywise alone, and their plots, made from the data of a run.

Each measure has a part of its own that says when it was made and how busy the machine was, so one can be renewed alone.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.machine import Machine
from benchmarks.plot import Bar, bars
from benchmarks.section import replace_section

SPEEDS = ("keys-speed.svg", "Changes per second (more is better)")
DELAYS = ("keys-delay.svg", "Milliseconds from sending to committed, 99th percentile (less is better)")
PLOTTED = "keys"


def write_page(path: Path, found: Mapping[str, list[Figure]], machine: Machine, others: Mapping[str, float]) -> None:
    """Renew the parts of what was measured, and the plots beside the page."""
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    for measure, figures in found.items():
        drawn = plots(figures) if measure == PLOTTED else {}
        for name, text in drawn.items():
            (folder / name).write_text(text, "utf-8")
        pictures = [f"{folder.name}/{name}" for name in drawn]
        replace_section(path, measure, "\n".join(_lines(measure, figures, machine, others[measure], pictures)))


def plots(figures: list[Figure]) -> dict[str, str]:
    """Speed and delays against the number of keys, by the names of their files."""
    drawn = {}
    speeds = [figure for figure in figures if figure.unit == "changes/s"]
    delays = [figure for figure in figures if figure.name.endswith("p99")]
    for (name, title), chosen in ((SPEEDS, speeds), (DELAYS, delays)):
        values = [Bar(figure.name, figure.value, True) for figure in chosen if figure.value is not None]
        if values:
            drawn[name] = bars(title, values)
    return drawn


def _lines(measure: str, figures: list[Figure], machine: Machine, others: float, pictures: list[str]) -> Iterator[str]:
    yield f"### {measure}"
    yield ""
    yield (
        f"{machine.date}, {machine.cpus} CPUs ({machine.processor}), {machine.system}, Python {machine.python}, "
        f"SQLite {machine.sqlite}; other work used {others:.0%} of the CPUs."
    )
    yield ""
    for picture in pictures:
        yield f"![{Path(picture).stem}]({picture})"
        yield ""
    yield "| what | value | unit | target | | note |"
    yield "|---|--:|---|--:|---|---|"
    for figure in figures:
        met = {None: "", True: "met", False: "missed"}[figure.is_met]
        yield f"| {' | '.join((figure.name, figure.shown, figure.unit, figure.target, met, figure.note))} |"
