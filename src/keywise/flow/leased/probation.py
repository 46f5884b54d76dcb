"""Probation: how changes run whose key a worker has died with, so that nothing else waits for them."""

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import msgspec

from keywise.core.clock import Clock
from keywise.core.entry import Level

ON_PROBATION = (Level.PROBATION, Level.SOLE)
ALARM_S = 600.0
"""After this long, an operator learns that a change could not run alone."""
PAUSE_LEASES_MAX = 10
"""After failures to run alone, the process works for at most so many leases before it tries again."""


class Place(msgspec.Struct):
    """The place of one change in the window."""

    level: Level
    counts_until: float = math.inf
    """One lease after its work began."""


class ProbationWindow:
    """How many changes on probation run at a time in this process.

    One at first. Each wave that ends without a death doubles the number, up to the concurrency. When a worker has
    died on probation, here or elsewhere, it is one again. So the hundreds of changes that a dead worker had claimed are
    soon written, and a change that kills its worker takes few others along.

    A change that runs for longer than a lease no longer counts: a slow or hung one must not hold up the others. If it
    kills the worker then, the level of each that runs beside it rises too, but that is no crash of theirs.
    """

    def __init__(self, most: int, lease_s: float) -> None:
        self._most = most
        self._lease_s = lease_s
        self._limit = 1
        self._clean = 0
        """How many changes of this wave have run to their end."""
        self._places: dict[Hashable, Place] = {}
        self._is_claiming = False
        self._sole_is_next = True

    def __contains__(self, change: Hashable) -> bool:
        return change in self._places

    @property
    def is_empty(self) -> bool:
        return not self._places

    def free(self, now: float) -> int:
        """How many more changes of the level `PROBATION` may begin."""
        counted = self._counted(now)
        if self._is_claiming or any(place.level is Level.SOLE for place in counted):
            return 0
        return max(0, self._limit - len(counted))

    def has_room(self, level: Level, now: float) -> bool:
        """Whether a change of the level `PROBATION` or `SOLE` may begin."""
        return self.free(now) > 0 and (level is Level.PROBATION or not self._counted(now))

    def next_free(self, now: float) -> float:
        """When a running change no longer counts, unless it ends before; infinite if none counts or runs."""
        return min((place.counts_until for place in self._counted(now)), default=math.inf)

    def next(self, now: float, *, sole_waits: bool, others_wait: bool) -> tuple[Level, int]:
        """Return which level to claim next, and for how many changes.

        The levels take turns. While a `SOLE` change is next, no `PROBATION` change begins; otherwise one would always
        be running. After it, a wave of the others begins.
        """
        if sole_waits and (self._sole_is_next or not others_wait):
            return Level.SOLE, int(self.has_room(Level.SOLE, now))
        return Level.PROBATION, self.free(now)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Keep the free places for changes that are being claimed."""
        self._is_claiming = True
        try:
            yield
        finally:
            self._is_claiming = False

    def claimed(self, change: Hashable, level: Level) -> None:
        """Give a place to a change, which is named by its claim's token, or to a repair."""
        self._places[change] = Place(level)
        self._sole_is_next = level is not Level.SOLE

    def begun(self, change: Hashable, now: float) -> None:
        """Note that the work begins."""
        self._places[change].counts_until = now + self._lease_s

    def end(self, change: Hashable, *, clean: bool) -> None:
        """Free the place of a change. `clean` means that it has run, and the process is alive."""
        del self._places[change]
        self._clean += clean
        if self._clean >= self._limit:
            self._limit, self._clean = min(2 * self._limit, self._most), 0

    def took_over(self, level: Level) -> None:
        """Note that a claim at this level was taken over from a dead worker."""
        if level > Level.PROBATION:
            # The worker died on probation, so a change that waits here may have killed it.
            self._limit, self._clean = 1, 0

    def _counted(self, now: float) -> list[Place]:
        return [place for place in self._places.values() if place.counts_until > now]


class RunningRepair:
    """A repair that is counted as running from before its claim."""

    def __init__(self) -> None:
        self.has_run = False

    def begin(self) -> None:
        """Note that user code begins to run."""
        self.has_run = True


class Company:
    """What runs in this process, and what may begin beside it."""

    def __init__(self, concurrency: int, lease_s: float, clock: Clock) -> None:
        self.window = ProbationWindow(concurrency, lease_s)
        self._clock = clock
        self.is_draining = False
        """A change is about to run alone, or does: nothing else begins."""
        self.repairs = 0
        """How many repairs run."""

    def may_repair(self, level: Level) -> bool:
        """Whether a repair at this level may begin now. One that has to run alone is left to the claim loop."""
        if self.is_draining or level is Level.ALONE:
            return False
        return level is Level.USUAL or self.window.has_room(level, self._clock())

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Let nothing else begin."""
        self.is_draining = True
        try:
            yield
        finally:
            self.is_draining = False

    @contextmanager
    def repairing(self, level: Level) -> Iterator[RunningRepair]:
        """Count a repair as running. The caller calls its `begin` when user code begins to run."""
        repair = RunningRepair()
        self.repairs += 1
        if level in ON_PROBATION:
            self.window.claimed(repair, level)
            self.window.begun(repair, self._clock())
        try:
            yield repair
        finally:
            self.repairs -= 1
            if level in ON_PROBATION:
                self.window.end(repair, clean=repair.has_run)


class AloneTurns:
    """When this process asks for a change that has to run alone.

    Everything else waits while such a change runs, and before that for up to a lease until nothing else runs. So one
    of the other changes begins in between. After a wait in vain, a call runs that may take long: the process works
    for at least as long as it has waited before it tries again, and for twice as long after each further failure.
    """

    def __init__(self, pause_max_s: float) -> None:
        self._begun = 0
        self._begun_before = 0
        """How many of the other changes must have begun before the next turn, unless none of them waits."""
        self._pause_max_s = pause_max_s
        self._pause_s = 0.0
        self.not_before = -math.inf
        self._failed_at: float | None = None
        self._is_alarmed = False

    def change_begun(self) -> None:
        """Note that a change has begun that need not run alone."""
        self._begun += 1

    def is_due(self, now: float, *, others_wait: bool) -> bool:
        return now >= self.not_before and (self._begun >= self._begun_before or not others_wait)

    def succeeded(self) -> None:
        """Note that nothing else runs any more."""
        self._begun_before, self._pause_s, self.not_before = self._begun + 1, 0.0, -math.inf
        self._failed_at, self._is_alarmed = None, False

    def failed(self, now: float, took_s: float) -> bool:
        """Note that other changes did not end in so many seconds; return whether to raise an alarm, once."""
        self._begun_before = self._begun + 1
        self._pause_s = max(took_s, min(2 * self._pause_s, self._pause_max_s))
        self.not_before = now + self._pause_s
        self._failed_at = now if self._failed_at is None else self._failed_at
        is_new = not self._is_alarmed and now - self._failed_at >= ALARM_S
        self._is_alarmed = self._is_alarmed or is_new
        return is_new
