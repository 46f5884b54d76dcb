"""What every adapter is: a resource that is opened and closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, Self


class AsyncResource(Protocol):
    """Stores its settings when it is made, connects on entering `async with`, and disconnects on leaving it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


@asynccontextmanager
async def opening(resource: AsyncResource) -> AsyncIterator[None]:
    """Open something and leave it open, unless what follows fails."""
    await resource.__aenter__()
    try:
        yield
    except BaseException:
        await resource.__aexit__()
        raise
