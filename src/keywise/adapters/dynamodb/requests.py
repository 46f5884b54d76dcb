"""Slots for concurrent requests to a table: their number halves when the table throttles, and then grows one by one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keywise.core.adaptive_limit import AdaptiveLimit

PATIENCE_S = 1.0
"""A change waits for a pause of at most this length. During a longer pause it ends as *busy*."""


class RequestSlots:
    """Limits the concurrent requests of all callers together."""

    def __init__(self, requests_max: int) -> None:
        self.adaptive_limit = AdaptiveLimit(requests_max, step=1)
        self._changed = asyncio.Condition()
        self._taken = 0
        self._answered = 0
        """How many requests the table has accepted since the limit last changed."""

    @property
    def is_paused(self) -> bool:
        """Whether the pause is so long that changes do not wait for it."""
        return self.adaptive_limit.wait_s > PATIENCE_S

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more request may run, and until a short pause is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._taken < self.adaptive_limit.limit)
            self._taken += 1
        try:
            if 0 < (wait_s := self.adaptive_limit.wait_s) <= PATIENCE_S:
                await asyncio.sleep(wait_s)
            yield
        finally:
            self._taken -= 1
            async with self._changed:
                # Two: one for this slot, and one if the limit was raised.
                self._changed.notify(2)

    def record_throttling(self, cause: str) -> None:
        """Pause, and run half as many requests at a time. It is a short pause if the table accepts other requests."""
        self.adaptive_limit.record_refusal(cause, is_crowded=True, is_whole=self._answered == 0)
        self._answered = 0

    def record_outage(self, cause: str) -> None:
        """Pause after an error that concerns every change, such as an outage or a missing permission."""
        self.adaptive_limit.record_refusal(cause, is_crowded=False)

    def record_success(self) -> None:
        """Count an accepted request; after as many as the limit, raise the limit by one."""
        self._answered += 1
        is_full = self._answered >= self.adaptive_limit.limit
        self.adaptive_limit.record_success(self._answered)
        if is_full:
            self._answered = 0
