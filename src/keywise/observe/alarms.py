"""Alarms for an operator: upstream has restarted its version numbers, or the ledger's server has lost writes."""

from collections import deque

from keywise.core import events
from keywise.core.change import Outcome

WINDOW_S = 600.0
FIRSTS_MIN = 100
"""No alarm is raised with fewer first deliveries than this in the window."""
FIRSTS_ENOUGH = 1000
"""With more first deliveries than this, only the newest count, so that a busy pipeline raises the alarm soon."""
STALE_SHARE = 0.95
CLEARED_SHARE = 0.5
CLEARED_MIN = 20
AGAIN_S = 300.0
"""The shortest time between two alarms of the same kind."""

CAUSE = "nearly every new change is stale on first delivery: upstream may have restarted its version numbers"
ADVICE = (
    "if it has, stop the producer, let the queue drain, run keywise pause --all --wait, keywise reset --era and "
    "keywise resume --all, and let it send everything again; if old messages are being sent again on purpose, there "
    "is nothing to do"
)

LOSS = "the server of the ledger has lost writes that it had confirmed, so an unknown number of marks is gone"
LOSS_ADVICE = (
    "let upstream send everything again, then run keywise repair --resynced; until then an older change may be applied "
    "after a newer one. Make the server persist every write, so that it does not happen again"
)


class LedgerLossAlarm:
    """Raises an alarm when the ledger detects that its server has lost confirmed writes; most ledgers never do."""

    def __init__(self) -> None:
        self._reported = 0

    def look(self, pipeline: str, losses: int) -> events.Event | None:
        """Return an alarm if the number of detected losses has changed; otherwise None."""
        if losses == self._reported:
            return None
        self._reported = losses
        return events.Alarmed(pipeline=pipeline, cause=LOSS, advice=LOSS_ADVICE)


class RenumberingAlarm:
    """Raises an alarm when nearly all first deliveries are stale: upstream may have restarted its version numbers.

    Duplicates and redeliveries do not count, because they are normal.
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()
        """The time of each count, how many were stale, and how many were applied."""
        self._stale = self._applied = 0
        self._alarmed_at: float | None = None

    def count(self, event: events.Settled, now: float) -> None:
        if event.outcome is Outcome.STALE and event.firsts:
            self._add(now, event.firsts, 0)
        elif event.outcome is Outcome.APPLIED:
            self._add(now, 0, event.changes)

    def look(self, pipeline: str, now: float) -> events.Event | None:
        """Return an alarm, or the event that the last one is cleared; None if nothing has changed."""
        self._forget(now)
        total = self._stale + self._applied
        if total >= FIRSTS_MIN and self._stale >= STALE_SHARE * total:
            if self._alarmed_at is not None and now < self._alarmed_at + AGAIN_S:
                return None
            self._alarmed_at = now
            # Count from zero: only later deliveries show whether the condition lasts or has ended.
            self._counts.clear()
            self._stale = self._applied = 0
            return events.Alarmed(pipeline=pipeline, cause=CAUSE, advice=ADVICE)
        if self._alarmed_at is not None and total >= CLEARED_MIN and self._stale < CLEARED_SHARE * total:
            self._alarmed_at = None
            return events.AlarmCleared(pipeline=pipeline, cause="most new changes are applied again on first delivery")
        return None

    def _add(self, now: float, stale: int, applied: int) -> None:
        self._counts.append((now, stale, applied))
        self._stale += stale
        self._applied += applied
        self._forget(now)

    def _forget(self, now: float) -> None:
        counts = self._counts
        while counts:
            at, stale, applied = counts[0]
            left = self._stale + self._applied - stale - applied
            if at > now - WINDOW_S and left < FIRSTS_ENOUGH:
                return
            counts.popleft()
            self._stale -= stale
            self._applied -= applied
