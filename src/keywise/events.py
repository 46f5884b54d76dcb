"""What can be watched: the flow emits one event per step, and logs, figures and views are observers of it."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from keywise.change import Outcome


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something happened in a pipeline."""

    pipeline: str


class Started(Event, frozen=True, kw_only=True):
    """A consumer begins; `way` is how its batches go, `grade` what its sink can promise."""

    way: str
    grade: str
    source: str


class BatchOpened(Event, frozen=True, kw_only=True):
    """Work on so many changes begins, perhaps beside others that are open."""

    changes: int


class BatchClosed(Event, frozen=True, kw_only=True):
    """So many changes are not worked on any more, whatever became of them."""

    changes: int


class Settled(Event, frozen=True, kw_only=True):
    """So many changes ended this way and were acked."""

    outcome: Outcome
    changes: int


class Ignored(Event, frozen=True, kw_only=True):
    """Deliveries that say nothing to this pipeline."""

    reason: str
    changes: int


class Refused(Event, frozen=True, kw_only=True):
    """A change has to wait: busy, deferred or alone."""

    key: str
    answer: str
    wait_s: float


class Failed(Event, frozen=True, kw_only=True):
    """A try failed; the next one is due after `retry_s`."""

    key: str
    cause: str
    attempts: int
    retry_s: float


class Buried(Event, frozen=True, kw_only=True):
    """A delivery became a dead letter."""

    key: str
    cause: str


class TookOver(Event, frozen=True, kw_only=True):
    """A claim was taken over from a holder whose lease ran out."""

    key: str
    crashes: int


class ClaimLost(Event, frozen=True, kw_only=True):
    """A holder found that its claim is somebody else's."""

    key: str


class Repaired(Event, frozen=True, kw_only=True):
    """A suspect key was written again from the source of truth."""

    key: str


class Unavailable(Event, frozen=True, kw_only=True):
    """A source, ledger or sink could not be reached; everything is held and tried again."""

    what: str
    cause: str
    retry_s: float


class Draining(Event, frozen=True, kw_only=True):
    """No more is taken; running work is finished."""


class Stopped(Event, frozen=True, kw_only=True):
    """The consumer has ended."""


Observer: TypeAlias = Callable[[Event], None]

_WARNINGS = (Failed, Buried, TookOver, ClaimLost, Unavailable)
_NOTICES = (Started, Repaired, Draining, Stopped)


class Log:
    """An observer that writes what a person should read later; a batch that went well is no news."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keywise")

    def __call__(self, event: Event) -> None:
        if isinstance(event, _WARNINGS):
            self._logger.warning("%s", described(event))
        elif isinstance(event, _NOTICES):
            self._logger.info("%s", described(event))


class Figures:
    """An observer that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        self.events[type(event).__name__] += 1
        if isinstance(event, Settled):
            self.outcomes[event.outcome.value] += event.changes


def described(event: Event) -> str:
    """One line of text: the event's name and its fields; control characters of keys and causes are escaped."""
    told = msgspec.structs.asdict(event)
    parts = (f"{name}={value!r}" for name, value in told.items())
    return f"{type(event).__name__.lower()} {' '.join(parts)}"
