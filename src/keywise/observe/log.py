"""The log: an observer that writes warnings and state changes to the `keywise` logger."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from keywise.core import events
from keywise.core.change import ChangeHeader, Outcome, is_unversioned

SHOWN_MAX = 5
"""The most entries of a list that a line shows."""

_OF_CHANGES = (events.Failed, events.DeadLettered, events.TookOver, events.ClaimLost)
_OF_STORES = (
    events.Unavailable,
    events.LedgerDown,
    events.MarkedSuspect,
    events.Unrepairable,
    events.SinkEmpty,
    events.Misdirected,
    events.SweepHeld,
    events.SwapRefused,
    events.Alarmed,
)
_OF_CALLS = (events.CallRefused, events.Overlapped, events.TurnLost, events.SessionLost)
_WARNINGS = (*_OF_CHANGES, *_OF_STORES, *_OF_CALLS)
_STATES = (events.Started, events.Paused, events.Resumed, events.Draining, events.Stopped)
_OF_REINDEXES = (events.ReindexMoved, events.ReindexEnded, events.TargetSwapped)
_ENDS = (events.Repaired, events.Available, events.LedgerBack, events.Pruned, events.AlarmCleared)
_NOTICES = (*_STATES, *_OF_REINDEXES, *_ENDS)

_NAMES = {events.TookOver: "taken over", events.DeadLettered: "dead letter"}
"""The words of the history, where they are others than those of the event."""

_LEVELS = dict.fromkeys(_WARNINGS, logging.WARNING) | dict.fromkeys(_NOTICES, logging.INFO)


class Log:
    """Writes one line for each event: warnings and info for an operator, all other events for debugging.

    Each record also has the name of the event as `event`, and the event's fields under their own names. Of changes, it
    has only keys and versions.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keywise")

    def __call__(self, event: events.Event) -> None:
        level = _level(event)
        if self._logger.isEnabledFor(level):
            fields = {"event": type(event).__name__.lower(), **_fields(event)}
            self._logger.log(level, "%s%s", described(event), _indented(fields.get("traceback", "")), extra=fields)


def _level(event: events.Event) -> int:
    match event:
        case events.Unavailable() if event.calls > 1:
            return logging.DEBUG  # The first failed call was a warning, and `Available` will have their number.
        case events.Draining(changes=0):
            return logging.DEBUG
        case events.Stopped() if event.changes:
            return logging.WARNING
    return _LEVELS.get(type(event), logging.DEBUG)


def described(event: events.Event) -> str:
    """Format an event as one line: its name in words and its fields, without a traceback.

    Control characters in keys and causes are escaped, durations have three digits, and long lists are cut.
    """
    parts = (f"{name}={_format(name, value)}" for name, value in _fields(event).items() if name != "traceback")
    line = f"{_name(type(event))} {' '.join(parts)}"
    if isinstance(event, events.DeadLettered):
        # The event does not have the letter's number, which the ledger assigns.
        line += f" (keywise dead list --pipeline {event.pipeline!r})"
    return line


def still_running(event: events.Stopped) -> tuple[str, str]:
    """Describe which changes were still running when a consumer ended, and when they run again."""
    keys = some_keys(event.keys, event.changes)
    if event.changes == 1:
        return f"1 change was still running ({keys})", "it runs again when its lease has expired, or earlier"
    return (
        f"{event.changes:,} changes were still running ({keys})",
        "they run again when their leases have expired, or earlier",
    )


def format_empty(event: events.SinkEmpty) -> str:
    """Say that a sink is empty though it should not be."""
    return f"the sink is empty, and the ledger has {event.keys:,} key{'s' * (event.keys != 1)} in it"


def format_held_sweep(event: events.SweepHeld) -> str:
    """Say that a reindex waits for the operator, and what to do."""
    gone = f"{event.keys:,} key{'s' * (event.keys != 1)}"
    return (
        f"reindex {event.generation} waits: the origin does not have {gone} of the ledger, and the run may delete "
        f"{event.delete_max:,} by itself; to delete them, run keywise reindex resume {event.pipeline} --delete-max "
        f"{event.keys}; to keep them, run keywise reindex cancel {event.pipeline}"
    )


def format_swapped(event: events.TargetSwapped) -> str:
    """Say that another target is live, and for how long changes waited."""
    return f"{event.after} is live in place of {event.before}; changes waited {round(event.seconds, 2):g} s"


def format_refused_swap(event: events.SwapRefused) -> str:
    """Say why a swap was refused, and what to do."""
    return (
        f"the swap of reindex {event.generation} was refused, and it goes on catching up: {event.cause}; when the "
        f"cause is gone, run keywise reindex swap {event.pipeline}"
    )


def some_keys(keys: Sequence[str], number: int) -> str:
    """Format the given keys, with an ellipsis if there are more (`number` in all)."""
    return ", ".join(map(repr, keys)) + (", …" if number > len(keys) else "")


def _name(kind: type[events.Event]) -> str:
    return _NAMES.get(kind) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def _fields(event: events.Event) -> dict[str, Any]:
    """Return the fields of an event. Changes are reduced to key and version, because a body or header may be secret."""
    fields = msgspec.structs.asdict(event)
    if isinstance(event, events.Settled) and event.headers:
        fields["headers"] = [(one.key, _version(one)) for one in event.headers]
    return fields


def _version(header: ChangeHeader) -> int | None:
    return None if header.order is None or is_unversioned(header.order) else header.order[1]


def _format(name: str, value: object) -> str:
    if isinstance(value, Outcome):
        return repr(value.value)
    if isinstance(value, list | tuple) and len(value) > SHOWN_MAX:
        return f"[{', '.join(map(repr, value[:SHOWN_MAX]))}, … {len(value) - SHOWN_MAX:,} more]"
    if not isinstance(value, float):
        return repr(value)
    is_duration = name == "seconds" or name.endswith("_s")
    return f"{value:.3g}" if is_duration and abs(value) < 1000 else f"{value:.0f}" if is_duration else f"{value:.3f}"


def _indented(traceback: str) -> str:
    """Indent a traceback below its line, so that no text inside it looks like a line of the log."""
    return "".join(f"\n  {repr(line)[1:-1] if not line.isprintable() else line}" for line in traceback.splitlines())
