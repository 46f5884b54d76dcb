"""Notices what only a person can put right: upstream counts again from a low number, or a ledger has lost marks."""

from collections import deque

from keywise.core import events
from keywise.core.change import Outcome

WINDOW_S = 600.0
FIRSTS_MIN = 100
"""With fewer first deliveries in the window, nothing is said."""
FIRSTS_ENOUGH = 1000
"""Of more, only the newest are judged, so that a busy pipeline notices it soon."""
STALE_SHARE = 0.95
CLEARED_SHARE = 0.5
CLEARED_MIN = 20
AGAIN_S = 300.0
"""How soon the same is said again."""

CAUSE = "nearly every change that comes for the first time is stale: upstream may have begun to number from the start"
ADVICE = (
    "if it has, stop the producer, let the queue drain, run keywise pause --all --wait, keywise reset --era and "
    "keywise resume --all, and let it send everything again; if old messages are being sent again on purpose, there "
    "is nothing to do"
)

LOSS = "the server of the ledger has lost what it had confirmed: nobody knows which marks are gone"
LOSS_ADVICE = (
    "let upstream send everything again, then run keywise repair --resynced; until then an older change may be applied "
    "after a newer one. Let the server write every change to a file, so that it does not happen again"
)


class LedgerLossAlarm:
    """Counts how often a ledger has found that its server lost something; most ledgers never do."""

    def __init__(self) -> None:
        self._told = 0

    def look(self, pipeline: str, losses: int) -> events.Event | None:
        """An alarm for each time; None if there is nothing new to say."""
        if losses == self._told:
            return None
        self._told = losses
        return events.Alarmed(pipeline=pipeline, cause=LOSS, advice=LOSS_ADVICE)


class RenumberingAlarm:
    """An observer that counts first deliveries. Duplicates and redeliveries are no sign of anything."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()
        """When, how many were stale, and how many were applied."""
        self._stale = self._applied = 0
        self._said_at: float | None = None

    def count(self, event: events.Settled, now: float) -> None:
        if event.outcome is Outcome.STALE and event.firsts:
            self._add(now, event.firsts, 0)
        elif event.outcome is Outcome.APPLIED:
            self._add(now, 0, event.changes)

    def look(self, pipeline: str, now: float) -> events.Event | None:
        """An alarm, or that it is over; None if there is nothing new to say."""
        self._forget(now)
        total = self._stale + self._applied
        if total >= FIRSTS_MIN and self._stale >= STALE_SHARE * total:
            if self._said_at is not None and now < self._said_at + AGAIN_S:
                return None
            self._said_at = now
            # Only what comes from now on says whether it goes on or is over.
            self._counts.clear()
            self._stale = self._applied = 0
            return events.Alarmed(pipeline=pipeline, cause=CAUSE, advice=ADVICE)
        if self._said_at is not None and total >= CLEARED_MIN and self._stale < CLEARED_SHARE * total:
            self._said_at = None
            return events.AlarmCleared(
                pipeline=pipeline, cause="most changes that come for the first time are applied again"
            )
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
