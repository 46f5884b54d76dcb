"""Compares two targets key by key, by what the ledger knows of both; no sink is read for it."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from keywise.core.entry import Entry
from keywise.core.ledger import Ledger, TransferableLedger
from keywise.core.transfer import ComparingTransfer, ScopeDifferences
from keywise.reindex.gap import UNKNOWN_KEY, GapKind, KeyState, gap_kind, state_of
from keywise.reindex.shards import entries_of

DIFFERENT_MAX = 20_000
"""A ledger that can compare targets does so if they differ at fewer keys. Otherwise the worker reads all entries."""
NAMED_MAX = 5
"""How many keys a report names, at most."""


class KeyGap(msgspec.Struct, frozen=True):
    """A key at which two targets differ."""

    key: str
    kind: GapKind
    live: KeyState
    other: KeyState


class Comparison:
    """One comparison of all keys.

    A ledger that can compare two of its scopes does it by itself. For any other one, the worker reads all entries, and
    keeps the marks of one target in memory meanwhile: about 200 bytes a key.
    """

    def __init__(self, live: Ledger, other: Ledger, now: float) -> None:
        assert isinstance(live, TransferableLedger), "a run starts only on a ledger that can list its entries"
        assert isinstance(other, TransferableLedger), "both targets have the same kind of ledger"
        self._live, self._other = live, other
        self._now = now
        self.rows = 0
        """How many keys of the live target have a row."""
        self.expired_live: list[str] = []
        """Keys of the live target whose lease has expired: their holders are dead, or stopped."""
        self.expired_other: list[str] = []
        self.unresolved: list[str] = []
        """Some keys that are claimed or suspect, or have a write of unknown outcome, in one of the targets."""

    async def gaps(self) -> AsyncGenerator[KeyGap, None]:
        """Yield the keys at which the targets differ."""
        if (differences := await self._compared()) is not None:
            for gap in self._gaps_among(differences):
                yield gap
            return
        async with aclosing(self._gaps_of_all()) as gaps:
            async for gap in gaps:
                yield gap

    async def _compared(self) -> ScopeDifferences | None:
        """Let the ledger compare the targets; return None if it cannot, or too much differs."""
        live, other = self._live.transfer, self._other.transfer
        return await live.compare(other, DIFFERENT_MAX) if isinstance(live, ComparingTransfer) else None

    def _gaps_among(self, differences: ScopeDifferences) -> Iterator[KeyGap]:
        self.rows = differences.rows
        for key, of_live, of_other in differences.entries:
            live = self._state(key, of_live, self.expired_live)
            other = self._state(key, of_other, self.expired_other)
            if (kind := gap_kind(live, other)) is not GapKind.NONE:
                yield KeyGap(key, kind, live, other)

    async def _gaps_of_all(self) -> AsyncGenerator[KeyGap, None]:
        others: dict[str, KeyState] = {}
        async with aclosing(entries_of(self._other)) as entries:
            async for key, entry in entries:
                others[key] = self._state(key, entry, self.expired_other)
        async with aclosing(entries_of(self._live)) as entries:
            async for key, entry in entries:
                live, other = self._state(key, entry, self.expired_live), others.pop(key, UNKNOWN_KEY)
                self.rows += live.mark is not None and not live.deleted
                if (kind := gap_kind(live, other)) is not GapKind.NONE:
                    yield KeyGap(key, kind, live, other)
        for key, other in others.items():
            if (kind := gap_kind(UNKNOWN_KEY, other)) is not GapKind.NONE:
                yield KeyGap(key, kind, UNKNOWN_KEY, other)

    def _state(self, key: str, entry: Entry | None, expired: list[str]) -> KeyState:
        if entry is None:
            return UNKNOWN_KEY
        if entry.token and entry.lease_until <= self._now:
            expired.append(key)
        state = state_of(entry)
        if not state.is_resolved and len(self.unresolved) < NAMED_MAX:
            self.unresolved.append(key)
        return state
