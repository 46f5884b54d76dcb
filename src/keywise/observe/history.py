"""The history of a pipeline: an observer that collects records of what happened and writes them in batches."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

from keywise.core import events
from keywise.core.admin import LedgerAdmin
from keywise.core.change import ChangeHeader, Outcome, is_unversioned
from keywise.core.clock import Clock, boot_time
from keywise.core.failures import storable
from keywise.core.history import ALARM, CLEARED, HistoryRecord, HistoryStore
from keywise.core.ledger import LosesWrites
from keywise.observe.alarms import LedgerLossAlarm, RenumberingAlarm

LINES_MAX = 10_000
"""The most records that wait to be written; the oldest are dropped and counted."""
REFUSALS_MAX = 2000
"""How many refusals a burst may record one by one. Further ones are only counted, so that they neither slow the worker
nor displace other records."""
REFUSALS_PER_S = 100.0
WAIT_AGAIN_S = 60.0
"""A worker claims a waiting key about twice a second. The same refusal is recorded again only after this time."""
WAITS_MAX = 10_000
LEFT_OUT_AGAIN_S = 10.0

HistoryFields: TypeAlias = tuple[str, str, int | None, str]
"""The fields `what`, `key`, `version` and `detail` of a record."""


class HistoryRecorder:
    """Collects the history records of one worker; `flush` writes them.

    `keeps` is the setting `history`. Unless it is "all", refusals are recorded only up to a rate limit.
    """

    def __init__(
        self, owner: str, *, keeps: str = "events", clock: Clock = boot_time, ledger: LosesWrites | None = None
    ) -> None:
        self.renumbering_alarm = RenumberingAlarm()
        self._losses = LedgerLossAlarm()
        self._ledger = ledger
        self._owner = owner
        self._keeps = keeps
        self._clock = clock
        self._lines: deque[tuple[float, HistoryFields]] = deque()
        self._left_out = 0
        self._left_out_at = -LEFT_OUT_AGAIN_S
        self._allowance = float(REFUSALS_MAX)
        self._allowed_at = clock()
        self._waits: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Settled):
            self._settled(event)
        elif self._keeps == "none":
            return
        elif isinstance(event, events.Refused):
            self._refused(event)
        elif (format_event := _FORMATTERS.get(type(event))) is not None:
            self._add(self._clock(), format_event(event))

    def due(self, pipeline: str, now: float) -> list[events.Event]:
        """Return the alarms that begin or end now."""
        losses = 0 if self._ledger is None else self._ledger.losses
        found = (self.renumbering_alarm.look(pipeline, now), self._losses.look(pipeline, losses))
        return [event for event in found if event is not None]

    async def flush(self, history_store: HistoryStore, admin: LedgerAdmin, *, is_last: bool = False) -> None:
        """Write the collected records, dated by the store's clock; after an error they are kept for the next flush."""
        self._report_left_out(is_last)
        taken = [self._lines.popleft() for _ in range(len(self._lines))]
        if not taken:
            return
        try:
            ahead_s = await admin.now() - self._clock()
            await history_store.record([HistoryRecord(at + ahead_s, *fields, self._owner) for at, fields in taken])
        except BaseException:
            # If only the answer was lost, these records are written twice; dropping them could lose them.
            self._lines.extendleft(reversed(taken))
            while len(self._lines) > LINES_MAX:
                self._lines.popleft()
                self._left_out += 1
            raise

    def _settled(self, event: events.Settled) -> None:
        now = self._clock()
        self.renumbering_alarm.count(event, now)
        if self._keeps == "none" or event.outcome is Outcome.DEAD:
            return  # `DeadLettered` has a record of its own, with the cause.
        headers = event.headers
        if self._keeps != "all":
            allowed = self._allowed(len(headers), now)
            self._left_out += len(headers) - allowed
            headers = headers[:allowed]
        for header in headers:
            self._add(now, _outcome(event.outcome, header))

    def _refused(self, event: events.Refused) -> None:
        now, wait = self._clock(), (event.key, event.reason)
        if now < self._waits.get(wait, -WAIT_AGAIN_S) + WAIT_AGAIN_S:
            return
        self._waits[wait] = now
        self._waits.move_to_end(wait)
        if len(self._waits) > WAITS_MAX:
            self._waits.popitem(last=False)
        if self._keeps == "all" or self._allowed(1, now):
            self._add(now, ("waits", event.key, event.version, event.reason))
        else:
            self._left_out += 1

    def _allowed(self, requested: int, now: float) -> int:
        """Charge up to `requested` records to the rate limit (a token bucket); return how many may be recorded."""
        earned = (now - self._allowed_at) * REFUSALS_PER_S
        self._allowance = min(REFUSALS_MAX, self._allowance + earned)
        self._allowed_at = now
        allowed = min(requested, int(self._allowance))
        self._allowance -= allowed
        return allowed

    def _add(self, at: float, fields: HistoryFields) -> None:
        if len(self._lines) >= LINES_MAX:
            self._lines.popleft()
            self._left_out += 1
        self._lines.append((at, fields))

    def _report_left_out(self, is_last: bool) -> None:
        now = self._clock()
        if self._left_out and (is_last or now >= self._left_out_at + LEFT_OUT_AGAIN_S):
            detail = f"{self._left_out:,} lines: more happened than the history records one by one"
            self._left_out, self._left_out_at = 0, now
            self._add(now, ("left out", "", None, detail))


