"""What can be watched: the flow emits one event per step, and logs, figures and views are observers of it."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from keywise.core.change import ChangeHeader, Outcome


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something happened in a pipeline."""

    pipeline: str


class Started(Event, frozen=True, kw_only=True):
    """A consumer begins; `strategy` is how its batches go, `grade` what its sink can promise."""

    strategy: str
    grade: str
    source: str


class BatchOpened(Event, frozen=True, kw_only=True):
    """Work on so many changes begins, perhaps beside others that are open."""

    changes: int


class BatchClosed(Event, frozen=True, kw_only=True):
    """So many changes are not worked on any more, whatever became of them."""

    changes: int


class Settled(Event, frozen=True, kw_only=True):
    """So many changes ended this way and were acked."""

    outcome: Outcome
    changes: int
    headers: Sequence[ChangeHeader] = ()
    """The changes themselves; left out for those that were simply applied, unless the history keeps them too."""
    firsts: int = 0
    """How many of them came for the first time."""
    sent_at: float = 0.0
    """When one of the longest-waiting of them was sent."""


class Ignored(Event, frozen=True, kw_only=True):
    """Deliveries that say nothing to this pipeline."""

    reason: str
    changes: int


class Refused(Event, frozen=True, kw_only=True):
    """A change has to wait: busy, deferred, isolated, paused or limited."""

    key: str
    version: int | None = None
    reason: str
    wait_s: float


class Failed(Event, frozen=True, kw_only=True):
    """A try failed; the next one is due after `retry_s`."""

    key: str
    version: int | None = None
    cause: str
    attempts: int
    retry_s: float


class DeadLettered(Event, frozen=True, kw_only=True):
    """A delivery became a dead letter."""

    key: str
    version: int | None = None
    cause: str


class TookOver(Event, frozen=True, kw_only=True):
    """A claim was taken over from a holder whose lease ran out."""

    key: str
    version: int | None = None
    crashes: int


class ClaimLost(Event, frozen=True, kw_only=True):
    """A holder found that its claim is somebody else's."""

    key: str


class Snoozed(Event, frozen=True, kw_only=True):
    """A handler asked for a change to come back later; it costs no attempt."""

    key: str
    version: int | None = None
    wait_s: float


class Handled(Event, frozen=True, kw_only=True):
    """One call of a handler or sink ended, well or not."""

    keys: Sequence[str]
    seconds: float


class Repaired(Event, frozen=True, kw_only=True):
    """A suspect key was written again from the source of truth."""

    key: str


class Unavailable(Event, frozen=True, kw_only=True):
    """A source, ledger or sink could not be reached; everything is held and tried again."""

    what: str
    cause: str
    retry_s: float


class LedgerDown(Event, frozen=True, kw_only=True):
    """The ledger was silent for longer than the grace; told once for each outage."""

    since: float
    """By the wall clock."""
    cause: str
    mode: str
    """`wait` or `write-anyway`: what is done meanwhile."""


class LedgerBack(Event, frozen=True, kw_only=True):
    """The ledger answers again."""

    since: float
    """When the outage began, by the wall clock."""
    seconds: float


class MarkedSuspect(Event, frozen=True, kw_only=True):
    """So many keys were written without the ledger, and the ledger knows now: they are suspect, where that matters."""

    keys: int


class Unrepairable(Event, frozen=True, kw_only=True):
    """Said at start: an outage may make keys suspect, and there is no refetch that would put them right."""


class Waiting(Event, frozen=True, kw_only=True):
    """What one consumer holds, told about once a second."""

    live: int
    """Deliveries of live lanes."""
    bulk: int
    busy: int
    """Of both: those that are worked on."""
    held: int
    """Of both: those that wait for a moment, a holder or an operator."""


class Paused(Event, frozen=True, kw_only=True):
    """An operator paused the whole pipeline: nothing is taken any more."""


class Resumed(Event, frozen=True, kw_only=True):
    """The pause of the whole pipeline is over."""


class Pruned(Event, frozen=True, kw_only=True):
    """Keys were forgotten that no delivery can reach any more."""

    keys: int


class Alarmed(Event, frozen=True, kw_only=True):
    """Something is wrong that only a person can put right."""

    cause: str
    advice: str


class AlarmCleared(Event, frozen=True, kw_only=True):
    """What an alarm was about is over."""

    cause: str


class CallEnded(Event, frozen=True, kw_only=True):
    """A call of a serial function has its answer; `outcome` is what it ended with."""

    key: str
    outcome: str
    waited_s: float
    """Until its turn came."""
    ran_s: float


class CallRefused(Event, frozen=True, kw_only=True):
    """A call of a serial function was not taken in: it would wait for ever, or its id stands for something else."""

    key: str
    cause: str


class Overlapped(Event, frozen=True, kw_only=True):
    """A key is only observed, and calls ran side by side that would have run one at a time."""

    key: str
    overlaps: int
    """Others that ran when this one began."""


class SessionLost(Event, frozen=True, kw_only=True):
    """What kept others from the keys of running calls was lost: they are broken off.

    On Postgres it was the session that held their locks; on Redis the server has lost what it had confirmed.
    """

    losses: int
    """How many since this process began."""


class TurnLost(Event, frozen=True, kw_only=True):
    """A process lost its turn in the middle of a call: it was too long out of reach of the store."""

    key: str


class Draining(Event, frozen=True, kw_only=True):
    """No more is taken; running work is finished."""


class Stopped(Event, frozen=True, kw_only=True):
    """The consumer has ended."""


Observer: TypeAlias = Callable[[Event], None]


def notify(observers: Iterable[Observer], event: Event) -> None:
    """Whoever watches must not be able to stop what is watched."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logging.getLogger("keywise").exception("an observer failed at %s", type(event).__name__)
