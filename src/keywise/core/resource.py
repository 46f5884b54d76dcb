"""What every adapter is: a resource that is opened and closed, and may be shared."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, Self


class AsyncResource(Protocol):
    """Stores its settings when it is made, connects on entering `async with`, and disconnects on leaving it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


class UserCount:
    """Counts the users of a resource that several adapters share: the first opens it, and the last closes it."""

    def __init__(self, open_first: Callable[[], Awaitable[None]], close_last: Callable[[], Awaitable[None]]) -> None:
        self._open_first, self._close_last = open_first, close_last
        self._users = 0
        self._changing = asyncio.Lock()

    async def enter(self) -> None:
        async with self._changing:
            if self._users == 0:
                await self._open_first()
            self._users += 1

    async def leave(self) -> None:
        async with self._changing:
            self._users -= 1
            if self._users == 0:
                await self._close_last()


@asynccontextmanager
async def opening(resource: AsyncResource) -> AsyncIterator[None]:
    """Open something and leave it open, unless what follows fails."""
    await resource.__aenter__()
    try:
        yield
    except BaseException:
        await resource.__aexit__()
        raise
