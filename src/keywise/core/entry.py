"""What a ledger remembers and answers: the values that the rules are about."""

import enum

import msgspec

from keywise.core.change import Order
from keywise.core.limits import Rate


class RefusalReason(enum.StrEnum):
    """Why a claim was refused."""

    STALE = "stale"
    """Something newer is committed: ack it."""
    DUPLICATE = "duplicate"
    """This very order is committed: ack it."""
    BUSY = "busy"
    """Somebody holds the key, or its next try is not due."""
    DEFERRED = "deferred"
    """Something newer was tried and is not settled: it may have been written. Older changes wait for it."""
    ISOLATED = "isolated"
    """The last holder died at work. Ask again with `isolated`, and run nothing beside it."""
    MIXED = "mixed"
    """Versioned and unversioned changes meet on one key: nobody can order them."""
    PAUSED = "paused"
    """An operator said so."""
    LIMITED = "limited"
    """The key's rate allows the next dispatch only later."""
    FORGOTTEN = "forgotten"
    """Sent before the retention and no entry is left: nobody can tell whether it is stale."""


class Certainty(enum.StrEnum):
    """What is known about the effect of a failed try."""

    CLEAN = "clean"
    """Nothing was written."""
    ENDED = "ended"
    """It may have been written, and nothing is on its way any more."""
    UNKNOWN = "unknown"
    """It may have been written, or may still land."""


class CommitResult(enum.StrEnum):
    """What a ledger says to a commit."""

    COMMITTED = "committed"
    ALREADY = "already"
    """The mark is at this order: an earlier commit arrived though its answer was lost."""
    REFUSED = "refused"


class LedgerPolicy(msgspec.Struct, frozen=True):
    """How a ledger treats the keys of one pipeline."""

    intents: bool = False
    """On for sinks that show stale state if an older write follows a newer one: plain, or forgetting deletions."""
    redelivery_s: float = 3600.0
    """The longest time after which the source may still bring a message back."""
    retention_s: float | None = None
    """How long keys are remembered at the least; None: for ever."""
    rate: Rate | None = None
    """How often one key may be dispatched, by all workers together."""


class LeaseTerms(msgspec.Struct, frozen=True):
    """What a claim is asked for with."""

    owner: str
    lease_s: float
    isolated: bool = False
    despite_pause: bool = False
    """An operator asks, who paused the key to work on it."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """A claim that was not granted; `wait_s` says how long the reason lasts at the most."""

    reason: RefusalReason
    wait_s: float = 0.0
    mark: Order | None = None


class Claim(msgspec.Struct):
    """The right to work on one key until a deadline, with a token that is never reused."""

    key: str
    order: Order | None
    deleted: bool
    token: int
    attempts: int = 0
    """How many tries at this order failed before."""
    crashes: int = 0
    """How many holders died alone with this order."""
    suspicions: int = 0
    took_over: bool = False
    isolated: bool = False
    overdue: bool = False
    """Set by the holder when its own deadline passed before the sink had answered."""
    cut_off: bool = False
    """Set by the holder when that happened only because the ledger could not be reached: it costs no attempt."""


class Entry(msgspec.Struct, frozen=True):
    """What the ledger remembers of one key. An idle entry is its first three fields."""

    mark: Order | None = None
    deleted: bool = False
    updated_at: float = 0.0
    token: int = 0
    """0 while nobody holds the key."""
    owner: str = ""
    lease_until: float = 0.0
    abandoned: bool = False
    """The holder lives and said that the outcome is unknown; the lease runs out by itself."""
    isolated: bool = False
    begun: bool = False
    """The holder has renewed since: its work has begun, so it can be blamed for a death."""
    intent: Order | None = None
    """What the holder is about to write."""
    unknown: Order | None = None
    """The newest order that may be in the sink without being committed."""
    unknown_until: float = 0.0
    tried: Order | None = None
    """The order that attempts, crashes and not_before belong to."""
    tried_at: float = 0.0
    attempts: int = 0
    crashes: int = 0
    not_before: float = 0.0
    suspicions: int = 0
    suspected_at: float = 0.0
    era: int = 0
    """The era that an operator raised this key to; it is in the mark with the next commit."""
    rate_at: float = 0.0
    """When all that was dispatched would have been due at an even pace; at or before now, nothing is charged."""

    @property
    def is_idle(self) -> bool:
        """Nothing is going on with the key: its mark says all, besides what its rate was charged."""
        return Entry(self.mark, self.deleted, self.updated_at, rate_at=self.rate_at) == self


EMPTY = Entry()
