"""What every adapter is: something that is opened and closed."""

from typing import Protocol, Self


class AsyncResource(Protocol):
    """Something that stores its settings when made, connects on `async with`, and disconnects after it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...
