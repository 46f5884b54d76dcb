"""Something changed, look again: what loops wait for when they have nothing to do."""

import asyncio


class Wakeup:
    """An auto-reset event for one waiting loop. A notification while nobody waits is kept."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()

    async def wait(self, limit_s: float | None = None) -> None:
        """Return at the next notification, or after the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()
