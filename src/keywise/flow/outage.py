"""Outage detection: the ledger counts as down once it has not answered for a grace period."""

from collections.abc import Callable

from keywise.core.clock import Clock

ReportDown = Callable[[float, str], None]


class Outage:
    """The state of the ledger as this worker sees it. Callers report each call that was answered or failed.

    A single lost connection is not an outage. Nothing here waits.
    """

    def __init__(self, grace_s: float, clock: Clock, down: ReportDown, back: Callable[[float], None]) -> None:
        self.is_down = False
        self._grace_s = grace_s
        self._clock = clock
        self._down = down
        """Called when an outage begins, with the seconds since the first failed call and the cause."""
        self._back = back
        """Called when an outage ends, with its seconds."""
        self._since: float | None = None
        self._needs_write = False

    @property
    def seconds(self) -> float:
        """Seconds since the first call that failed; 0 if the last call was answered."""
        return 0.0 if self._since is None else self._clock() - self._since

    def failed(self, cause: str, *, at_write: bool = True) -> None:
        """Record a call without an answer. `at_write=False` is for a call that only reads."""
        if self._since is None:
            self._since = self._clock()
        self._needs_write = self._needs_write or at_write
        if not self.is_down and self.seconds >= self._grace_s:
            self.is_down = True
            self._down(self.seconds, cause)

    def answered(self, *, at_write: bool = True) -> None:
        """Record an answered call. After a failed write only a write ends the outage.

        On a full disk, for example, the ledger can be read but not written.
        """
        if self._since is None or (self._needs_write and not at_write):
            return
        was_down, seconds = self.is_down, self.seconds
        self.is_down, self._since, self._needs_write = False, None, False
        if was_down:
            self._back(seconds)
