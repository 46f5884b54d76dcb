"""The contract of a ledger: it stores one entry per key, and grants claims.

Every method takes many items at once and is one atomic step per key.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from keywise.core.admin import ControlStore, LedgerAdmin
from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Advance, Certainty, Claim, Commit, LeaseTerms, Phase, Refusal
from keywise.core.history import HistoryStore
from keywise.core.resource import AsyncResource
from keywise.core.transaction import MarkingTransaction, Transaction
from keywise.core.transfer import LedgerTransfer


class ClaimResults(msgspec.Struct):
    """The ledger's answer to a batch of headers."""

    granted: list[Claim] = []
    refused: dict[str, Refusal] = {}


class Failure(msgspec.Struct, frozen=True):
    """A failed attempt under a claim."""

    claim: Claim
    certainty: Certainty
    retry_s: float = 0.0
    overdue: bool = False
    """The holder's own deadline passed before the sink had answered."""
    counts_attempt: bool = True
    """False if the change is not to blame, because the ledger or the sink could not be reached."""


class Ledger(AsyncResource, Protocol):
    """Stores one entry per key of one pipeline, and grants claims on keys. `rules.py` contains the decisions."""

    @property
    def database(self) -> object | None:
        """The open database that an atomic sink can share; None if the ledger has no transactions."""

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        """Decide and grant in one step per key. The headers name each key once."""

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        """Extend the lease where the token is equal; return the claims that are lost.

        A phase is noted, and never taken back: a renewal without one leaves it as it is.
        """

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        """Keep positions where the token is equal and the place is not below the kept one; return the refused claims.

        The next claim of the same order resumes at the position, and so does one of an older order that is not stale,
        at the order of the position. A claim of a newer order starts at the beginning, and drops it.
        A release, a failure, a takeover and a dead letter keep it; a commit, a reset and a repair that has written
        drop it.
        A place above the kept one is progress: failed attempts, crashes and the level of the key start again at zero.
        A restart keeps the claim and raises its order.
        An advance can be repeated after a lost answer.
        """

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """Raise the mark where the token is equal and the order is above the mark; return the refused claims.

        A claim whose order is already the mark counts as committed, so a commit can be repeated after a lost answer.
        """

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Count failed attempts. A key with an unknown outcome stays claimed until its lease ends."""

    async def release(self, claims: Sequence[Claim]) -> None:
        """Give up claims under which nothing was written."""

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        """Store dead letters and end their claims in one step; return the lost claims, whose letters are not stored."""

    async def prune(self, retention_s: float) -> int:
        """Delete idle entries that are older than the retention; return how many."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction of the ledger's database: it commits on leaving, and rolls back on an error."""


class PluggedLedger(Ledger, Protocol):
    """What the `connect` of a ledger adapter returns: the ledger, and its other contracts. It may serve all itself."""

    @property
    def admin(self) -> LedgerAdmin: ...

    @property
    def control_store(self) -> ControlStore: ...

    @property
    def history_store(self) -> HistoryStore: ...


@runtime_checkable
class TransferableLedger(PluggedLedger, Protocol):
    """A ledger that can be copied to another store."""

    @property
    def transfer(self) -> LedgerTransfer: ...


@runtime_checkable
class MarkingLedger(Protocol):
    """The ability of a ledger to decide and mark in one step, which saves a round trip per batch."""

    def marking_transaction(self) -> AbstractAsyncContextManager[MarkingTransaction]:
        """Do what `Ledger.transaction` does."""


@runtime_checkable
class LosesWrites(Protocol):
    """The ability of a ledger to notice that its store has lost a confirmed write."""

    @property
    def losses(self) -> int:
        """How many losses the ledger has noticed since it was opened."""
