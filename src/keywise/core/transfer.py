"""The contract of a ledger whose scopes can be read and written as a whole: to copy, list or compare them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry
from keywise.core.history import HistoryRecord


class TransferPage(msgspec.Struct, frozen=True):
    """A part of one ledger scope."""

    entries: Sequence[tuple[str, Entry]] = ()
    dead_letters: Sequence[tuple[float, DeadLetter]] = ()
    """Each with the time at which it was stored; the oldest first, by that time or by its number."""
    records: Sequence[HistoryRecord] = ()
    """The oldest first."""
    cursor: str = ""
    """Where the next page starts; empty on the last page."""


class LedgerTransfer(Protocol):
    """Reads and writes all of one ledger scope.

    A copy to another ledger needs a scope that no worker uses. A reindex reads pages while workers go on.
    """

    async def scopes(self) -> list[str]:
        """Return the scopes of this store that are not empty, in order."""

    async def page(self, cursor: str, limit: int) -> TransferPage:
        """Return up to `limit` items after a cursor: first all entries, then dead letters, then records.

        An empty cursor is before the first item.
        """

    async def add(self, page: TransferPage) -> None:
        """Store a page of another ledger: entries of unknown keys, and letters and records after the existing ones.

        `updated_at` may be rounded up to a whole second; all else stays. After an error, a part of the page may be
        stored.
        """

    async def clear(self) -> None:
        """Delete everything in this scope except its controls."""

    async def set_controls(self, controls: Controls) -> None:
        """Replace the controls of all keys."""

    async def tokens_above(self, floor: int) -> int:
        """Grant only tokens above `floor` from now on; return the highest token so far, or a higher one."""


class ScopeDifferences(msgspec.Struct, frozen=True):
    """At which keys two scopes of a store differ."""

    rows: int
    """How many keys of this scope have a mark that is no deletion."""
    entries: Sequence[tuple[str, Entry | None, Entry | None]]
    """Keys with their entries in this scope and in the other one; None: the scope does not know the key.

    Every key whose version or deletion differs, and every key that is claimed or suspect, or of which a write has an
    unknown outcome, in either scope.
    """


@runtime_checkable
class ComparingTransfer(Protocol):
    """The ability of a store to compare two of its scopes itself, which is faster than to read both."""

    async def compare(self, other: LedgerTransfer, limit: int) -> ScopeDifferences | None:
        """Compare this scope with another one.

        Return None if that is in another store, or if there are `limit` keys or more to return.
        """
