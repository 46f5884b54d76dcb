"""The events that a pipeline emits, one per step; logs, metrics, the history and the live view observe them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from keywise.core.change import ChangeHeader, Outcome


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of all events."""

    pipeline: str


class Started(Event, frozen=True, kw_only=True):
    """A consumer starts on a source. `strategy` is its commit strategy, `grade` that of its sink."""

    strategy: str
    grade: str
    source: str


class BatchOpened(Event, frozen=True, kw_only=True):
    """Work on a batch begins. Several batches may be open at the same time."""

    changes: int


class BatchClosed(Event, frozen=True, kw_only=True):
    """Work on a batch has ended, with any outcome."""

    changes: int


class Settled(Event, frozen=True, kw_only=True):
    """Changes ended with an outcome and are acked."""

    outcome: Outcome
    changes: int
    headers: Sequence[ChangeHeader] = ()
    """The changes. Empty for applied ones, unless the setting `history` is "all"."""
    firsts: int = 0
    """How many of them were first deliveries."""
    sent_at: float = 0.0
    """When one of the changes that waited longest was sent."""


class Ignored(Event, frozen=True, kw_only=True):
    """Deliveries were ignored, because the read function returned `Ignore`."""

    reason: str
    changes: int


class Misdirected(Event, frozen=True, kw_only=True):
    """A delivery was ignored that no object of this pipeline's store can have caused. Emitted once per process."""

    cause: str
    advice: str


class Refused(Event, frozen=True, kw_only=True):
    """The ledger refused a claim for now: busy, deferred, paused or limited. The change waits."""

    key: str
    version: int | None = None
    reason: str
    wait_s: float


class Failed(Event, frozen=True, kw_only=True):
    """An attempt failed; the next one is due after `retry_s`."""

    key: str
    version: int | None = None
    cause: str
    attempts: int
    retry_s: float
    traceback: str = ""


class DeadLettered(Event, frozen=True, kw_only=True):
    """A delivery became a dead letter."""

    key: str
    version: int | None = None
    cause: str
    traceback: str = ""


class TookOver(Event, frozen=True, kw_only=True):
    """A claim was taken over from a holder whose lease has expired."""

    key: str
    version: int | None = None
    crashes: int


class ClaimLost(Event, frozen=True, kw_only=True):
    """A worker lost its claim: the lease expired, and another worker may hold the key."""

    key: str


class Snoozed(Event, frozen=True, kw_only=True):
    """A handler returned or raised `Snooze`: the change comes back later, and it costs no attempt."""

    key: str
    version: int | None = None
    wait_s: float


class Handled(Event, frozen=True, kw_only=True):
    """One call of a handler or sink ended, with success or not."""

    keys: Sequence[str]
    seconds: float


class Advanced(Event, frozen=True, kw_only=True):
    """A part of an object was written."""

    key: str
    records: int
    """How many records of the object are written."""
    read: int
    """How many bytes of the object they took."""
    size: int


class ReindexMoved(Event, frozen=True, kw_only=True):
    """A worker found a reindex in another stage than before. Every worker of the pipeline emits it once per stage."""

    generation: int
    stage: str
    """`scanning`, `sweeping`, `catching up`: the worker takes part. `paused`, `complete`, `cancelled`: it does not."""
    shards: int


class ShardAdvanced(Event, frozen=True, kw_only=True):
    """A reindex has finished a page of a shard: each row has ended, or is postponed to the sweep."""

    shard: str
    generation: int
    rows: int
    """How many rows of the shard are read."""
    page_rows: int
    """How many of them this page had."""


class SweepHeld(Event, frozen=True, kw_only=True):
    """A reindex found more gone keys than it may delete; it waits for the operator."""

    generation: int
    keys: int
    """How many keys of the ledger the origin does not have."""
    delete_max: int
    """How many of them it may delete."""


class ReindexEnded(Event, frozen=True, kw_only=True):
    """A reindex is complete. The worker that ended it emits this event."""

    generation: int
    seconds: float
    """From its start to its end, by the store's clock."""
    counts: Mapping[str, int]
    """How many rows were read, and how many of them ended with each outcome."""
    gone: int
    """How many keys the sweep found to be gone, and deleted unless a live change came in between."""


class Repaired(Event, frozen=True, kw_only=True):
    """A suspect key was written again from the source of truth."""

    key: str


START = "start"
"""`what` of a pipeline that cannot start yet, because its source, ledger or sink cannot be reached."""


class Unavailable(Event, frozen=True, kw_only=True):
    """A source, ledger or sink could not be reached. Its work is kept and retried after `retry_s`."""

    what: str
    cause: str
    retry_s: float
    calls: int = 1
    """How many calls have failed since it was last available. Only the first one is a warning in the log.
    0: the first call of a start has not been answered for some seconds."""


