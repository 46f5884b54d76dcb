"""The state of each document in the content management system and in both stores, as a table."""

from collections.abc import Sequence

from examples.publishing.cms import Cms
from examples.publishing.shelves import Shelf
from rich.table import Table
from rich.text import Text

ROWS_MAX = 20


def drawn(cms: Cms, search: Shelf, store: Shelf) -> Table:
    """The documents that were edited last, newest first."""
    table = Table(title=headline(cms, search, store), title_justify="left", title_style="")
    for heading in ("document", "in the CMS", "search", "rate-limited store"):
        table.add_column(heading, no_wrap=True)
    newest = sorted(cms.newest.values(), key=lambda event: event.payload_version, reverse=True)
    for event in newest[:ROWS_MAX]:
        wanted = None if event.is_gone else event.payload_version
        state = event.document_type if event.is_gone else f"{event.payload_version}"
        found = [_compared(wanted, shelf.versions.get(event.content_id)) for shelf in (search, store)]
        table.add_row(f"{event.content_id[:8]} {event.title}", state, *found)
    return table


def headline(cms: Cms, search: Shelf, store: Shelf) -> str:
    behind = [len(wrong(cms, shelf)) for shelf in (search, store)]
    return (
        f"{len(cms.truth)} documents published; behind: {behind[0]} in search, {behind[1]} in the store, "
        f"which took {store.updates} updates and refused {store.refusals}"
    )


def wrong(cms: Cms, shelf: Shelf) -> Sequence[str]:
    """The documents that a store does not show as they are."""
    keys = sorted({*cms.truth, *shelf.versions})
    return [key for key in keys if cms.truth.get(key) != shelf.versions.get(key)]


def _compared(wanted: int | None, held: int | None) -> Text:
    shown = "–" if held is None else str(held)
    return Text(shown, style="green") if wanted == held else Text(f"{shown} …", style="yellow")
