"""The contracts of the history of a pipeline, and of the reporters that write it."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from keywise.core.admin import LedgerAdmin
from keywise.core.events import Event


class HistoryRecord(msgspec.Struct, frozen=True):
    """One record of the history: what happened to a key, or what an operator did."""

    at: float
    """By the store's clock."""
    what: str
    key: str = ""
    """Empty if the record concerns the whole pipeline."""
    version: int | None = None
    detail: str = ""
    by: str = ""
    """The worker or the operator."""


class HistoryStore(Protocol):
    """Stores the history of one ledger scope. Records are only appended, and trimmed by age and by number."""

    async def record(self, records: Sequence[HistoryRecord]) -> None: ...

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        """Return the newest records of a key, newest first. None: those of the pipeline and of all keys."""

    async def trim(self, age_s: float, records_max: int) -> int:
        """Delete records older than `age_s`, and the oldest ones above `records_max`; return how many."""


ALARM, CLEARED = "alarm", "alarm over"


ENDS_ALARM = (CLEARED, "era raised", "resynced")
"""Records that end an alarm: it also ends when an operator raises the era or reports a full resync."""


class Reporter(Protocol):
    """An observer that also emits events itself, and writes what it has seen to the ledger. Maintenance runs it."""

    def __call__(self, event: Event) -> None: ...

    def due(self, pipeline: str, now: float) -> Sequence[Event]:
        """Return the events that all observers have to receive now; usually none."""

    async def flush(self, history_store: HistoryStore, admin: LedgerAdmin, *, is_last: bool = False) -> None:
        """Write the collected records. Records that cannot be written are kept for the next call."""
