"""Shows how far the pipeline is: a bar on a terminal, plain lines elsewhere."""

from collections import Counter
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from keywise.events import Event, Settled, Started


class Progress:
    """An observer of the pipeline that counts what is settled, and says when that was all."""

    def __init__(self, console: Console, total: int, when_done: Callable[[], None]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._console = console
        self._total = total
        self._when_done = when_done
        self._quarters = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("applying", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._console.print(f"grade {event.grade}, way of a batch: {event.way}")
        elif isinstance(event, Settled):
            self.outcomes[event.outcome.value] += event.changes
            self._show(self.outcomes.total())

    def _show(self, done: int) -> None:
        self._bar.update(self._task, completed=done)
        quarters = 4 * done // self._total
        if quarters > self._quarters and not self._console.is_terminal:
            self._console.print(f"  {done:,} of {self._total:,}")
        self._quarters = quarters
        if done >= self._total:
            self._when_done()
