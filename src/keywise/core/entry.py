"""The values that the rules work on: the entry of a key, the claim, and the answers of a ledger."""

import enum

import msgspec

from keywise.core.change import VERSION_MAX, Order
from keywise.core.errors import PositionError
from keywise.core.limits import Rate

NOTE_MAX_BYTES = 8 * 1024
"""The longest note of a position."""


class RefusalReason(enum.StrEnum):
    """Why a claim was refused."""

    STALE = "stale"
    """A newer order is committed: ack the change."""
    DUPLICATE = "duplicate"
    """This order is committed: ack the change."""
    REMOVED = "removed"
    """A row of a reindex, at a version at which the key is deleted: ack the change."""
    BUSY = "busy"
    """Another claim holds the key, or the retry of this change, or of a newer one, is not due."""
    DEFERRED = "deferred"
    """A newer change was tried and is not settled: it may have been written, and will be tried again."""
    PROBATION = "probation"
    """A worker died with this key. Claim again at the level of the refusal, and run the change in that company."""
    MIXED = "mixed"
    """Versioned and unversioned changes are mixed on one key: they have no common order."""
    PAUSED = "paused"
    """An operator has paused the key, or a swap holds up all keys for some seconds."""
    LIMITED = "limited"
    """The rate limit of the key allows the next dispatch only later."""
    FORGOTTEN = "forgotten"
    """Sent longer ago than the retention, and the key has no entry: whether the change is stale cannot be decided."""


class Level(enum.IntEnum):
    """In which company a change may run. The more workers have died with its key, the less company it gets.

    The change that killed a worker thus reaches `ALONE`, where a death can only be its own fault, while changes that
    were merely beside it are written on the way there, and nothing else waits for them.
    """

    USUAL = 0
    PROBATION = 1
    """A few changes on probation run at a time; ordinary changes go on beside them."""
    SOLE = 2
    """The only change on probation in its process; ordinary changes go on beside it."""
    ALONE = 3
    """Nothing runs beside it. A death here, and only here, counts as a crash."""


class Phase(enum.IntEnum):
    """How far the holder of a key has come, as far as the ledger knows."""

    CLAIMED = 0
    BEGUN = 1
    """User code may have run, in the company that the level allows."""
    ACCOMPANIED = 2
    """A change that ran alone took so long that other changes run beside it again."""


class Certainty(enum.StrEnum):
    """What is known about the effect of a failed attempt."""

    CLEAN = "clean"
    """Nothing was written."""
    ENDED = "ended"
    """It may have been written; no call is in flight any more."""
    UNKNOWN = "unknown"
    """It may have been written, or a call in flight may still write it."""


class CommitResult(enum.StrEnum):
    """The ledger's answer to a commit."""

    COMMITTED = "committed"
    ALREADY = "already"
    """The mark is at this order: an earlier commit arrived, and its answer was lost."""
    REFUSED = "refused"


class LedgerPolicy(msgspec.Struct, frozen=True):
    """How a ledger treats the keys of one pipeline."""

    intents: bool = False
    """Whether claims record what they are about to write, so that older changes wait for it.

    On for sinks that accept an older write after a newer one: plain sinks, and those that forget deletions.
    """
    redelivery_s: float = 3600.0
    """The longest time from the last attempt at a message to its next delivery, and from a commit to the sending of an
    older version."""
    retention_s: float | None = None
    """How long the ledger keeps an idle key at least; None: for ever."""
    rate: Rate | None = None
    """The rate limit of each key, over all workers."""
    command_s: float = 10.0
    """How long a step of the ledger may take before it counts as lost and is repeated on another connection: a third of
    the lease."""


