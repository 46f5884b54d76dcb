"""The events of rows: what observers and the history see of the consumer that writes them."""

from keywise.core import events
from keywise.flow.pipeline import OpenPipeline

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


class RowEvents:
    """An observer of the row consumer, which passes events on to the observers and the history of the pipeline."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._pipeline = pipeline

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, _OF_THE_CONSUMER):
            events.notify(self._pipeline.observers, event)
        if isinstance(event, _FOR_THE_HISTORY):
            events.notify(self._pipeline.reporters, event)
