"""Something changed, look again: what loops wait for when they have nothing to do."""

import asyncio


class News:
    """A bell for one waiting loop. A ring while nobody waits is kept."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def tell(self) -> None:
        self._rung.set()

    async def wait(self, limit_s: float | None = None) -> None:
        """Return at the next ring, or after the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()
