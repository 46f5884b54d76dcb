"""Counters: an observer that counts outcomes and events."""

from collections import Counter

from keywise.core.events import Event, Settled


class Counters:
    """Counts changes by outcome, and events by type."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        self.events[type(event).__name__] += 1
        if isinstance(event, Settled):
            self.outcomes[event.outcome.value] += event.changes
