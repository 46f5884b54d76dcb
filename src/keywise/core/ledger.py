"""The contract of a ledger: it remembers one entry per key, and grants claims.

All methods take many items at once and are one atomic step per key.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Certainty, Claim, LeaseTerms, Refusal
from keywise.core.resource import AsyncResource
from keywise.core.transaction import Transaction


class ClaimResults(msgspec.Struct):
    """What a ledger says to many headers at once."""

    granted: list[Claim] = []
    refused: dict[str, Refusal] = {}


class Failure(msgspec.Struct, frozen=True):
    """A failed try under a claim."""

    claim: Claim
    certainty: Certainty
    retry_s: float


class Ledger(AsyncResource, Protocol):
    """Remembers one entry per key of one pipeline, and grants claims on them. `rules.py` says how it decides.

    A ledger that plugs in also has the attributes `admin`, `control_store` and `history_store`, perhaps all itself,
    `transfer` if it can be copied, and `database`: the one that an atomic sink can share, None if it has no
    transactions.
    """

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        """Check and take in one step per key. The headers name each key once."""

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        """Extend where the token is equal; return the claims that are lost."""

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """Raise marks where the token is equal and the order above the mark; return the claims that were refused.

        A claim whose order is the mark already counts as committed, so a commit may be repeated after a lost answer.
        """

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Count failed tries. A key of unknown outcome stays held until its lease runs out."""

    async def release(self, claims: Sequence[Claim]) -> None:
        """Give back claims under which nothing was written."""

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        """Keep dead letters and end their claims in one step; return the claims that are lost (nothing is kept)."""

    async def prune(self, retention_s: float) -> int:
        """Forget idle entries older than the retention; return how many."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """One transaction of the ledger's database: commits on leaving, rolls back on an error."""


@runtime_checkable
class LosesWrites(Protocol):
    """What a ledger has besides if its store may lose what it had confirmed."""

    @property
    def losses(self) -> int:
        """How often this opening has found that."""
