"""A ledger that may be down when its worker starts: it is opened by the first call that reaches it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

from keywise.core.errors import UnavailableError
from keywise.core.ledger import Ledger

T = TypeVar("T")


class LazyLedger:
    """Stands before a ledger. Until it is open, each call tries to open it, or raises UnavailableError."""

    def __init__(self, ledger: Ledger, stack: AsyncExitStack) -> None:
        self._ledger = ledger
        self._stack = stack
        self._is_open = False
        self._opening = asyncio.Lock()

    async def try_to_open(self) -> None:
        """Open it if it can be reached now; any other trouble with it is raised."""
        try:
            await self.open()
        except UnavailableError:
            return  # The worker goes on without it, and says so.

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._stack.enter_async_context(self._ledger)
                self._is_open = True

    def part(self, plug: T) -> T:
        """The ledger itself or one of its stores: each call opens the ledger first, and attributes are read as is."""
        return cast(T, _Part(self, plug))


class _Part:
    def __init__(self, lazy: LazyLedger, plug: Any) -> None:
        self._lazy = lazy
        self._plug = plug

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._plug, name)
        if not callable(act):
            return act

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._lazy.open()
            return await act(*arguments, **options)

        return call
