"""Flow control per key: rate limit, debounce and snooze."""

from typing import Any

import msgspec

from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.settings import seconds

PACED_KEYS_MAX = 10_000
"""When `Pace` tracks this many keys, it drops those that are no longer limited."""


class Rate(msgspec.Struct, frozen=True):
    """A rate limit per key: at most `n` dispatches in `per`, counted over all workers.

    It is GCRA: a burst of up to `n` dispatches is allowed, then one every `per / n`. Retries and repairs count too.
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
        """Seconds between two dispatches at an even pace."""
        return float(self.per) / self.n

    @property
    def burst_s(self) -> float:
        """How many seconds a burst may run ahead of the even pace."""
        return self.interval_s * (self.n - 1)


class Pace:
    """A rate limit kept in the memory of one worker, for use while the ledger is down.

    It does not know what other workers dispatch.
    """

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._rate_at: dict[str, float] = {}

    def wait_s(self, key: str, now: float) -> float:
        """Seconds until the key may be dispatched again; zero or less if it may be dispatched now."""
        return 0.0 if self._rate is None else self._rate_at.get(key, now) - self._rate.burst_s - now

    def charge(self, key: str, now: float) -> None:
        """Count one dispatch of the key."""
        if self._rate is None:
            return
        if len(self._rate_at) >= PACED_KEYS_MAX:
            self._rate_at = {one: at for one, at in self._rate_at.items() if at > now}
        self._rate_at[key] = max(self._rate_at.get(key, now), now) + self._rate.interval_s


class Debounce(msgspec.Struct, frozen=True):
    """Coalesce a burst of changes to one key: wait until the key is quiet, but no longer than `max_wait`."""

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
        """When the lane may be dispatched, given the arrival of its first and of its last change."""
        return min(first_at + self.max_wait_s, last_at + self.quiet_s)


class Snooze(KeywiseError):
    """Raise or return it in a handler that has written nothing: the change comes back later and costs no attempt."""

    def __init__(self, delay: float | str) -> None:
        self.delay_s = seconds(delay)
        if not 0 < self.delay_s < float("inf"):
            raise SettingsError(f"Snooze({delay!r}) must be above zero, and finite; write for example 500ms or 5s")
        super().__init__(f"snoozed for {self.delay_s:g} s")


def _normalise(value: Any, name: str) -> None:
    """Replace the duration in field `name` by seconds, so that "1s" and 1.0 compare as equal."""
    duration_s = seconds(getattr(value, name))
    if not 0 < duration_s < float("inf"):
        written = f"{type(value).__name__}: {name}={getattr(value, name)!r}"
        raise SettingsError(f"{written} must be above zero, and finite; write for example 500ms or 5s")
    msgspec.structs.force_setattr(value, name, duration_s)
