"""A record of an object, and the ability of a table to hold records by object and ordinal."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from keywise.core.change import Change
from keywise.core.transaction import Transaction

T = TypeVar("T")

RECORDS = "records:"
"""The source of a pipeline of records: the objects of the pipeline whose name follows."""
OBJECT_HEADER = "keywise-object"
"""The header of a record's dead letter that has the URI of its object."""


class Record(Change[T], Generic[T], gc=False):
    """One record of an object, or its deletion. Its order is that of the object.

    A sink that knows no objects uses the key alone, which no other record has.
    """

    object: str = ""
    """The URI of the object."""
    ordinal: int = 0
    """Its place in the object; the first record has 0."""


@runtime_checkable
class RecordTable(Protocol):
    """The ability of an atomic sink to find the records of an object without the ledger's help."""

    @property
    def columns(self) -> Sequence[str]:
        """The fields of a record that have columns of their own; none if the table holds whole bodies."""

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        """Do what `AtomicSink.write` does; every change is a `Record`."""

    async def delete_tails(self, transaction: Transaction, tails: Sequence[tuple[str, int]], limit: int) -> int:
        """Delete the tails of objects, up to `limit` records of all together; return how many.

        A tail is the URI of an object and the ordinal of its first record to delete.
        """
