"""Compares what a search shows with the catalogue."""

from collections.abc import Mapping, Sequence

import msgspec
from examples.reindex.catalogue import Item
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


class Comparison(msgspec.Struct, frozen=True):
    """How the live documents of a search differ from the catalogue."""

    search: str
    moment: str
    right: int
    older: int
    missing: int
    extra: int
    """Documents of items that are deleted."""
    other: int
    """Documents at the right version with another content."""

    @property
    def is_exact(self) -> bool:
        return not (self.older or self.missing or self.extra or self.other)


def compare(
    search: str, moment: str, found: Mapping[str, Item], truth: Mapping[str, Item], *, with_words: bool
) -> Comparison:
    """Compare all documents. Without words, a document may have none: its shape is the first one."""
    right = older = other = 0
    for name, item in truth.items():
        if (document := found.get(name)) is None:
            continue
        is_same = document == (item if with_words else msgspec.structs.replace(item, words=document.words))
        right += is_same
        older += document.version < item.version
        other += document.version >= item.version and not is_same
    missing, extra = len(truth.keys() - found.keys()), len(found.keys() - truth.keys())
    return Comparison(search, moment, right, older, missing, extra, other)


def print_report(console: Console, compared: Sequence[Comparison]) -> None:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("search", "after the"):
        table.add_column(heading, no_wrap=True)
    for heading in ("right", "older", "missing", "extra", "other"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in compared:
        faults = (one.older, one.missing, one.extra, one.other)
        cells = [f"[red]{count:,}[/red]" if count else "[green]0[/green]" for count in faults]
        table.add_row(one.search, one.moment, f"{one.right:,}", *cells)
    console.print(table)
    for one in compared:
        console.print(summary(one), style="bold")


def summary(one: Comparison) -> str:
    if one.is_exact:
        return f"{one.search}, after the {one.moment}: exact, all {one.right:,} documents"
    wrong = one.older + one.missing + one.extra + one.other
    return f"{one.search}, after the {one.moment}: {wrong:,} documents wrong"
