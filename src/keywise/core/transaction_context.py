"""The transactions inside which the running code was called.

A call that waits for a transaction of its own caller would never return; serial functions use this to refuse it.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class OpenTransaction:
    """A transaction of a store, in which user code writes."""

    __slots__ = ("database", "is_over")

    def __init__(self, database: object | None) -> None:
        self.database = database
        self.is_over = False


open_transactions: ContextVar[tuple[OpenTransaction, ...]] = ContextVar("open_transactions", default=())
"""The outermost first."""


@asynccontextmanager
async def transaction_of(database: object | None, opening: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Open a transaction of a database, and add it to `open_transactions` for the code inside."""
    opened, outer = OpenTransaction(database), open_transactions.get()
    open_transactions.set((*outer, opened))
    try:
        async with opening as transaction:
            yield transaction
    finally:
        opened.is_over = True
        open_transactions.set(outer)
