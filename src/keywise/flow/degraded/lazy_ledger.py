"""A ledger that may be down when its worker starts: the first call that can reach it opens it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

from keywise.core.errors import UnavailableError
from keywise.core.ledger import Ledger

T = TypeVar("T")


class LazyLedger:
    """A proxy for a ledger. Until the ledger is open, each call first tries to open it, or raises UnavailableError."""

    def __init__(self, ledger: Ledger, stack: AsyncExitStack) -> None:
        self._ledger = ledger
        self._stack = stack
        self._is_open = False
        self._opening = asyncio.Lock()

    async def try_to_open(self) -> None:
        """Open the ledger if it can be reached now. Any other error is raised."""
        try:
            await self.open()
        except UnavailableError:
            return  # The worker starts without the ledger, and reports the outage.

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._stack.enter_async_context(self._ledger)
                self._is_open = True

    def part(self, target: T) -> T:
        """Return a proxy for the ledger itself or for one of its other roles, such as `LedgerAdmin`."""
        return cast(T, _Part(self, target))


class _Part:
    """A proxy whose methods open the ledger first; attributes that are not methods are passed through."""

    def __init__(self, lazy: LazyLedger, target: Any) -> None:
        self._lazy = lazy
        self._target = target

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._target, name)
        if not callable(act):
            return act

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._lazy.open()
            return await act(*arguments, **options)

        return call
