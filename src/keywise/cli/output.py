"""Output of the commands: plain text in a pipe, tables and bars in a terminal, JSON for scripts, errors on stderr."""

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from keywise.core.errors import KeywiseError, UnavailableError

PIPE_WIDTH = 100_000
"""The width of a pipe: lines are neither folded nor cut, because the next program reads them."""


def screen(*, stderr: bool = False) -> Console:
    """Return the console for human-readable output. It does not interpret markup."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def progress(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr, which disappears at the end; it is disabled without a terminal.

    Without `columns`, the bar shows how many steps are done.
    """
    columns = columns or (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = screen(stderr=True)
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # Lines that are printed meanwhile appear above the bar, unless stdout is a pipe.
        redirect_stdout=sys.stdout.isatty(),
    )


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print two columns without a header: names, and the text for each."""
    made = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, fact in facts:
        made.add_row(cell(name), cell(fact))
    _print_table(made)


def print_table(
    columns: Collection[str],
    rows: Iterable[Iterable[object]],
    *,
    numbers: Collection[str] = (),
    fold: Collection[str] = (),
    widths_min: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Print a table without rules; only the columns in `fold` may be wrapped to fit a terminal.

    `widths_min` says how narrow a column may become by that.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        justify: Any = "right" if column in numbers else "left"
        width_min = widths_min.get(column)
        made.add_column(column, justify=justify, no_wrap=column not in fold, overflow="fold", min_width=width_min)
    for row in rows:
        made.add_row(*(cell(f"{value:,}" if isinstance(value, int) else value) for value in row))
    _print_table(made)


def _print_table(made: Table) -> None:
    """Print a table; in a pipe, without trailing spaces."""
    out = screen()
    if out.is_terminal:
        out.print(made)
        return
    with out.capture() as captured:
        out.print(made)
    for line in captured.get().splitlines():
        print(line.rstrip())


def cell(value: object, style: str = "") -> Text:
    """Return a table cell with control characters escaped."""
    return Text(plain(str(value)), style)


def print_line(line: object, style: str = "") -> None:
    """Print one line, with control characters escaped; in a terminal, a long line is wrapped."""
    screen().print(cell(line, style))


def print_traceback(title: str, traceback: str) -> None:
    """Print the traceback of an exception below a title; nothing if there is none."""
    if traceback:
        print()
        print_line(title, "bold")
        print(plain_lines(traceback))


def print_json(value: Any, *, moments: Collection[str] = ()) -> None:
    """Print one JSON document on stdout. It is ASCII, so any terminal and any encoding can show it.

    `moments` names the fields that hold times in seconds; they are printed as ISO 8601 text, and 0 as null.
    """
    print(json.dumps(_with_iso_moments(msgspec.to_builtins(value), moments), indent=2))


def print_result(fields: Any, text: str, *, json: bool) -> None:
    """Print the result of a command: its fields for scripts, or the text for people."""
    if json:
        print_json(fields)
    else:
        print(plain(text))


def print_error(error: KeywiseError | str) -> None:
    """Print one error on stderr."""
    advice = "; nothing is lost, try again" if isinstance(error, UnavailableError) else ""
    print(f"Error: {plain(str(error))}{advice}", file=sys.stderr)


def refuse(message: str) -> NoReturn:
    """Print what is wrong with the usage, and exit with status 2."""
    print_error(message)
    raise typer.Exit(2)


def fail(message: str) -> NoReturn:
    """Print why the operation failed, and exit with status 1."""
    print_error(message)
    raise typer.Exit(1)


def plain(text: str) -> str:
    """Escape every character that a terminal could interpret, or that breaks a line."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def plain_lines(text: str) -> str:
    """Escape like `plain`, but keep line breaks."""
    return "\n".join(map(plain, text.split("\n")))


def moment(at: float, now: float) -> str:
    """Format a wall-clock time, with its distance from now."""
    apart_s = round(at - now)
    distance = "now" if apart_s == 0 else f"in {duration(apart_s)}" if apart_s > 0 else f"{duration(-apart_s)} ago"
    return f"{stamp(at)} ({distance})"


def stamp(at: float) -> str:
    """Format a time to the second, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(at: float | None) -> str | None:
    """Format a time as ISO 8601, for scripts."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _with_iso_moments(document: Any, names: Collection[str]) -> Any:
    if isinstance(document, list):
        return [_with_iso_moments(one, names) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        name: iso(value or None) if name in names else _with_iso_moments(value, names)
        for name, value in document.items()
    }


def duration(span_s: float) -> str:
    """Format a duration with its two largest units: `3 h 20 min`."""
    if span_s < 10:
        return f"{span_s:.3g} s"
    parts: list[str] = []
    rest = round(span_s)
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size_s)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part)


def size(number: int) -> str:
    """Format a number of bytes: `512 B`, `1.5 MB`; a MB has 1,000,000 bytes."""
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{number} B" if unit == "B" else f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def count(number: int, noun: str, many: str = "") -> str:
    """Format a number with its noun: `1 message`, `1,204 messages`."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
