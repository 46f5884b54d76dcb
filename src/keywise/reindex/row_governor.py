"""The governor of rows: in one process, rows give way when live changes wait for longer than they do without rows.

It measures how long live changes wait, from their sending until they are settled, and compares the 99th percentile with
the base: the same percentile while no rows are written. Nothing here awaits; the worker asks how many rows a page may
have, and how long to rest after it.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from keywise.core.change import Outcome
from keywise.core.clock import Clock
from keywise.core.events import Event, Settled

FACTOR, FLOOR_S = 1.5, 0.003
"""Rows give way if live changes wait for longer than the base times the factor, plus the floor."""
SHARE_MIN, SHARE_STEP, SHARE_CUT = 0.05, 0.05, 0.5
"""The least share of full speed; what a look adds to the share if it finds short waits; and the factor by which it cuts
the share if it finds long ones."""
LOOK_CHANGES, LOOK_S = 100, 2.0
"""The governor looks at the waits of so many changes together, or of those that were settled in so many seconds."""
REST_EVERY_S, REST_S = 30.0, 2.0
"""All processes rest at the same time by the wall clock, so often and for so long, to measure the base again."""
CALM_S = 0.5
"""A rest measures the base only after so long: until then, the last pages of other processes end."""
REST_MAX_S = 2.0
"""The longest rest after a page for the sake of the share. If the common rest of all processes follows, it is added."""
LIVE_S = 30.0
"""A process without a live change for so long writes rows at full speed, and takes no rests."""
FRESH_S = 5.0
"""After a break of this length, rows begin at the least share, if the base is known."""
BASE_CHANGES_MIN = 10
"""The base is known once so many changes were measured."""
BASE_S, BASE_WAITS_MIN, BASE_WAITS_MAX = 120.0, 20, 500
"""The base forgets waits that are older than this, but keeps so many at least, and so many at the most."""
UNUSUAL_S = 30.0
"""A change that waits for longer waits for something other than rows, such as a retry or its snooze."""


class Pace(msgspec.Struct, frozen=True):
    """How slowly rows go in one process, and why."""

    share: float
    """Of full speed."""
    live_s: float
    """How long live changes have waited, at the 99th percentile, when the governor looked last."""
    base_s: float | None
    """The same without rows; None if that is not known."""


Wait = tuple[float, int]
"""How long the oldest of some changes has waited, and how many they are."""


def percentile_99(waits: Iterable[Wait]) -> float:
    """Return the 99th percentile of waits; 0 if there are none.

    Waits of more than `UNUSUAL_S` do not count, unless more than half of the changes have them: then the live changes
    are behind.
    """
    every = sorted(waits)
    usual = [one for one in every if one[0] <= UNUSUAL_S]
    if 2 * _changes(usual) < _changes(every):
        usual = every
    left = math.ceil(0.99 * _changes(usual))
    for wait_s, changes in usual:
        left -= changes
        if left <= 0:
            return wait_s
    return 0.0


def allowed_s(base_s: float | None) -> float:
    """Return how long live changes may wait beside rows; if the base is not known, as long as a rest could measure."""
    return REST_S if base_s is None else FACTOR * base_s + FLOOR_S


def share_after(share: float, live_s: float, base_s: float | None) -> float:
    """Return at which share of full speed rows go on after a look."""
    if live_s > allowed_s(base_s):
        return max(SHARE_MIN, share * SHARE_CUT)
    return min(1.0, share + SHARE_STEP)


class RowGovernor:
    """Watches the live changes of one process, and says how fast it may write rows.

    It observes the events of live changes, and of no others.
    """

    def __init__(self, wall: Clock, debounce_s: float = 0.0) -> None:
        """`debounce_s` is how long each change has to wait anyway."""
        self._wall = wall
        self._debounce_s = debounce_s
        self._share = 1.0
        self._live_at = -math.inf
        """When a live change was settled last."""
        self._base: deque[tuple[float, Wait]] = deque(maxlen=BASE_WAITS_MAX)
        """Waits without rows, and when they ended."""
        self._recent: list[Wait] = []
        """Waits beside rows since the last look."""
        self._looked_at = -math.inf
        self._live_s = 0.0
        self._base_s: float | None = None
        self._is_writing = False
        """Whether this process takes part in writing rows."""
        self._ended_at = wall()
        """When it last stopped taking part."""
        self._pages = 0
        """How many pages are being read or written."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Settled) and event.sent_at and event.outcome is not Outcome.DEAD:
            self._note(event.sent_at + self._debounce_s, event.changes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Govern the rows that are written while the block lasts."""
        now = self._wall()
        if now - self._ended_at >= FRESH_S:
            # Other processes may have begun a moment earlier.
            self._base = deque((one for one in self._base if one[0] < now - REST_S), BASE_WAITS_MAX)
            self._share = 1.0 if self._known_base() is None else SHARE_MIN
        self._is_writing = True
        self._start_look(now)
        try:
            yield
        finally:
            self._is_writing = False
            self._ended_at = self._wall()

    @contextmanager
    def page(self) -> Iterator[None]:
        """Note that a page is being read or written while the block lasts."""
        self._pages += 1
        try:
            yield
        finally:
            self._pages -= 1

    @property
    def share(self) -> float:
        """At which share of full speed rows go now."""
        return self._share if self._has_live(self._wall()) else 1.0

    @property
    def pace(self) -> Pace | None:
        """How slowly rows go, and why; None if they go at full speed."""
        return Pace(self.share, self._live_s, self._base_s) if self.share < 1.0 else None

    def rest_s(self, took_s: float) -> float:
        """Return how long to rest after a page that took so long."""
        now = self._wall()
        if not self._has_live(now):
            return 0.0
        rest_s = min(REST_MAX_S, took_s * (1.0 / self._share - 1.0))
        since = (now + rest_s) % REST_EVERY_S
        return rest_s + (REST_S - since if since < REST_S else 0.0)

    def _note(self, ready_at: float, changes: int) -> None:
        """Note changes that are settled now; the oldest of them could be processed since `ready_at`."""
        now = self._wall()
        self._live_at = now
        wait = max(0.0, now - ready_at), changes
        if ready_at >= self._calm_since(now):
            self._base.append((now, wait))
        elif self._is_writing and not _is_rest(now):
            self._recent.append(wait)
            if _changes(self._recent) >= LOOK_CHANGES or now - self._looked_at >= LOOK_S:
                self._look(now)

    def _calm_since(self, now: float) -> float:
        """Return since when no process has written rows, as far as this one knows; infinite while rows are written."""
        if not self._is_writing:
            return self._ended_at + REST_S
        if self._pages or not _is_rest(now):
            return math.inf
        return now - now % REST_EVERY_S + CALM_S

    def _look(self, now: float) -> None:
        while len(self._base) > BASE_WAITS_MIN and self._base[0][0] < now - BASE_S:
            self._base.popleft()
        self._live_s, self._base_s = percentile_99(self._recent), self._known_base()
        self._share = share_after(self._share, self._live_s, self._base_s)
        self._start_look(now)

    def _start_look(self, now: float) -> None:
        self._recent, self._looked_at = [], now

    def _known_base(self) -> float | None:
        waits = [wait for _, wait in self._base]
        return percentile_99(waits) if _changes(waits) >= BASE_CHANGES_MIN else None

    def _has_live(self, now: float) -> bool:
        return now - self._live_at < LIVE_S


def _is_rest(now: float) -> bool:
    return now % REST_EVERY_S < REST_S


def _changes(waits: Iterable[Wait]) -> int:
    return sum(changes for _, changes in waits)
