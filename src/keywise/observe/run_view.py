"""The figures of a running worker: an observer that collects them, and a snapshot of each pipeline."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.clock import Clock

WINDOW_S = 5.0
"""The current rate is the average over this time."""
RECENT_S = 60.0
"""A slow call is forgotten after this time."""
SLOW_MAX = 20
"""How many slow keys are kept: more than are shown, because they expire one by one."""
NOTICES_MAX = 3
"""How many warnings, and how many alarms, are kept for each pipeline."""

ENDS = (Outcome.APPLIED, Outcome.STALE, Outcome.DUPLICATE, Outcome.SUPERSEDED, Outcome.DEAD)
"""The outcomes that a change can end with."""


class SlowCall(msgspec.Struct, frozen=True):
    """The last call for a key, if it was among the slowest; `others` is how many more keys were in the call."""

    key: str
    others: int
    seconds: float
    at: float


class Notice(msgspec.Struct):
    """A warning or an alarm, and how often it came in a row."""

    event: events.Event
    at: float
    times: int = 1

    def is_same(self, event: events.Event) -> bool:
        return type(event) is type(self.event) and _subject(event) == _subject(self.event)


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one pipeline."""

    pipeline: str
    state: str
    """`starting`, `running`, `paused`, `draining` or `stopped`."""
    ledger_down: events.LedgerDown | None = None
    """The current outage of the ledger, if there is one."""
    grade: str
    sources: Sequence[dict[str, str]]
    seconds: float
    """The time from the start until now, or until the end."""
    changes: int
    """How many changes have ended or were ignored."""
    rate_now: float
    rate_average: float
    lag_s: float | None
    """How old the last change was when it ended; None if none has ended lately."""
    idle_s: float | None
    """How long ago the last change ended; None if none has ended yet."""
    outcomes: dict[str, int]
    failed_tries: int
    lanes: events.Waiting | None
    slowest: Sequence[SlowCall]
    """The slowest first."""
    warnings: Sequence[Notice]
    """The newest last, as for alarms."""
    alarms: Sequence[Notice]
    now: float
    """When the snapshot was taken, by the same clock as `at` in notices and calls."""