def _outcome(outcome: Outcome, header: ChangeHeader) -> HistoryFields:
    version = None if header.order is None or is_unversioned(header.order) else header.order[1]
    # A record "removed" is the removal itself, by an operator.
    what = "kept removed" if outcome is Outcome.REMOVED else outcome.value
    return what, header.key, version, "a deletion" if header.deleted else ""


def format_counts(event: events.ReindexEnded) -> str:
    """Format the counts of a run that is complete."""
    counts = ", ".join(f"{name} {number:,}" for name, number in sorted(event.counts.items()) if name != "read")
    gone = f", keys gone {event.gone:,}" if event.gone else ""
    return f"rows read {event.counts.get('read', 0):,}{f', {counts}' if counts else ''}{gone}"


def _failed(event: events.Failed) -> HistoryFields:
    detail = f"attempt {event.attempts}, again in {event.retry_s:.3g} s: {event.cause}"
    return "failed", event.key, event.version, storable(detail)


def _took_over(event: events.TookOver) -> HistoryFields:
    workers = "1 worker" if event.crashes == 1 else f"{event.crashes} workers"
    detail = f"{workers} died alone with it" if event.crashes else ""
    return "taken over", event.key, event.version, detail


_FORMATTERS: dict[type[events.Event], Callable[[Any], HistoryFields]] = {
    events.Failed: _failed,
    events.DeadLettered: lambda event: ("dead letter", event.key, event.version, storable(event.cause)),
    events.TookOver: _took_over,
    events.ClaimLost: lambda event: ("claim lost", event.key, None, ""),
    events.Snoozed: lambda event: ("snoozed", event.key, event.version, f"for {event.wait_s:.3g} s"),
    events.Repaired: lambda event: ("repaired", event.key, None, ""),
    # The operator's command leaves its own record; this one says that a worker has seen the pause.
    events.Paused: lambda event: ("pause seen", "", None, ""),
    events.Resumed: lambda event: ("resume seen", "", None, ""),
    events.LedgerDown: lambda event: ("ledger down", "", None, storable(f"{event.mode}: {event.cause}")),
    events.LedgerBack: lambda event: ("ledger back", "", None, f"after {event.seconds:.0f} s"),
    events.MarkedSuspect: lambda event: (
        "marked suspect",
        "",
        None,
        f"{event.keys:,} keys were written without the ledger",
    ),
    # The operator's acts on a run have records of their own.
    events.SweepHeld: lambda event: (
        "reindex held",
        "",
        None,
        f"generation {event.generation}: gone keys: {event.keys:,}; the run may delete {event.delete_max:,} by itself",
    ),
    events.ReindexEnded: lambda event: (
        "reindex complete",
        "",
        None,
        f"generation {event.generation}: {format_counts(event)}",
    ),
    events.TargetSwapped: lambda event: (
        "target swapped",
        "",
        None,
        f"from {event.before} to {event.after}; changes waited {round(event.seconds, 2):g} s",
    ),
    events.SwapRefused: lambda event: (
        "swap refused",
        "",
        None,
        storable(f"generation {event.generation}: {event.cause}"),
    ),
    events.Pruned: lambda event: ("pruned", "", None, f"{event.keys:,} keys"),
    events.Alarmed: lambda event: (ALARM, "", None, f"{event.cause}; {event.advice}"),
    events.AlarmCleared: lambda event: (CLEARED, "", None, event.cause),
}
