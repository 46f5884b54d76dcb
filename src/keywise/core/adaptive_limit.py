"""A limit that follows the load that a store accepts: additive increase and multiplicative decrease (AIMD)."""

import math

from keywise.core.clock import Clock, boot_time

BACKOFF_S, BACKOFF_MAX_S = 0.1, 5.0


class AdaptiveLimit:
    """Adapts to the load that a store accepts: pauses after a refusal, halves the limit, and raises it step by step."""

    def __init__(self, limit_max: int, clock: Clock = boot_time, *, step: int | None = None) -> None:
        self.limit = limit_max
        """The most changes at once, in one request or in several requests side by side."""
        self.cause = ""
        self._limit_max = limit_max
        self._clock = clock
        self._step = step
        """How much is added to the limit when it may be raised; None: a quarter of it."""
        self._until = -math.inf
        self._refusals = 0

    @property
    def wait_s(self) -> float:
        """The rest of the pause; zero or less if there is none."""
        return self._until - self._clock()

    def record_refusal(
        self, cause: str, *, wait_s: float | None = None, is_crowded: bool, is_whole: bool = True
    ) -> None:
        """Start or prolong the pause after a refusal.

        `is_whole`: the store refused all changes of a request, not only some. `is_crowded`: it refused because there
        were too many at once. `wait_s`: the pause that it asked for.
        """
        if self.wait_s <= 0:
            # Requests that were already under way when the pause began report the same overload again.
            self._refusals += is_whole
            self.limit = max(1, self.limit // 2) if is_crowded else self.limit
        self.cause = cause
        backoff_s = min(BACKOFF_S * 2 ** min(self._refusals, 10), BACKOFF_MAX_S)
        self._until = max(self._until, self._clock() + (backoff_s if wait_s is None else wait_s))

    def record_success(self, changes: int) -> None:
        """Record that a store accepted so many changes at once. If they reached the limit, it is raised."""
        self._refusals = 0
        if changes >= self.limit:
            step = max(1, self.limit // 4) if self._step is None else self._step
            self.limit = min(self._limit_max, self.limit + step)