class View:
    """An observer that collects the figures of a run. `look` may be called from another thread."""

    def __init__(self, names: Sequence[str], *, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self.sources = 0
        """How many sources have started."""
        self.stirred = False
        """Set by every event but `Waiting`; the reader clears it to find out whether something happens."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = {name: _Seen(name, clock(), wall) for name in names}

    def __call__(self, event: events.Event) -> None:
        seen = self._seen.get(event.pipeline)
        if seen is None:
            return
        # Waiting is emitted every second, even while nothing happens.
        if not isinstance(event, events.Waiting):
            self.stirred = True
        take = seen.takers.get(type(event))
        if take is not None:
            with self._lock:
                take(event, self._clock())
                self.sources += isinstance(event, events.Started)

    def look(self) -> list[PipelineView]:
        """Return a snapshot of each pipeline."""
        with self._lock:
            now = self._clock()
            return [seen.look(now) for seen in self._seen.values()]


class _Seen:
    """The figures of one pipeline."""

    def __init__(self, name: str, now: float, wall: Clock) -> None:
        self._name = name
        self._wall = wall
        self._grade = ""
        self._sources: list[dict[str, str]] = []
        self._state = "starting"
        self._is_paused = False
        self._ledger_down: events.LedgerDown | None = None
        self._started_at = now
        self._stopped_at: float | None = None
        self._outcomes: Counter[str] = Counter()
        self._failed_tries = 0
        self._changes = 0
        self._looks = deque([(now, 0)])
        self._ended_at: float | None = None
        self._lag_s: float | None = None
        self._lanes: events.Waiting | None = None
        self._slow: dict[str, SlowCall] = {}
        self._slow_floor_s = 0.0
        self._warnings: deque[Notice] = deque(maxlen=NOTICES_MAX)
        self._alarms: deque[Notice] = deque(maxlen=NOTICES_MAX)
        self.takers: dict[type[events.Event], Callable[[Any, float], None]] = {
            events.Settled: self._settle,
            events.Ignored: self._ignore,
            events.Handled: self._time,
            events.Waiting: self._wait,
            events.Paused: self._pause,
            events.Resumed: self._pause,
            events.Started: self._start,
            events.Draining: self._end,
            events.Stopped: self._end,
            events.Failed: self._fail,
            events.DeadLettered: self._warn,
            events.TookOver: self._warn,
            events.ClaimLost: self._warn,
            events.Unavailable: self._warn,
            events.LedgerDown: self._lose_ledger,
            events.LedgerBack: self._find_ledger,
            events.MarkedSuspect: self._warn,
            events.Unrepairable: self._warn,
            events.Alarmed: self._alarm,
        }
        """The handler of each type of event that changes a figure; other types are ignored."""

    def look(self, now: float) -> PipelineView:
        seconds = (self._stopped_at or now) - self._started_at
        idle_s = None if self._ended_at is None else now - self._ended_at
        return PipelineView(
            pipeline=self._name,
            state="paused" if self._is_paused and self._state == "running" else self._state,
            ledger_down=self._ledger_down,
            grade=self._grade,
            sources=tuple(self._sources),
            seconds=seconds,
            changes=self._changes,
            rate_now=self._rate(now),
            rate_average=self._changes / seconds if seconds > 0 else 0.0,
            lag_s=self._lag_s if idle_s is not None and idle_s <= WINDOW_S else None,
            idle_s=idle_s,
            outcomes={end.value: self._outcomes[end.value] for end in ENDS} | {"ignored": self._outcomes["ignored"]},
            failed_tries=self._failed_tries,
            lanes=self._lanes,
            slowest=self._slowest(now),
            warnings=[msgspec.structs.replace(notice) for notice in self._warnings],
            alarms=[msgspec.structs.replace(notice) for notice in self._alarms],
            now=now,
        )

    def _settle(self, event: events.Settled, now: float) -> None:
        self._count(event.outcome.value, event.changes, now)
        if event.sent_at:
            self._lag_s = max(0.0, self._wall() - event.sent_at)

    def _ignore(self, event: events.Ignored, now: float) -> None:
        self._count("ignored", event.changes, now)

    def _wait(self, event: events.Waiting, now: float) -> None:
        self._lanes = event

    def _pause(self, event: events.Paused | events.Resumed, now: float) -> None:
        self._is_paused = isinstance(event, events.Paused)

    def _end(self, event: events.Draining | events.Stopped, now: float) -> None:
        self._state = "stopped" if isinstance(event, events.Stopped) else "draining"
        self._stopped_at = now if isinstance(event, events.Stopped) else None

    def _fail(self, event: events.Failed, now: float) -> None:
        self._failed_tries += 1
        self._warn(event, now)

    def _warn(self, event: events.Event, now: float) -> None:
        _note(self._warnings, event, now)

    def _alarm(self, event: events.Alarmed, now: float) -> None:
        _note(self._alarms, event, now)

    def _lose_ledger(self, event: events.LedgerDown, now: float) -> None:
        self._ledger_down = event
        self._warn(event, now)

    def _find_ledger(self, event: events.LedgerBack, now: float) -> None:
        self._ledger_down = None

    def _start(self, event: events.Started, now: float) -> None:
        if not self._sources:
            self._started_at = now
            self._looks = deque([(now, self._changes)])
        self._state = "running"
        self._grade = event.grade
        self._sources.append({"source": event.source, "strategy": event.strategy})

    def _count(self, outcome: str, changes: int, now: float) -> None:
        self._outcomes[outcome] += changes
        self._changes += changes
        self._ended_at = now

    def _time(self, event: events.Handled, now: float) -> None:
        """Keep the call if it is among the slowest. For most calls this costs one comparison."""
        key = event.keys[0] if event.keys else ""
        slow = self._slow
        if event.seconds <= self._slow_floor_s and key not in slow:
            return
        slow[key] = SlowCall(key, len(event.keys) - 1, event.seconds, now)
        if len(slow) > SLOW_MAX:
            del slow[min(slow, key=lambda one: slow[one].seconds)]
        self._slow_floor_s = _floor_s(slow)

    def _slowest(self, now: float) -> list[SlowCall]:
        recent = {key: call for key, call in self._slow.items() if now - call.at <= RECENT_S}
        if len(recent) < len(self._slow):
            self._slow, self._slow_floor_s = recent, _floor_s(recent)
        return sorted(recent.values(), key=lambda call: -call.seconds)

    def _rate(self, now: float) -> float:
        """Return the rate since the oldest of the kept looks, which is about a window old."""
        looks = self._looks
        while len(looks) > 1 and now - looks[1][0] >= WINDOW_S:
            looks.popleft()
        since, before = looks[0]
        looks.append((now, self._changes))
        return (self._changes - before) / (now - since) if now > since else 0.0


def _floor_s(slow: dict[str, SlowCall]) -> float:
    """Return the time that a call has to exceed to be kept."""
    return min(call.seconds for call in slow.values()) if len(slow) >= SLOW_MAX else 0.0


def _note(notices: deque[Notice], event: events.Event, now: float) -> None:
    last = notices[-1] if notices else None
    if last is not None and last.is_same(event):
        last.event, last.at, last.times = event, now, last.times + 1
    else:
        notices.append(Notice(event, now))


def _subject(event: events.Event) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(event)
    return tuple(fields.get(name) for name in ("key", "what", "cause"))