class Available(Event, frozen=True, kw_only=True):
    """A source, ledger or sink that could not be reached has answered for some seconds without another failure."""

    what: str
    seconds: float
    """From the first failed call to the first answer."""
    calls: int
    """How many calls have failed."""


class LedgerDown(Event, frozen=True, kw_only=True):
    """The ledger has not answered for longer than the grace period. Emitted once per outage."""

    since: float
    """When the outage began, by the wall clock."""
    cause: str
    mode: str
    """What the worker does meanwhile: `wait` or `write-anyway`."""


class LedgerBack(Event, frozen=True, kw_only=True):
    """The ledger answers again."""

    since: float
    """When the outage began, by the wall clock."""
    seconds: float


class MarkedSuspect(Event, frozen=True, kw_only=True):
    """The ledger has recorded keys that were written without it: as suspect, if the sink may show older state."""

    keys: int


class Unrepairable(Event, frozen=True, kw_only=True):
    """Emitted at start: an outage may make keys suspect, and nothing can repair them without an origin or refetch."""


class TargetSwapped(Event, frozen=True, kw_only=True):
    """The name of the sink stands for another target."""

    before: str
    after: str
    seconds: float
    """How long changes had to wait for the worker that has moved the name; the wait for one that died is not in it."""


class SwapRefused(Event, frozen=True, kw_only=True):
    """A swap that an operator requested was refused; the run goes on catching up."""

    generation: int
    cause: str


class SinkEmpty(Event, frozen=True, kw_only=True):
    """Emitted at start: the sink is empty, and the ledger has marks of keys that were written to it."""

    keys: int
    """How many keys should be in the sink."""
    advice: str


class Waiting(Event, frozen=True, kw_only=True):
    """What one consumer holds. Emitted about once a second."""

    live: int
    """Deliveries of live lanes."""
    bulk: int
    busy: int
    """Deliveries of both kinds that are being processed."""
    held: int
    """Deliveries of both kinds that wait: for a retry, a rate limit, another holder or an operator."""


class Paused(Event, frozen=True, kw_only=True):
    """An operator paused the whole pipeline: the consumer takes no more changes."""


class Resumed(Event, frozen=True, kw_only=True):
    """The pause of the whole pipeline has ended."""


class Pruned(Event, frozen=True, kw_only=True):
    """The ledger forgot keys that no delivery can reach any more."""

    keys: int


class Alarmed(Event, frozen=True, kw_only=True):
    """Something is wrong that needs an operator."""

    cause: str
    advice: str


class AlarmCleared(Event, frozen=True, kw_only=True):
    """The condition of an alarm has ended."""

    cause: str


class CallEnded(Event, frozen=True, kw_only=True):
    """A call of a serial function ended with `outcome`."""

    key: str
    outcome: str
    waited_s: float
    """From the call until its function started."""
    ran_s: float


class CallRefused(Event, frozen=True, kw_only=True):
    """A call of a serial function was not accepted: it would deadlock, or its id belongs to another request."""

    key: str
    cause: str


class Overlapped(Event, frozen=True, kw_only=True):
    """Calls of one key ran concurrently because the key is in observe mode; in mode `on` they would have waited."""

    key: str
    overlaps: int
    """How many other calls of the key were running when this one started."""


class SessionLost(Event, frozen=True, kw_only=True):
    """The locks of running calls were lost, and the calls are interrupted.

    On Postgres, the session that held the locks ended; on Redis, the server lost writes that it had confirmed.
    """

    losses: int
    """How often this has happened since the process started."""


class TurnLost(Event, frozen=True, kw_only=True):
    """A process lost its key in the middle of a call: it could not reach the store for too long."""

    key: str


class Draining(Event, frozen=True, kw_only=True):
    """The consumer takes no more changes and finishes those that are running. Repeated while that takes long."""

    changes: int = 0
    """How many it waits for."""
    keys: Sequence[str] = ()
    """Some of their keys."""
    left_s: float = 0.0
    """How long it waits at most; then the leases of these changes expire."""


class Stopped(Event, frozen=True, kw_only=True):
    """The consumer has ended. Changes that were still running when `drain` was over run again."""

    changes: int = 0
    """How many were still running."""
    keys: Sequence[str] = ()
    """Some of their keys."""


Observer: TypeAlias = Callable[[Event], None]


def notify(observers: Iterable[Observer], event: Event) -> None:
    """Call each observer. An observer that raises is logged and cannot stop the pipeline."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logging.getLogger("keywise").exception("an observer failed at %s", type(event).__name__)
