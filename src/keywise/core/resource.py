"""What every adapter is: a resource that is opened and closed."""

from typing import Protocol, Self


class AsyncResource(Protocol):
    """Stores its settings when it is made, connects on entering `async with`, and disconnects on leaving it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...
