"""The values that pass through a pipeline: a delivery carries a change to a key, and the change ends in an outcome."""

import enum
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from keywise.core.errors import MalformedError, VersionError

T = TypeVar("T")

Order: TypeAlias = tuple[int, int, int]
"""(era, version, generation), compared left to right."""

KEY_MAX_BYTES = 512
VERSION_MIN, VERSION_MAX = -(2**63), 2**63 - 1
UNVERSIONED_GENERATION = -1
"""Generations of reindexes start at 0, so `(era, 0, -1)` can represent a change that has no version."""


class Outcome(enum.StrEnum):
    """How a change ended, or why it has not ended yet (busy, failed)."""

    APPLIED = "applied"
    STALE = "stale"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    REMOVED = "removed"
    BUSY = "busy"
    FAILED = "failed"
    DEAD = "dead"


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One delivery of a message by a source. A redelivery has the same id and a new receipt."""

    id: str | int
    receipt: str | int
    body: bytes
    sent_at: float
    """When the producer sent the message, by the wall clock of the source."""
    count: int = 1
    """How often the message was delivered, including this time."""
    headers: Mapping[str, str] | None = None
    routing_key: str = ""
    """On RabbitMQ the routing key of the producer, on SQS the message group, on Pub/Sub the ordering key."""


class ChangeHeader(msgspec.Struct, gc=False):
    """The part of a change that the ledger decides on: which key to bring to which order."""

    key: str
    order: Order | None
    """None asks for exclusive access to the key only; there is nothing to commit."""
    deleted: bool = False
    sent_at: float = math.inf
    """When the message was sent, by the wall clock of the source.

    If that is longer ago than the retention and the ledger has no entry of the key, the ledger refuses the change:
    a newer version may have been applied and its entry pruned.
    """
    is_row: bool = False
    """A reindex has read the change from the origin; upstream has not announced it.

    The ledger refuses it at a version that is deleted: an operator has removed the key, and the origin still has it.
    """


class Change(ChangeHeader, Generic[T], gc=False):
    """The whole state of a key at a version, or its deletion."""

    order: Order
    body: bytes = b""
    decode: Callable[[bytes], Any] | None = None
    headers: Mapping[str, str] | None = None
    """The headers of the message, for example with a trace id; None if its source has none."""

    @property
    def version(self) -> int | None:
        """The version from upstream; None for an unversioned change."""
        _, version, generation = self.order
        return None if generation == UNVERSIONED_GENERATION else version

    @property
    def value(self) -> T:
        """The body, decoded as the pipeline's type. It is decoded on every access."""
        decode = self.decode or msgspec.json.decode
        return decode(self.body)  # type: ignore[no-any-return]


class Put(msgspec.Struct, frozen=True):
    """Returned by a read function: the body is the new state of the key."""

    key: str
    version: int | datetime | None = None


class Delete(msgspec.Struct, frozen=True):
    """Returned by a read function: the key is deleted."""

    key: str
    version: int | datetime | None = None


class Ignore(msgspec.Struct, frozen=True):
    """Returned by a read function: the message does not concern this pipeline. It is acked and counted."""

    reason: str = ""


def order_of(version: int | datetime | None, era: int = 0) -> Order:
    """Return the order of a new change at a version; None means that the change is unversioned."""
    if version is None:
        return (era, 0, UNVERSIONED_GENERATION)
    return (era, version_of(version), 0)


def is_unversioned(order: Order) -> bool:
    return order[2] == UNVERSIONED_GENERATION


def is_same_version(one: Order, other: Order) -> bool:
    """Whether two orders have the same era and version, at any generation; unversioned ones of an era are the same."""
    if is_unversioned(one) and is_unversioned(other):
        return one[0] == other[0]
    return one[:2] == other[:2] and not is_unversioned(one) and not is_unversioned(other)


def above(order: Order) -> Order:
    """Return an order that upstream cannot send: above this one, and below the next version."""
    era, version, generation = order
    if is_unversioned(order):
        return (era, version + 1, generation)
    return (era, version, generation + 1)


def version_of(moment: int | datetime | str) -> int:
    """Convert an integer, a datetime or an RFC 3339 text to a version. A time becomes microseconds since 1970."""
    if isinstance(moment, bool) or not isinstance(moment, int | datetime | str):
        raise VersionError(f"version {moment!r} must be a whole number or a datetime")
    if isinstance(moment, str):
        moment = _parsed(moment)
    if isinstance(moment, datetime):
        moment = _microseconds(moment)
    if not VERSION_MIN <= moment <= VERSION_MAX:
        raise VersionError(f"version {moment} does not fit into 64 bits")
    return moment


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise VersionError(f"version {text!r} is neither a whole number nor an RFC 3339 time") from None


def _microseconds(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise VersionError(
            f"version {moment.isoformat()} has no time zone: two hosts would read it differently; add one"
        )
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def check_key(key: str) -> None:
    """Raise `MalformedError` if the key cannot be stored in every ledger."""
    if not key:
        raise MalformedError("key is empty")
    if "\0" in key:
        raise MalformedError(f"key {key[:40]!r} contains NUL")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise MalformedError(f"key {key[:40]!r} contains a lone surrogate") from None
    if size > KEY_MAX_BYTES:
        raise MalformedError(f"key {key[:40]!r}… has {size} bytes, the limit is {KEY_MAX_BYTES}")
