"""Limits on one key: how often it is dispatched, and how long a burst of its changes is gathered."""

from typing import Any

import msgspec

from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.settings import seconds

PACED_KEYS_MAX = 10_000
"""Above so many, those that are limited no more are forgotten."""


class Rate(msgspec.Struct, frozen=True):
    """`n` dispatches of one key at once, then one in every n-th part of `per`, by all workers together.

    Retries and repairs count too.
    """

    n: int
    per: float | str = "1s"

    def __post_init__(self) -> None:
        n: object = self.n
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise SettingsError(f'Rate(n={self.n!r}) must be a whole number above zero; write Rate(1, per="1s")')
        _normalise(self, "per")

    @property
    def interval_s(self) -> float:
        """Between two dispatches at an even pace."""
        return float(self.per) / self.n

    @property
    def burst_s(self) -> float:
        """How far ahead of the even pace a burst may run."""
        return self.interval_s * (self.n - 1)


class Pace:
    """A rate as one worker alone keeps it, while nobody can be asked what the others do."""

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._rate_at: dict[str, float] = {}

    def wait_s(self, key: str, now: float) -> float:
        """How long until the next dispatch of a key; not above zero if it is due."""
        return 0.0 if self._rate is None else self._rate_at.get(key, now) - self._rate.burst_s - now

    def charge(self, key: str, now: float) -> None:
        """A dispatch."""
        if self._rate is None:
            return
        if len(self._rate_at) >= PACED_KEYS_MAX:
            self._rate_at = {one: at for one, at in self._rate_at.items() if at > now}
        self._rate_at[key] = max(self._rate_at.get(key, now), now) + self._rate.interval_s


class Debounce(msgspec.Struct, frozen=True):
    """Wait until a key was quiet for a while, but not for ever; what gathered meanwhile becomes one change."""

    quiet: float | str
    max_wait: float | str

    def __post_init__(self) -> None:
        _normalise(self, "quiet")
        _normalise(self, "max_wait")
        if self.max_wait_s < self.quiet_s:
            raise SettingsError(f"Debounce: max_wait={self.max_wait!r} is below quiet={self.quiet!r}; raise it")

    @property
    def quiet_s(self) -> float:
        return float(self.quiet)

    @property
    def max_wait_s(self) -> float:
        return float(self.max_wait)

    def due(self, first_at: float, last_at: float) -> float:
        """When a lane goes on whose changes arrived between two moments."""
        return min(first_at + self.max_wait_s, last_at + self.quiet_s)


class Snooze(KeywiseError):
    """Raised or returned by a handler that has written nothing: bring the change back later, it costs no attempt."""

    def __init__(self, delay: float | str) -> None:
        self.delay_s = seconds(delay)
        if not 0 < self.delay_s < float("inf"):
            raise SettingsError(f"Snooze({delay!r}) must be above zero, and finite; write for example 500ms or 5s")
        super().__init__(f"snoozed for {self.delay_s:g} s")


def _normalise(value: Any, name: str) -> None:
    """Durations become seconds once, so that equal ones are equal."""
    duration_s = seconds(getattr(value, name))
    if not 0 < duration_s < float("inf"):
        written = f"{type(value).__name__}: {name}={getattr(value, name)!r}"
        raise SettingsError(f"{written} must be above zero, and finite; write for example 500ms or 5s")
    msgspec.structs.force_setattr(value, name, duration_s)
