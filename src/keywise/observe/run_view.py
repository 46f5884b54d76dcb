"""The figures of a running worker: an observer that collects them, and snapshots of each pipeline."""

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.clock import Clock

WINDOW_S = 5.0
"""The current rate is the average over this time."""
RECENT_S = 60.0
"""A slow call is forgotten after this time."""
SLOW_MAX = 20
"""How many slow calls are kept: more than are shown, because they expire one by one."""
OBJECTS_MAX = 100
"""How many objects are followed; of more, those whose last part is longest ago are left out."""
NOTICES_MAX = 3
"""How many warnings, and how many alarms, are kept for each pipeline."""

ENDS = (Outcome.APPLIED, Outcome.STALE, Outcome.DUPLICATE, Outcome.SUPERSEDED, Outcome.REMOVED, Outcome.DEAD)
OUTCOMES = (*(end.value for end in ENDS), "ignored")
"""The outcomes that a change can end with."""
ENDED_STAGES = ("complete", "cancelled")
RARE = ("removed", "ignored")
"""Outcomes that most pipelines never have; a view for people leaves them out while they are 0."""
_OF_CHANGES = (events.Failed, events.DeadLettered, events.TookOver, events.ClaimLost)
_OF_STORES = (
    events.Unavailable,
    events.LedgerDown,
    events.MarkedSuspect,
    events.Unrepairable,
    events.SinkEmpty,
    events.Misdirected,
)
_WARNINGS = (*_OF_CHANGES, *_OF_STORES)
_OF_REINDEXES = (events.ShardAdvanced, events.ReindexMoved, events.ReindexEnded, events.TargetSwapped)


class SlowCall(msgspec.Struct, frozen=True):
    """The last call whose first key was `key`, if it was among the slowest; `others` is how many more keys it had."""

    key: str
    others: int
    seconds: float
    at: float


class ObjectProgress(msgspec.Struct, frozen=True):
    """An object that is read in parts: how many records are written, and how many of its bytes are read."""

    key: str
    records: int
    read: int
    size: int
    at: float
    """When its last part was written."""


class ReindexProgress(msgspec.Struct, frozen=True):
    """A reindex as one worker sees it: its stage, and how many rows this worker has read."""

    generation: int
    stage: str
    rows: int = 0


class Notice(msgspec.Struct):
    """A warning or an alarm, and how often it occurred in a row."""

    event: events.Event
    at: float
    times: int = 1


class PipelineView(msgspec.Struct, kw_only=True):
    """The figures of one pipeline. `View.look` returns copies, which do not change."""

    pipeline: str
    state: str = "starting"
    """`starting`, `running`, `paused`, `draining` or `stopped`."""
    ledger_down: events.LedgerDown | None = None
    """The current outage of the ledger, if there is one."""
    grade: str = ""
    sources: Sequence[dict[str, str]] = ()
    seconds: float = 0.0
    """The time from the start until now, or until the end."""
    changes: int = 0
    """How many changes have ended or were ignored."""
    rate_now: float = 0.0
    rate_average: float = 0.0
    lag_s: float | None = None
    """How old the last change was when it ended; None if none has ended lately."""
    idle_s: float | None = None
    """How long ago the last change ended; None if none has ended yet."""
    outcomes: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    failed_attempts: int = 0
    lanes: events.Waiting | None = None
    slowest: Sequence[SlowCall] = ()
    """The slowest first."""
    objects: Sequence[ObjectProgress] = ()
    """The objects that are being read in parts, the largest first."""
    reindex: ReindexProgress | None = None
    """The reindex that is going on, if there is one."""
    warnings: Sequence[Notice] = ()
    """The newest last, as for alarms."""
    alarms: Sequence[Notice] = ()
    now: float
    """When the snapshot was taken, by the clock that also dates notices and calls."""


