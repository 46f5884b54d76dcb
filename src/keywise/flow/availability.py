"""Availability: which parts of a pipeline cannot be reached now, since when, and how many calls have failed."""

import msgspec

QUIET_S = 2.0
"""A part is back after this time without a failed call; one that refuses some calls and answers others is not."""


class Restored(msgspec.Struct, frozen=True):
    """A part that can be reached again."""

    what: str
    seconds: float
    """From the first failed call to the first answer after the last one."""
    calls: int
    """How many calls have failed."""


class _Absence(msgspec.Struct):
    since: float
    calls: int = 0
    answered_at: float | None = None
    """When the part answered first after its last failed call."""


class Availability:
    """Counts the failed calls of each part of a pipeline. Nothing here waits."""

    def __init__(self) -> None:
        self._absences: dict[str, _Absence] = {}

    def failed(self, what: str, now: float) -> int:
        """Record a call without an answer; return how many have failed since the part was last available."""
        absence = self._absences.setdefault(what, _Absence(now))
        absence.calls += 1
        absence.answered_at = None
        return absence.calls

    def __contains__(self, what: str) -> bool:
        return what in self._absences

    def answered(self, what: str, now: float) -> None:
        absence = self._absences.get(what)
        if absence is not None and absence.answered_at is None:
            absence.answered_at = now

    def forget(self, what: str) -> None:
        self._absences.pop(what, None)

    def restored(self, now: float) -> list[Restored]:
        """Return the parts that are back, each once."""
        found: list[Restored] = []
        for what, absence in list(self._absences.items()):
            if absence.answered_at is not None and now - absence.answered_at >= QUIET_S:
                found.append(Restored(what, absence.answered_at - absence.since, absence.calls))
                del self._absences[what]
        return found
