"""The open store transactions that the running code was called in.

A serial call that waits for a transaction of its own caller would wait for ever; this context lets it be refused.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class OpenTransaction:
    """An open transaction of a store, in which user code runs."""

    __slots__ = ("database", "is_over")

    def __init__(self, database: object | None) -> None:
        self.database = database
        self.is_over = False


open_transactions: ContextVar[tuple[OpenTransaction, ...]] = ContextVar("open_transactions", default=())
"""The transactions that enclose the running code, outermost first."""


@asynccontextmanager
async def transaction_of(database: object | None, opening: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Open a transaction of a database, and record it in `open_transactions` while it lasts."""
    opened, outer = OpenTransaction(database), open_transactions.get()
    open_transactions.set((*outer, opened))
    try:
        async with opening as transaction:
            yield transaction
    finally:
        opened.is_over = True
        open_transactions.set(outer)
