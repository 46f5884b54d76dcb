"""The event that an idle loop waits for: something has changed, check again."""

import asyncio


class Wakeup:
    """An auto-reset event for one waiting loop. A notification is kept until the next wait."""

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
