"""Time for the promises of a source whose clock cannot be moved: it passes for real, and a second is shorter."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chaos.fleet import pause
from keywise.adapters.sqs.source import SqsSource
from keywise.core.change import Delivery
from keywise.testing.conformance.sources import LATER_S

SECOND_S = 0.1
"""How long a second of a promise takes. SQS knows whole seconds, and promises hide messages for tens of seconds."""
AHEAD_S = 5 * LATER_S
"""How long before its end a promise looks whether a message is still hidden."""


class WaitingClock:
    """Waits where a promise moves the clock. All else should take no time, and on a busy machine it does."""

    def __init__(self, second_s: float = SECOND_S) -> None:
        self.second_s = second_s
        self._began_at = 0.0
        self._waited_s = 0.0
        self._lost_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure how much time passes while nobody waits for it."""
        self._began_at, self._waited_s = time.monotonic(), 0.0
        try:
            yield
        finally:
            self._lost_s = time.monotonic() - self._began_at - self._waited_s

    def advance(self, seconds: float) -> None:
        before = time.monotonic()
        pause(seconds * self.second_s)
        # A pause that took longer than it should has lost time, too.
        self._waited_s += min(time.monotonic() - before, seconds * self.second_s)

    @property
    def is_late(self) -> bool:
        """Whether so much time was lost that a message may have come back before a promise looked."""
        return self._lost_s >= AHEAD_S * self.second_s


class ShortTimesSource:
    """A source on SQS whose durations are shorter than they say."""

    def __init__(self, source: SqsSource, second_s: float) -> None:
        self.visibility_s = source.visibility_s / second_s
        self.database = source.database
        self.receive = source.receive
        self.ack = source.ack
        self.depth = source.depth
        self._source = source
        self._second_s = second_s

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        return await self._source.extend(deliveries, visibility_s * self._second_s)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await self._source.release(deliveries, delay_s * self._second_s)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        await self._source.send(bodies, delay_s=delay_s * self._second_s)