class View:
    """An observer that collects the figures of a run. `look` may be called from another thread."""

    def __init__(self, names: Sequence[str], *, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self.sources = 0
        """How many sources have started."""
        self.stirred = False
        """Set by every event except `Waiting`. The reader clears it to find out whether something happens."""
        self._clock = clock
        self._lock = threading.Lock()
        self._collectors = {name: _Collector(name, clock(), wall) for name in names}

    def __call__(self, event: events.Event) -> None:
        collector = self._collectors.get(event.pipeline)
        if collector is None:
            return
        # The flow emits `Waiting` every second, even while nothing happens.
        if not isinstance(event, events.Waiting):
            self.stirred = True
        with self._lock:
            collector.take(event, self._clock())
            self.sources += isinstance(event, events.Started)

    def look(self) -> list[PipelineView]:
        """Return a snapshot of each pipeline."""
        with self._lock:
            now = self._clock()
            return [collector.look(now) for collector in self._collectors.values()]


class _Collector:
    """Collects the figures of one pipeline."""

    def __init__(self, name: str, now: float, wall: Clock) -> None:
        self._view = PipelineView(pipeline=name, now=now)
        self._wall = wall
        self._is_paused = False
        self._started_at = now
        self._stopped_at: float | None = None
        self._looks = deque([(now, 0)])
        self._ended_at: float | None = None
        self._slow: dict[str, SlowCall] = {}
        self._slow_floor_s = 0.0
        self._objects: dict[str, ObjectProgress] = {}
        """The objects of which a part was written; one leaves when its call has ended."""
        self._warnings: deque[Notice] = deque(maxlen=NOTICES_MAX)
        self._alarms: deque[Notice] = deque(maxlen=NOTICES_MAX)

    def look(self, now: float) -> PipelineView:
        view = self._view
        seconds = (self._stopped_at or now) - self._started_at
        idle_s = None if self._ended_at is None else now - self._ended_at
        return msgspec.structs.replace(
            view,
            state="paused" if self._is_paused and view.state == "running" else view.state,
            seconds=seconds,
            rate_now=self._rate(now),
            rate_average=view.changes / seconds if seconds > 0 else 0.0,
            lag_s=view.lag_s if idle_s is not None and idle_s <= WINDOW_S else None,
            idle_s=idle_s,
            outcomes={name: view.outcomes[name] for name in OUTCOMES},
            slowest=self._slowest(now),
            objects=sorted(self._objects.values(), key=lambda one: (-one.size, one.key)),
            warnings=[msgspec.structs.replace(notice) for notice in self._warnings],
            alarms=[msgspec.structs.replace(notice) for notice in self._alarms],
            now=now,
        )

    def take(self, event: events.Event, now: float) -> None:
        """Update the figures that an event concerns; the most frequent events come first."""
        view = self._view
        match event:
            case events.Settled():
                self._count(event.outcome.value, event.changes, now)
                if event.sent_at:
                    view.lag_s = max(0.0, self._wall() - event.sent_at)
            case events.Handled():
                self._time(event, now)
                self._forget(event.keys)
            case events.Advanced():
                self._advance(event, now)
            case events.Ignored():
                self._count("ignored", event.changes, now)
            case events.Waiting():
                view.lanes = event
            case events.Paused() | events.Resumed():
                self._is_paused = isinstance(event, events.Paused)
            case events.Started() | events.Draining() | events.Stopped():
                self._change_state(event, now)
            case events.LedgerBack():
                view.ledger_down = None
            case events.Alarmed() | events.SweepHeld() | events.SwapRefused():
                _note(self._alarms, event, now)
            case _ if isinstance(event, _OF_REINDEXES):
                view.reindex = _followed(view.reindex, event)
            case _ if isinstance(event, _WARNINGS):
                view.failed_attempts += isinstance(event, events.Failed)
                view.ledger_down = event if isinstance(event, events.LedgerDown) else view.ledger_down
                _note(self._warnings, event, now)

    def _change_state(self, event: events.Started | events.Draining | events.Stopped, now: float) -> None:
        if isinstance(event, events.Started):
            self._start(event, now)
            return
        is_over = isinstance(event, events.Stopped)
        self._view.state, self._stopped_at = ("stopped", now) if is_over else ("draining", None)

    def _start(self, event: events.Started, now: float) -> None:
        view = self._view
        if not view.sources:
            self._started_at = now
            self._looks = deque([(now, view.changes)])
        view.state, view.grade = "running", event.grade
        view.sources = (*view.sources, {"source": event.source, "strategy": event.strategy})

    def _count(self, outcome: str, changes: int, now: float) -> None:
        self._view.outcomes[outcome] = self._view.outcomes.get(outcome, 0) + changes
        self._view.changes += changes
        self._ended_at = now

    def _time(self, event: events.Handled, now: float) -> None:
        """Keep the call if it is among the slowest. Most calls cost one comparison."""
        key = event.keys[0] if event.keys else ""
        slow = self._slow
        if event.seconds <= self._slow_floor_s and key not in slow:
            return
        slow[key] = SlowCall(key, len(event.keys) - 1, event.seconds, now)
        if len(slow) > SLOW_MAX:
            del slow[min(slow, key=lambda one: slow[one].seconds)]
        self._slow_floor_s = _floor_s(slow)

    def _advance(self, event: events.Advanced, now: float) -> None:
        self._objects[event.key] = ObjectProgress(event.key, event.records, event.read, event.size, now)
        if len(self._objects) > OBJECTS_MAX:
            del self._objects[min(self._objects, key=lambda key: self._objects[key].at)]

    def _forget(self, keys: Sequence[str]) -> None:
        """Drop the objects whose call has ended. Most calls have none that was read in parts."""
        for key in keys if self._objects else ():
            self._objects.pop(key, None)

    def _slowest(self, now: float) -> list[SlowCall]:
        recent = {key: call for key, call in self._slow.items() if now - call.at <= RECENT_S}
        if len(recent) < len(self._slow):
            self._slow, self._slow_floor_s = recent, _floor_s(recent)
        return sorted(recent.values(), key=lambda call: -call.seconds)

    def _rate(self, now: float) -> float:
        """Return the rate since the oldest of the kept snapshots, which is about a window old."""
        looks = self._looks
        while len(looks) > 1 and now - looks[1][0] >= WINDOW_S:
            looks.popleft()
        since, before = looks[0]
        looks.append((now, self._view.changes))
        return (self._view.changes - before) / (now - since) if now > since else 0.0


def _followed(before: ReindexProgress | None, event: events.Event) -> ReindexProgress | None:
    """Return how far a reindex has come after an event; None if it has ended."""
    match event:
        case events.ShardAdvanced():
            generation, stage, page_rows = event.generation, "scanning", event.page_rows
        case events.ReindexMoved() if event.stage not in ENDED_STAGES:
            generation, stage, page_rows = event.generation, event.stage, 0
        case _:
            return None
    rows = before.rows if before is not None and before.generation == generation else 0
    return ReindexProgress(generation, stage, rows + page_rows)


def _floor_s(slow: dict[str, SlowCall]) -> float:
    """Return the duration that a call has to exceed to be kept."""
    return min(call.seconds for call in slow.values()) if len(slow) >= SLOW_MAX else 0.0


def _note(notices: deque[Notice], event: events.Event, now: float) -> None:
    last = notices[-1] if notices else None
    if last is not None and _subject(last.event) == _subject(event):
        last.event, last.at, last.times = event, now, last.times + 1
    else:
        notices.append(Notice(event, now))


def _subject(event: events.Event) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(event)
    return type(event), *(fields.get(name) for name in ("key", "what", "cause"))
