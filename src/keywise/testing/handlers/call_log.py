"""Records the calls of a simulated handler, and what happened to each key, as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keywise.core import events
from keywise.core.change import Change, Order, Outcome
from keywise.testing.handlers.messages import label_of
from keywise.testing.virtual_loop import Process


class TraceLine(msgspec.Struct, frozen=True):
    """One line of a story."""

    at: float
    keys: tuple[str, ...]
    text: str


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """One simulated worker process, and what it is working on."""

    process: Process
    alone_with: str | None = None
    """The key that it holds in isolation."""
    inside: list[str] = field(default_factory=list)
    """Keys whose handler is running."""
    handed: dict[str, None] = field(default_factory=dict)
    """Keys whose messages it holds and has not settled."""
    effects: list[Change[Any]] = field(default_factory=list)
    """What handlers have written in the open transaction."""

    @property
    def name(self) -> str:
        return self.process.name


class Watch:
    """Records which worker runs the handler of a key, what was written last, and the lines of each story."""

    def __init__(self, now: Callable[[], float], *, is_atomic: bool, zombies: bool) -> None:
        self.lines: list[TraceLine] = []
        self.broken: list[tuple[str, str]] = []
        """Guarantees of keywise itself that were broken, by key."""
        self.failed: list[events.Failed] = []
        self.dead_letters: list[events.DeadLettered] = []
        self.calls = 0
        self._now = now
        self._is_atomic = is_atomic
        self._zombies = zombies
        self._running: dict[str, SimulatedWorker] = {}
        self._written: dict[str, Change[Any]] = {}

    def note(self, keys: Sequence[str], text: str) -> None:
        self.lines.append(TraceLine(self._now(), tuple(keys), text))

    def story(self, key: str | None) -> list[TraceLine]:
        return [line for line in self.lines if key is None or key in line.keys]

    def is_at_work(self) -> bool:
        return any(not worker.process.is_dead for worker in self._running.values())

    # Calls of the handler.

    def begins(self, worker: SimulatedWorker, changes: Sequence[Change[Any]]) -> None:
        self.calls += 1
        for change in changes:
            other = self._running.get(change.key)
            if other is not None and not other.process.is_dead and not (self._zombies or other.process.is_paused):
                self._break(change, f"{worker.name} runs the handler while {other.name} still does")
            self._running[change.key] = worker
            worker.inside.append(change.key)

    def ends(
        self,
        worker: SimulatedWorker,
        changes: Sequence[Change[Any]],
        error: BaseException | None,
        *,
        is_snoozed: bool = False,
    ) -> None:
        for change in changes:
            if error is not None:
                text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.note([change.key], f"{worker.name} runs the handler for {label_of(change)}: it raises {text}")
                continue
            self.note([change.key], f"{worker.name} runs the handler for {label_of(change)}")
            if is_snoozed:
                continue
            if self._is_atomic:
                worker.effects.append(change)
            else:
                self._write(change)

    def leaves(self, worker: SimulatedWorker, changes: Sequence[Change[Any]]) -> None:
        for change in changes:
            worker.inside.remove(change.key)
            if self._running.get(change.key) is worker:
                del self._running[change.key]

    def committed(self, worker: SimulatedWorker) -> None:
        """Record that the transaction of a worker has committed what its handlers wrote."""
        for change in worker.effects:
            self._write(change)
        worker.effects.clear()

    def _write(self, change: Change[Any]) -> None:
        before = self._written.get(change.key)
        if before is not None and before.order > change.order:
            if self._zombies:
                self.note([change.key], f"{label_of(change)} is written over {label_of(before)}")
            else:
                self._break(change, f"{label_of(change)} was handled after {label_of(before)}")
        self._written[change.key] = change

    def _break(self, change: Change[Any], what: str) -> None:
        self.note([change.key], what)
        self.broken.append((change.key, what))

    # Events of the consumer.

    def observer(self, worker: SimulatedWorker) -> events.Observer:
        def observe(event: events.Event) -> None:
            self._observe(worker, event)

        return observe

    def _observe(self, worker: SimulatedWorker, event: events.Event) -> None:
        match event:
            case events.Settled():
                for header in event.headers:
                    worker.handed.pop(header.key, None)
                    self.note([header.key], _settled(_label(header.order), event.outcome))
            case events.Failed():
                self.failed.append(event)
                self.note([event.key], f"{_version(event.version)} is tried again in {event.retry_s:.1f} s")
            case events.DeadLettered():
                self.dead_letters.append(event)
                self.note([event.key], f"{_version(event.version)} becomes a dead letter: {event.cause}")
            case events.TookOver():
                self.note([event.key], f"{worker.name} takes the key over, because its lease has run out")
            case events.ClaimLost():
                self.note([event.key], f"{worker.name} has lost its claim")
            case events.Snoozed():
                self.note([event.key], f"{_version(event.version)} is snoozed for {event.wait_s:.1f} s")
            case _:
                pass


def _settled(label: str, outcome: Outcome) -> str:
    match outcome:
        case Outcome.APPLIED:
            return f"{label} is committed and acked"
        case Outcome.DUPLICATE:
            return f"{label} is skipped: it was committed before"
        case Outcome.DEAD:
            return f"{label} is acked"
        case _:
            return f"{label} is skipped: something newer was committed"


def _label(order: Order | None) -> str:
    return "a repair" if order is None else label_of(Change("", order))


def _version(version: int | None) -> str:
    return "the change" if version is None else f"version {version}"
