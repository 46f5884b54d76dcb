"""The events of rows: which events of the consumer of rows reach the observers and the history of the pipeline."""

from collections.abc import Sequence

from keywise.core import events

_CONSUMER_EVENTS = (
    events.Started,
    events.Stopped,
    events.Draining,
    events.Paused,
    events.Resumed,
    events.Waiting,
    events.Unrepairable,
)
"""Only the live consumer of the pipeline emits these. From a second consumer they would say that the pipeline stops."""
_HISTORY_EVENTS = (events.Failed, events.DeadLettered, events.TookOver, events.ClaimLost, events.Repaired)
"""The history gets no outcomes of rows: a run over a million rows would fill it with *stale*."""


class RowObserver:
    """Observes the consumer of rows, and passes some of its events on to the observers and the history."""

    def __init__(self, observers: Sequence[events.Observer], reporters: Sequence[events.Observer]) -> None:
        self._observers = observers
        self._reporters = reporters

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, _CONSUMER_EVENTS):
            events.notify(self._observers, event)
        if isinstance(event, _HISTORY_EVENTS):
            events.notify(self._reporters, event)
