"""The contract of a transaction of the database that a ledger and a sink share."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, Commit, Refusal


class Transaction(Protocol):
    """One transaction of the database that the ledger, the sink and perhaps the source share."""

    @property
    def connection(self) -> Any:
        """The connection that a handler writes with."""

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        """Return the refusals by key. Every other change may be written and marked in this transaction."""

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        """Raise the marks of keys that `decide` has allowed in this transaction."""

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        """Do what `Ledger.advance` does, inside this transaction. If a claim is refused, the caller rolls back.

        A place that is already kept is refused as well: the effect of its part exists, and must not be repeated.
        """

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """Do what `Ledger.commit` does, inside this transaction. If a claim is refused, the caller rolls back.

        A claim whose order is already the mark is refused as well: its effect exists, and must not be repeated.
        """

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        """Count a failed attempt of keys on which no claim is held; return the attempts so far."""

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        """Store dead letters. Older changes of their keys may be applied again."""

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        """Do what `ControlStore.replace_controls` does, inside this transaction."""

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Open a part of the transaction that is rolled back alone if it raises."""


class MarkingTransaction(Transaction, Protocol):
    """A transaction that can decide and mark in one step, for a caller that marks the whole batch or rolls back."""

    async def decide_and_mark(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        """Do what `decide` does, and perhaps raise the marks of the allowed changes. The caller still calls `mark`."""
