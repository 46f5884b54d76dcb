"""Counts down what is left, and says what can be promised when it begins."""

from collections.abc import Callable

from keywise.core.events import Event, Settled, Started


class Countdown:
    """An observer of the pipeline that says when everything has been settled."""

    def __init__(self, total: int, when_done: Callable[[], None]) -> None:
        self._left = total
        self._when_done = when_done

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            print(f"grade {event.grade}, commit strategy: {event.strategy}")
        elif isinstance(event, Settled):
            self._left -= event.changes
            if self._left <= 0:
                self._when_done()
