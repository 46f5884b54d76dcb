"""The events of rows: what observers and the history see of the consumer that writes them."""

from collections.abc import Sequence

from keywise.core import events

_OF_THE_CONSUMER = (
    events.Started,
    events.Stopped,
    events.Draining,
    events.Paused,
    events.Resumed,
    events.Waiting,
    events.Unrepairable,
)
"""The live consumer of the same pipeline emits these. A second one would look as if the pipeline had stopped."""
_FOR_THE_HISTORY = (events.Failed, events.DeadLettered, events.TookOver, events.ClaimLost, events.Repaired)
"""The history gets no outcomes of rows: a run over a million rows would fill it with stale ones."""


class RowObserver:
    """An observer of the row consumer, which passes events on to the observers and the history of the pipeline."""

    def __init__(self, observers: Sequence[events.Observer], reporters: Sequence[events.Observer]) -> None:
        self._observers = observers
        self._reporters = reporters

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, _OF_THE_CONSUMER):
            events.notify(self._observers, event)
        if isinstance(event, _FOR_THE_HISTORY):
            events.notify(self._reporters, event)
