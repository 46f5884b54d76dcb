"""The log: an observer that writes warnings and state changes to the `keywise` logger."""

import logging

import msgspec

from keywise.core import events

_OF_CHANGES = (events.Failed, events.DeadLettered, events.TookOver, events.ClaimLost)
_OF_STORES = (events.Unavailable, events.LedgerDown, events.MarkedSuspect, events.Unrepairable, events.Alarmed)
_OF_CALLS = (events.CallRefused, events.Overlapped, events.TurnLost, events.SessionLost)
_WARNINGS = (*_OF_CHANGES, *_OF_STORES, *_OF_CALLS)
_STATES = (events.Started, events.Paused, events.Resumed, events.Draining, events.Stopped)
_NOTICES = (*_STATES, events.Repaired, events.LedgerBack, events.Pruned, events.AlarmCleared)


class Log:
    """Writes one line for each event that an operator should see. Batches that succeed are not logged."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keywise")

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, _WARNINGS):
            self._logger.warning("%s", described(event))
        elif isinstance(event, _NOTICES):
            self._logger.info("%s", described(event))


def described(event: events.Event) -> str:
    """Format an event as one line: its name and its fields. Control characters in keys and causes are escaped."""
    fields = msgspec.structs.asdict(event)
    parts = (f"{name}={value!r}" for name, value in fields.items())
    return f"{type(event).__name__.lower()} {' '.join(parts)}"