class LeaseTerms(msgspec.Struct, frozen=True):
    """The conditions under which a worker asks for claims."""

    owner: str
    lease_s: float
    level: Level = Level.USUAL
    """The worker runs the changes in the company of this level, or in less."""
    despite_pause: bool = False
    """Claim even if the key is paused: an operator pauses a key and then works on it."""
    move_token: int = 0
    """Pass the barrier that has this token: the caller carries out the swap."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """The answer to a claim that was not granted. `wait_s` is the longest time that the reason can last."""

    reason: RefusalReason
    wait_s: float = 0.0
    mark: Order | None = None
    level: Level = Level.USUAL
    """The level at which to claim the key instead."""


class Position(msgspec.Struct, frozen=True, gc=False):
    """How far the work on one order of a key has come, if it is done in parts. The next holder resumes there."""

    place: int
    """How much is done, in a unit of the holder's choice; 0 is the beginning. It never falls."""
    note: bytes = b""
    """What the next holder needs to know to resume at this place."""

    def __post_init__(self) -> None:
        if not 0 <= self.place <= VERSION_MAX:
            raise PositionError(f"place {self.place} must be from 0 to {VERSION_MAX}")
        if len(self.note) > NOTE_MAX_BYTES:
            raise PositionError(f"the note of a position has {len(self.note)} bytes, the limit is {NOTE_MAX_BYTES}")


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right to work on one key until a deadline, with a token that is never reused."""

    key: str
    order: Order | None
    deleted: bool
    token: int
    attempts: int = 0
    """How many attempts at this order have failed before."""
    crashes: int = 0
    """How many workers died while they ran this order alone."""
    suspicions: int = 0
    took_over: bool = False
    level: Level = Level.USUAL
    late_deaths: int = 0
    position: Position | None = None
    """Where to resume; None starts at the beginning. An earlier holder has kept it, at the same order."""
    extent: int = 0
    """The extent of the key when the claim was granted, over all orders: see `Entry.extent`."""


class Advance(msgspec.Struct, frozen=True):
    """A part of the work under a claim is done: the claim has come to a position."""

    claim: Claim
    position: Position
    extent: int = 0
    """Raise the extent to this. A holder reserves the ordinals of a part before it writes them."""
    restart: Order | None = None
    """Start again at the beginning, at this order: what was read has changed. It is above that of the claim."""

    @property
    def order(self) -> Order | None:
        """The order that the position belongs to."""
        return self.restart or self.claim.order

    @property
    def claim_after(self) -> Claim:
        """The claim as its holder goes on with it once the ledger has accepted this: no failure counts any more."""
        one, before = self.claim, self.claim.position
        extent = max(one.extent, self.extent)
        one = msgspec.structs.replace(one, order=self.order, position=self.position, extent=extent)
        if self.restart or self.position.place <= (before.place if before is not None else 0):
            return one
        return msgspec.structs.replace(one, attempts=0, crashes=0, level=Level.USUAL, late_deaths=0)


class Commit(msgspec.Struct, frozen=True, gc=False):
    """The end of a claim whose change is in the sink."""

    claim: Claim
    overdue: bool = False
    """The holder's own deadline passed before the sink had answered."""
    extent: int | None = None
    """The new extent of the key: the sink holds no record with an ordinal at or above it. None leaves the extent."""
    note: bytes = b""
    """What to remember about the content until the next commit; see `Entry.note`."""
    repairs: bool = False
    """The current state was read and written as a whole, after the last suspicious write: the key is not suspect."""

    @property
    def is_plain(self) -> bool:
        """Whether the commit leaves a mark alone."""
        return self.extent is None and not self.note and not self.repairs


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the ledger stores of one key. In an idle entry, only the first three fields are set."""

    mark: Order | None = None
    deleted: bool = False
    updated_at: float = 0.0
    token: int = 0
    """The token of the claim that holds the key; 0 if no claim does."""
    owner: str = ""
    lease_until: float = 0.0
    abandoned: bool = False
    """The holder is alive and has reported an unknown outcome. The key is free when the lease expires."""
    phase: Phase = Phase.CLAIMED
    """How far the holder has come."""
    deaths: Level = Level.USUAL
    """The level: how many workers have died with this key since its last commit, up to `ALONE`."""
    late_deaths: int = 0
    """How many workers died with this key alone, after other changes ran beside it again."""
    intent: Order | None = None
    """The order that the holder is about to write."""
    unknown: Order | None = None
    """The newest order that may be in the sink although it is not committed."""
    unknown_until: float = 0.0
    tried: Order | None = None
    """The order that `attempts`, `crashes` and `not_before` belong to."""
    tried_at: float = 0.0
    attempts: int = 0
    crashes: int = 0
    not_before: float = 0.0
    suspicions: int = 0
    suspected_at: float = 0.0
    era: int = 0
    """The era to which an operator has raised this key; the next commit carries it into the mark."""
    rate_at: float = 0.0
    """The theoretical arrival time of GCRA: each dispatch moves it on by one interval. Not after now: no limit."""
    position: Position | None = None
    """How far the work on the order `advanced` has come."""
    advanced: Order | None = None
    """The order at which work in parts was begun, and that `position` belongs to.

    A newer order starts at the beginning, and an older one continues this one.
    """
    extent: int = 0
    """No record of this key with an ordinal at or above this is in the sink, at any order; 0 if none was reserved.

    It only rises, until a commit that has deleted the records behind the last one of its order.
    """
    note: bytes = b""
    """What the holder of the last commit noted about the content: for an object, its ETag and its number of records."""

    @property
    def is_idle(self) -> bool:
        """Nothing is going on with the key: its mark says all, besides what its rate was charged."""
        return Entry(self.mark, self.deleted, self.updated_at, rate_at=self.rate_at) == self


EMPTY = Entry()
