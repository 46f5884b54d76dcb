"""The contract of a ledger that can be copied."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry
from keywise.core.history import HistoryRecord


class TransferPage(msgspec.Struct, frozen=True):
    """Some of what a ledger keeps of one scope."""

    entries: Sequence[tuple[str, Entry]] = ()
    dead_letters: Sequence[tuple[float, DeadLetter]] = ()
    """Each with when it was buried; the oldest first, by that moment or by its number."""
    records: Sequence[HistoryRecord] = ()
    """The oldest first."""
    cursor: str = ""
    """Where to go on; empty at the end."""


class LedgerTransfer(Protocol):
    """All of one ledger scope, to be carried to another ledger while nobody works on it."""

    async def scopes(self) -> list[str]:
        """All scopes of this store that hold something, in their order."""

    async def page(self, cursor: str, limit: int) -> TransferPage:
        """Up to `limit` things behind a cursor: first entries, whatever the policy is, then letters, then lines."""

    async def add(self, page: TransferPage) -> None:
        """Take in what another ledger told: keys that are not known here, and letters and lines behind those that are.

        Only `updated_at` may change, to the next whole second. Half of a part may be there after an error.
        """

    async def clear(self) -> None:
        """Forget everything of this scope but its controls."""

    async def set_controls(self, controls: Controls) -> None:
        """Replace what holds for all keys."""

    async def tokens_above(self, floor: int) -> int:
        """Grant only tokens above this one from now on; return one that no earlier token is above."""
