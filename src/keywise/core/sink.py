"""The contract of a sink: where changes are applied."""

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.resource import AsyncResource
from keywise.core.transaction import Transaction

if TYPE_CHECKING:
    # Python has it since 3.13; type checkers know it in every version.
    from typing_extensions import TypeIs


class Grade(enum.StrEnum):
    """What a sink guarantees when a write is repeated or arrives late."""

    ATOMIC = "atomic"
    CONDITIONAL = "conditional"
    PLAIN = "plain"


class SinkResult(msgspec.Struct, frozen=True, gc=False):
    """The result of applying one change."""

    outcome: Outcome
    """Applied, superseded (the sink holds a newer version), failed, or busy (not the fault of the change)."""
    cause: str = ""
    permanent: bool = False
    certainty: Certainty = Certainty.CLEAN
    """What is known about the effect of a failed or busy change."""
    wait_s: float | None = None
    """When to retry a busy change; None leaves it to the consumer."""
    traceback: str = ""
    """Of the exception that made the change fail, if there was one."""


APPLIED = SinkResult(Outcome.APPLIED)


SUPERSEDED = SinkResult(Outcome.SUPERSEDED)


class Sink(AsyncResource, Protocol):
    """A plain or conditional sink: applies changes under claims. It never sees a delivery, so it cannot ack."""

    @property
    def grade(self) -> Grade:
        """`PLAIN` or `CONDITIONAL`."""

    @property
    def forgets_deletions(self) -> bool:
        """Whether a conditional sink may accept an old version again some time after a deletion."""

    @property
    def batch_max(self) -> int:
        """How many changes one call may contain."""

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        """Return one result per change. Raising (or being cancelled) means that the outcome of all is unknown."""


class AtomicSink(AsyncResource, Protocol):
    """Writes inside a transaction of the ledger's database."""

    @property
    def grade(self) -> Grade:
        """Always `ATOMIC`."""

    @property
    def database(self) -> object:
        """The database that the sink writes to; the ledger has to use the same one."""

    @property
    def batch_max(self) -> int:
        """How many changes one call may contain."""

    @property
    def runs_user_code(self) -> bool:
        """Whether user code runs in the transaction. It may crash the process, so the ledger grants a claim first."""

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        """Write all changes or raise; the caller then rolls back and searches for the bad change."""


def is_atomic(sink: Sink | AtomicSink) -> "TypeIs[AtomicSink]":
    """Say whether a sink writes inside the ledger's transaction, as its grade declares."""
    return sink.grade is Grade.ATOMIC


class Content(msgspec.Struct, frozen=True):
    """What a sink stores under one key."""

    body: bytes | Mapping[str, Any]
    """The whole body, or those of its fields that the sink stores."""
    version: int | None = None
    """None if the sink does not store it."""


@runtime_checkable
class ColumnSink(Protocol):
    """The ability of a table to name the fields of a body that it stores, so that rows without them are noticed."""

    @property
    def columns(self) -> Sequence[str]:
        """The fields that have columns of their own; none if the table holds whole bodies."""


@runtime_checkable
class EmptyReportingSink(Protocol):
    """The ability of a sink to report whether it is empty, so that a worker notices a new table or index at start."""

    async def is_empty(self) -> bool:
        """Return whether the sink stores no key at all; False if it cannot say.

        Raises `UnavailableError` if it cannot be reached now.
        """


@runtime_checkable
class ReadableSink(Protocol):
    """The ability of a sink to return what it stores, so that it can be compared with the source of truth."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        """Return what the sink stores under these keys. A key that it does not have is left out."""
