"""The contract of a sink: where changes are applied."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.resource import AsyncResource
from keywise.core.transaction import Transaction


class Grade(enum.StrEnum):
    """What a sink can promise."""

    ATOMIC = "atomic"
    CONDITIONAL = "conditional"
    PLAIN = "plain"


class SinkResult(msgspec.Struct, frozen=True):
    """What a sink made of one change."""

    outcome: Outcome
    """Applied, superseded (the sink holds something newer), failed, or busy (no fault of the change)."""
    cause: str = ""
    permanent: bool = False
    certainty: Certainty = Certainty.CLEAN
    """Of a failed or busy one."""
    wait_s: float | None = None
    """Of a busy one: when to bring it back; None leaves it to the consumer."""


APPLIED = SinkResult(Outcome.APPLIED)


SUPERSEDED = SinkResult(Outcome.SUPERSEDED)


class Sink(AsyncResource, Protocol):
    """Applies changes under claims. It never sees a delivery, so it cannot ack."""

    grade: Grade
    forgets_deletions: bool
    """A conditional sink that may accept an old version again some time after a deletion."""
    batch_max: int
    """How many changes one call may carry."""

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        """One result per change. Raising (or being cancelled) means that the outcome of all of them is unknown."""


class AtomicSink(AsyncResource, Protocol):
    """Writes inside a transaction of the ledger's database."""

    database: object
    batch_max: int
    runs_user_code: bool
    """User code may kill the process, so its batch is noted as in flight first."""

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        """Write all changes or raise; the caller then rolls back and finds the bad one."""


class Content(msgspec.Struct, frozen=True):
    """What a sink holds of one key."""

    body: bytes | Mapping[str, Any]
    """The whole body, or those of its fields that the sink keeps."""
    version: int | None = None
    """None if the sink does not keep it."""


class ReadableSink(Protocol):
    """What a sink has besides if its content can be compared with the source of truth."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        """What it holds of these keys; one that it does not hold is left out."""
