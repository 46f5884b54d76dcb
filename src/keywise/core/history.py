"""The contract of the history of a pipeline, and of the reporters that write it."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from keywise.core.admin import LedgerAdmin
from keywise.core.events import Event


class HistoryRecord(msgspec.Struct, frozen=True):
    """One line of the history: what happened to a key, or what an operator did."""

    at: float
    """By the store's clock."""
    what: str
    key: str = ""
    """Empty for what concerns the whole pipeline."""
    version: int | None = None
    detail: str = ""
    by: str = ""
    """The worker or the operator."""


class HistoryStore(Protocol):
    """Keeps the history of one ledger scope: lines are only added, until they are too old or too many."""

    async def record(self, records: Sequence[HistoryRecord]) -> None: ...

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        """The newest lines of a key, newest first; None: of the whole pipeline and all keys."""

    async def trim(self, age_s: float, records_max: int) -> int:
        """Forget old lines, and the oldest above a count; return how many."""


ALARM, CLEARED = "alarm", "alarm over"


ENDS_ALARM = (CLEARED, "era raised", "resynced")
"""An operator who raises the era, or says that everything was written again, has done what an alarm asks for."""


class Reporter(Protocol):
    """An observer that also reports by itself, and keeps what it has seen in the ledger. Maintenance runs it."""

    def __call__(self, event: Event) -> None: ...

    def due(self, pipeline: str, now: float) -> Sequence[Event]:
        """What it has to say to all observers now; most of the time nothing."""

    async def flush(self, history_store: HistoryStore, admin: LedgerAdmin, *, is_last: bool = False) -> None:
        """Write what has gathered. What cannot be written waits for the next time."""
