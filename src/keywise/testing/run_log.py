"""The trace of a simulated run, and the promises that were broken in it."""

from collections.abc import Callable


class RunLog:
    """Collects lines of the trace, which is shown if the run fails, and violations."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.violations: list[str] = []
        self.trace: list[str] = []
        self._now = now

    def note(self, what: str) -> None:
        self.trace.append(f"{self._now():8.3f} {what}")

    def violate(self, what: str) -> None:
        self.note(f"VIOLATION {what}")
        self.violations.append(what)
