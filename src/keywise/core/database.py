"""Optional abilities of the database that a source, a ledger and a sink may share."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class FairWriteDatabase(Protocol):
    """A database with one writer at a time, which can make a long series of writes give way to other writers."""

    def enable_fair_writes(self) -> None:
        """Give way from now on. Enabling it twice does nothing."""


@runtime_checkable
class AsyncDatabase(Protocol):
    """A database that says whether its connections have to be awaited. One that does not say so has blocking ones."""

    @property
    def is_async(self) -> bool: ...


@runtime_checkable
class SingleWriterDatabase(Protocol):
    """A database that says whether an open transaction keeps all other writers out, those of other processes too.

    No claim can be renewed then, but none can be taken over either.
    """

    @property
    def has_one_writer(self) -> bool: ...
