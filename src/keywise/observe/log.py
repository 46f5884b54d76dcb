"""The log: an observer that writes what a person should read later."""

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
    """An observer that writes what a person should read later; a batch that went well is no news."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keywise")

    def __call__(self, event: Event) -> None:
        if isinstance(event, _WARNINGS):
            self._logger.warning("%s", described(event))
        elif isinstance(event, _NOTICES):
            self._logger.info("%s", described(event))


def described(event: Event) -> str:
    """One line of text: the event's name and its fields; control characters of keys and causes are escaped."""
    fields = msgspec.structs.asdict(event)
    parts = (f"{name}={value!r}" for name, value in fields.items())
    return f"{type(event).__name__.lower()} {' '.join(parts)}"
