"""Whether the ledger can be reached: one lost connection is no outage, it is down once it was silent for a grace."""

from collections.abc import Callable

from keywise.core.clock import Clock

Tell = Callable[[float, str], None]


class Outage:
    """Hears of every answer of the ledger, and of every one that did not come. Nothing here waits."""

    def __init__(self, grace_s: float, clock: Clock, down: Tell, back: Callable[[float], None]) -> None:
        self.is_down = False
        self._grace_s = grace_s
        self._clock = clock
        self._down = down
        """Told how long ago the first answer was missed, and why."""
        self._back = back
        """Told how long it took."""
        self._since: float | None = None
        self._needs_write = False

    @property
    def seconds(self) -> float:
        """Since the first answer that did not come; 0 if the last one came."""
        return 0.0 if self._since is None else self._clock() - self._since

    def failed(self, cause: str, *, at_write: bool = True) -> None:
        """No answer came."""
        if self._since is None:
            self._since = self._clock()
        self._needs_write = self._needs_write or at_write
        if not self.is_down and self.seconds >= self._grace_s:
            self.is_down = True
            self._down(self.seconds, cause)

    def answered(self, *, at_write: bool = True) -> None:
        """An answer came. A ledger that can be read and not written, as on a full disk, is not back."""
        if self._since is None or (self._needs_write and not at_write):
            return
        was_down, seconds = self.is_down, self.seconds
        self.is_down, self._since, self._needs_write = False, None, False
        if was_down:
            self._back(seconds)
