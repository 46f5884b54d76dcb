"""The log: an observer that writes warnings and state changes to the `keywise` logger."""

import logging

import msgspec

from keywise.core.events import (
    AlarmCleared,
    Alarmed,
    CallRefused,
    ClaimLost,
    DeadLettered,
    Draining,
    Event,
    Failed,
    LedgerBack,
    LedgerDown,
    MarkedSuspect,
    Overlapped,
    Paused,
    Pruned,
    Repaired,
    Resumed,
    SessionLost,
    Started,
    Stopped,
    TookOver,
    TurnLost,
    Unavailable,
    Unrepairable,
)

_OF_CALLS = (CallRefused, Overlapped, TurnLost, SessionLost)
_WARNINGS = (
    Failed,
    DeadLettered,
    TookOver,
    ClaimLost,
    Unavailable,
    LedgerDown,
    MarkedSuspect,
    Unrepairable,
    Alarmed,
    *_OF_CALLS,
)
_NOTICES = (Started, Repaired, LedgerBack, Paused, Resumed, Pruned, AlarmCleared, Draining, Stopped)


class Log:
    """Writes one line for each event that an operator should see. Batches that succeed are not logged."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keywise")

    def __call__(self, event: Event) -> None:
        if isinstance(event, _WARNINGS):
            self._logger.warning("%s", described(event))
        elif isinstance(event, _NOTICES):
            self._logger.info("%s", described(event))


def described(event: Event) -> str:
    """Format an event as one line: its name and its fields. Control characters in keys and causes are escaped."""
    fields = msgspec.structs.asdict(event)
    parts = (f"{name}={value!r}" for name, value in fields.items())
    return f"{type(event).__name__.lower()} {' '.join(parts)}"
