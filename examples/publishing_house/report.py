"""What is wrong with a shelf of documents, and how to say it."""

import shlex
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from examples.publishing_house import house, naive, press
from examples.publishing_house.press import Event, Page, Shelf
from rich.console import Console


class Fault(msgspec.Struct, frozen=True):
    """A document that is not as it should be: resurrected, stale or lost."""

    kind: str
    content_id: str


def faults_of(shelf: Shelf, truth: Shelf) -> list[Fault]:
    """Every document whose content differs from the truth."""
    wrong = sorted(key for key in {*shelf, *truth} if shelf.get(key) != truth.get(key))
    return [Fault(_kind(key, shelf, truth), key) for key in wrong]


def read_shelf(folder: Path) -> Shelf:
    """What the table holds, once the search index has been found to agree with it."""
    with closing(sqlite3.connect(house.database_in(folder))) as connection:
        connection.execute("insert into documents_search (documents_search, rank) values ('integrity-check', 1)")
        rows = connection.execute("select content_id, version, title, text from documents")
        return {key: Page(version, title, text) for key, version, title, text in rows}


def find(folder: Path, words: str, limit: int) -> tuple[int, list[str]]:
    """How many documents match, and the titles of the best ones."""
    with closing(sqlite3.connect(house.database_in(folder))) as connection:
        matching = "from documents_search join documents on documents.id = documents_search.rowid"
        where = "where documents_search match ?"
        [count] = connection.execute(f"select count(*) {matching} {where}", (words,)).fetchone()
        best = f"select documents.title {matching} {where} order by rank, content_id limit ?"
        return count, [title for (title,) in connection.execute(best, (words, limit))]


def print_report(console: Console, events: Sequence[Event], folder: Path) -> bool:
    """Print how the table compares with the truth and with the naive consumer; True if it is exact."""
    truth = press.truth(events)
    kept = faults_of(read_shelf(folder), truth)
    missed = _latest_first(faults_of(naive.shelf_of(events), truth), events)
    console.print("\nThe table beside the truth, and beside what a naive consumer makes of the same events:")
    console.print(f"naive: {len(missed):,} documents wrong, keywise: {len(kept):,}", style="bold")
    _print_examples(console, missed, events)
    for fault in kept[:5]:
        console.print(f"keywise got {fault.content_id} wrong: {fault.kind}", style="red")
    _print_search(console, folder, "passport")
    _print_commands(console, missed, folder)
    return not kept


def _kind(key: str, shelf: Shelf, truth: Shelf) -> str:
    if key not in truth:
        return "resurrected"
    return "lost" if key not in shelf else "stale"


def _latest_first(faults: Sequence[Fault], events: Sequence[Event]) -> list[Fault]:
    """Those that a straggler made first: they are the easiest to follow."""
    should, written = press.newest(events), naive.last_writes(events)

    def versions_late(fault: Fault) -> int:
        return should[fault.content_id].payload_version - written[fault.content_id].payload_version

    return sorted(faults, key=versions_late, reverse=True)


def _print_examples(console: Console, faults: Sequence[Fault], events: Sequence[Event]) -> None:
    should, written = press.newest(events), naive.last_writes(events)
    for kind in ("resurrected", "lost", "stale"):
        some = [fault.content_id for fault in faults if fault.kind == kind]
        if some:
            text = _format_example(should[some[0]], written[some[0]])
            console.print(f"  {len(some):,} {kind}, for example {text}")


def _format_example(new: Event, old: Event) -> str:
    return (
        f"“{new.title}”: its newest version is {new.payload_version} ({new.document_type}), "
        f"but {old.payload_version} ({old.document_type}) was written after that"
    )


def _print_search(console: Console, folder: Path, words: str) -> None:
    count, titles = find(folder, words, 3)
    console.print(f"\nA search for “{words}” finds {count:,} documents: {'; '.join(titles)}")


def _print_commands(console: Console, missed: Sequence[Fault], folder: Path) -> None:
    saved = next((fault for fault in missed if fault.kind == "resurrected"), missed[0] if missed else None)
    place = "" if folder.resolve() == house.FOLDER else f"{house.FOLDER_VARIABLE}={shlex.quote(str(folder))} "
    app = "--app examples/publishing_house/house.py:app"
    console.print("\nAsk the ledger about a document that was saved from going wrong, and about all of them:")
    if saved is not None:
        _command(console, f"{place}.venv/bin/keywise why {saved.content_id} {app}")
    _command(console, f"{place}.venv/bin/keywise status {app}")


def _command(console: Console, line: str) -> None:
    console.print(f"  {line}", style="cyan")
