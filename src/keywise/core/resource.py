"""What every adapter is: something that is opened and closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, Self


class AsyncResource(Protocol):
    """Something that stores its settings when made, connects on `async with`, and disconnects after it."""

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
