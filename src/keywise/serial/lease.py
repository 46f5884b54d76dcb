"""The lease of one process in a serial store: renews it in time, and stops running calls when the store is silent."""

import asyncio
from collections.abc import Callable

from keywise.core.clock import Clock
from keywise.core.settings import SerialSettings


class Pulse:
    """Beats a few times in a third of a lease."""

    def __init__(
        self, settings: SerialSettings, clock: Clock, lose: Callable[[], None], renew: Callable[[], None]
    ) -> None:
        self._lease_s = settings.lease_s
        self._margin_s = settings.margin_s
        self._clock = clock
        self._lose = lose
        self._renew = renew
        self.heard_at = clock()
        """When a call was sent that the store has answered."""
        self.renewed_at = self.heard_at
        """When a renewal was: other calls do not say which turns are lost."""

    def left_s(self) -> float:
        """How long this process may still count on its turns."""
        return self.heard_at + self._lease_s - self._margin_s - self._clock()

    async def run(self) -> None:
        """Renew at a third of the lease; break off what runs when the store was silent for too long."""
        rhythm_s = self._lease_s / 3
        while True:
            await asyncio.sleep(max(0.001, min(rhythm_s / 4, self.left_s())))
            if self.left_s() <= 0:
                self._lose()
            if self._clock() - min(self.heard_at, self.renewed_at) > rhythm_s:
                self._renew()
            if self.left_s() <= 0:
                await asyncio.sleep(rhythm_s / 4)
