"""The contract of a transaction of the database that a ledger and a sink share."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Claim, Refusal


class Transaction(Protocol):
    """One transaction of the database that ledger and sink (and perhaps source) share."""

    connection: Any
    """What a handler is given to write with."""

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        """Refusals by key; whatever is not in it may be written and marked in this transaction."""

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        """Raise marks of keys that `decide` has just allowed."""

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """As `Ledger.commit`, inside this transaction. If anything is refused, the caller rolls back.

        An order that is the mark already is refused too: its effect is there, and must not come a second time.
        """

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        """Count failed tries of keys that no claim is held on; return the counts."""

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        """Keep dead letters; older changes of their keys are eligible again."""

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """A part that is rolled back alone if it raises."""


class MarkingTransaction(Protocol):
    """What a transaction has besides if it saves a step for a caller that marks everything or rolls back."""

    async def decide_and_mark(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        """As `Transaction.decide`, and what is allowed may be marked already. The caller asks for the marks as well."""
