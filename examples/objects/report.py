"""What each consumer has made of the log files, beside the truth."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from examples.objects.naive import opened_table
from examples.objects.place import KEYWISE, NAIVE, Place
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


class Comparison(msgspec.Struct, frozen=True):
    """How the rows of a table differ from the lines of the files."""

    consumer: str
    killed: int
    right: int
    missing: int
    extra: int
    """Rows of files, or of versions of files, that are gone."""
    twice: int
    misplaced: int = 0
    """Rows at another ordinal than their line has."""

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.extra or self.twice or self.misplaced)


def compare(consumer: str, killed: int, rows: Iterable[str], truth: Mapping[str, Sequence[str]]) -> Comparison:
    wanted = {row for file in truth.values() for row in file}
    found = Counter(rows)
    right = sum(1 for row in found if row in wanted)
    return Comparison(
        consumer,
        killed,
        right,
        missing=len(wanted) - right,
        extra=sum(count for row, count in found.items() if row not in wanted),
        twice=sum(count - 1 for row, count in found.items() if row in wanted),
    )


def compare_keywise(place: Place, killed: int, truth: Mapping[str, Sequence[str]]) -> Comparison:
    with closing(sqlite3.connect(place.file(KEYWISE))) as connection:
        rows = connection.execute("select object, ordinal, body from lines").fetchall()
    places = {(f"{place.root}/{name}", n): row for name, file in truth.items() for n, row in enumerate(file)}
    misplaced = sum(1 for uri, ordinal, body in rows if places.get((uri, ordinal)) != body)
    return msgspec.structs.replace(compare(KEYWISE, killed, (body for _, _, body in rows), truth), misplaced=misplaced)


def compare_naive(place: Place, killed: int, truth: Mapping[str, Sequence[str]]) -> Comparison:
    with closing(opened_table(place)) as connection:
        return compare(NAIVE, killed, (row for (row,) in connection.execute("select body from lines")), truth)


def count_rows(file: Path) -> int:
    """How many rows keywise's table has; 0 before it is made."""
    with closing(sqlite3.connect(file)) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'lines'").fetchone():
            return 0
        [count] = connection.execute("select count(*) from lines").fetchone()
        return int(count)


def print_report(console: Console, found: Sequence[Comparison]) -> None:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("consumer", no_wrap=True)
    for heading in ("workers killed", "rows right", "missing", "extra", "twice"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        faults = (one.missing, one.extra, one.twice)
        cells = [f"[red]{count:,}[/red]" if count else "[green]0[/green]" for count in faults]
        table.add_row(one.consumer, str(one.killed), f"{one.right:,}", *cells)
    console.print(table)
    for one in found:
        console.print(summary(one), style="bold")


def summary(one: Comparison) -> str:
    if one.is_exact:
        return f"{one.consumer}: exact, all {one.right:,} rows"
    wrong = one.missing + one.extra + one.twice
    return f"{one.consumer}: {wrong:,} rows wrong" + (f", {one.misplaced:,} at a wrong place" if one.misplaced else "")
