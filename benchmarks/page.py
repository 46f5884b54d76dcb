"""The part of docs/benchmarks.md about keywise alone, and its plots, made from the data of a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.machine import Machine
from benchmarks.plot import Bar, bars
from benchmarks.section import replace_section

SECTION = "ours"
KEYS = "keys"
SPEEDS = ("keys-speed.svg", "Changes per second (more is better)")
DELAYS = ("keys-delay.svg", "Milliseconds from sending to committed, 99th percentile (less is better)")


def write_page(path: Path, found: Mapping[str, list[Figure]], machine: Machine, others: float) -> None:
    """Renew the part of the page, and the plots beside it."""
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    drawn = plots(found.get(KEYS, []))
    for name, text in drawn.items():
        (folder / name).write_text(text, "utf-8")
    replace_section(
        path, SECTION, "\n".join(_lines(found, machine, others, [f"{folder.name}/{name}" for name in drawn]))
    )


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


def _lines(found: Mapping[str, list[Figure]], machine: Machine, others: float, pictures: list[str]) -> Iterator[str]:
    yield "## keywise beside the raw limit"
    yield ""
    yield (
        f"Measured {machine.date} on {machine.cpus} CPUs ({machine.processor}), {machine.system}, "
        f"Python {machine.python}, SQLite {machine.sqlite}."
    )
    yield (
        f"Other work used {others:.0%} of the CPUs meanwhile; servers that a measure started for itself count as other "
        "work, because they are no part of its process."
    )
    yield ""
    for picture in pictures:
        yield f"![{Path(picture).stem}]({picture})"
        yield ""
    yield "| measure | what | value | unit | target | | note |"
    yield "|---|---|--:|---|--:|---|---|"
    for name, figures in found.items():
        for figure in figures:
            met = {None: "", True: "met", False: "missed"}[figure.is_met]
            cells = (name, figure.name, figure.shown, figure.unit, figure.target, met, figure.note)
            yield f"| {' | '.join(cells)} |"
