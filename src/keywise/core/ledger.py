"""The shapes that plug in: each is small, and its contract is in its prose.

All methods take many items at once and are one atomic step per key.
`UnavailableError` means that nothing is known to have happened and that the caller may try again;
adapters turn their client library's errors into it, and never retry on their own.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self, runtime_checkable

import msgspec

from keywise.core.change import Change, Delivery, Outcome, Want
from keywise.core.controls import Pause, Standing
from keywise.core.entry import Certainty, Claim, Entry, Refusal, Terms
from keywise.core.events import Event


class Grade(enum.StrEnum):
    """What a sink can promise."""

    ATOMIC = "atomic"
    CONDITIONAL = "conditional"
    PLAIN = "plain"


class Opened(Protocol):
    """Something that stores its settings when made, connects on `async with`, and disconnects after it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


class Source(Opened, Protocol):
    """Hands over deliveries. It never looks inside a body."""

    visibility_s: float | None
    """How long a delivery stays hidden from others; None: as long as the connection lives."""
    database: object | None
    """The opened database that the queue lives in, if a transaction of it can also receive and ack."""

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        """Up to `limit` deliveries; waits up to `wait_s` for the first one."""

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        """Keep deliveries hidden for longer. One that already came back to somebody else is left alone."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries. Acking one that already came back does nothing."""

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        """Let deliveries come back after a delay, to anybody."""

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        """Append messages, durably once it returns."""

    async def depth(self) -> int:
        """How many messages are not acked yet, delayed and handed-over ones included."""


class Inlet(Protocol):
    """A source's queue seen from inside a transaction of its database."""

    async def receive(self, limit: int, peeked: Sequence[Delivery] = ()) -> Sequence[Delivery]:
        """Visible deliveries, hidden from others by the transaction itself.

        It is `peeked` itself if all of that is still there and nothing else is due before it.
        """

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None: ...


class InlineSource(Protocol):
    """What a source has besides if it lives in a database which can hold a ledger too."""

    def inlet(self, connection: Any) -> Inlet:
        """This queue inside a transaction of its database."""

    async def arrived(self, wait_s: float) -> bool:
        """Whether something can be received; waits up to `wait_s` for it. It takes no lock."""

    async def peek(self, limit: int, after: Delivery) -> Sequence[Delivery]:
        """What probably comes after a delivery. It takes no lock, so others may receive it meanwhile."""


class Answers(msgspec.Struct):
    """What a ledger says to many wants at once."""

    granted: list[Claim] = []
    refused: dict[str, Refusal] = {}


class Letter(msgspec.Struct, frozen=True):
    """A dead letter: a delivery set aside with its cause."""

    cause: str
    body: bytes
    key: str = ""
    """Empty if the delivery could not be read so far."""
    version: int | None = None
    headers: Mapping[str, str] | None = None
    sent_at: float = 0.0
    source: str = ""


class Burial(msgspec.Struct, frozen=True):
    """A dead letter on its way: with the claim it ends, if one is held, and what is known of the last try."""

    letter: Letter
    claim: Claim | None = None
    certainty: Certainty = Certainty.CLEAN


class Failure(msgspec.Struct, frozen=True):
    """A failed try under a claim."""

    claim: Claim
    certainty: Certainty
    retry_s: float


class Ledger(Opened, Protocol):
    """Remembers one entry per key of one pipeline, and grants claims on them. `rules.py` says how it decides.

    A ledger that plugs in also has the attributes `operator`, `governor` and `historian`, perhaps all itself,
    `archive` if it can be copied, and `database`: the one that an atomic sink can share, None if it has no
    transactions.
    """

    async def claim(self, wants: Sequence[Want], terms: Terms) -> Answers:
        """Check and take in one step per key. The wants name each key once."""

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        """Extend where the token is equal; return the claims that are lost."""

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """Raise marks where the token is equal and the order above the mark; return the claims that were refused.

        A claim whose order is the mark already counts as committed, so a commit may be repeated after a lost answer.
        """

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Count failed tries. A key of unknown outcome stays held until its lease runs out."""

    async def release(self, claims: Sequence[Claim]) -> None:
        """Give back claims under which nothing was written."""

    async def bury(self, burials: Sequence[Burial]) -> list[Claim]:
        """Keep dead letters and end their claims in one step; return the claims that are lost (nothing is kept)."""

    async def prune(self, retention_s: float) -> int:
        """Forget idle entries older than the retention; return how many."""

    def transaction(self) -> AbstractAsyncContextManager["Transaction"]:
        """One transaction of the ledger's database: commits on leaving, rolls back on an error."""


class Transaction(Protocol):
    """One transaction of the database that ledger and sink (and perhaps source) share."""

    connection: Any
    """What a handler is given to write with."""

    async def decide(self, wants: Sequence[Want]) -> dict[str, Refusal]:
        """Refusals by key; whatever is not in it may be written and marked in this transaction."""

    async def mark(self, wants: Sequence[Want]) -> None:
        """Raise marks of keys that `decide` has just allowed."""

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """As `Ledger.commit`, inside this transaction. If anything is refused, the caller rolls back.

        An order that is the mark already is refused too: its effect is there, and must not come a second time.
        """

    async def fail(self, wants: Sequence[Want]) -> list[int]:
        """Count failed tries of keys that no claim is held on; return the counts."""

    async def bury(self, letters: Sequence[tuple[Want | None, Letter]]) -> None:
        """Keep dead letters; older changes of their keys are eligible again."""

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """A part that is rolled back alone if it raises."""


class HastyTransaction(Protocol):
    """What a transaction has besides if it saves a step for a caller that marks everything or rolls back."""

    async def decide_at_once(self, wants: Sequence[Want]) -> dict[str, Refusal]:
        """As `Transaction.decide`, and what is allowed may be marked already. The caller asks for the marks as well."""


class Result(msgspec.Struct, frozen=True):
    """What a sink made of one change."""

    outcome: Outcome
    """Applied, superseded (the sink holds something newer), failed, or busy (no fault of the change)."""
    cause: str = ""
    permanent: bool = False
    certainty: Certainty = Certainty.CLEAN
    """Of a failed or busy one."""
    wait_s: float | None = None
    """Of a busy one: when to bring it back; None leaves it to the consumer."""


APPLIED = Result(Outcome.APPLIED)
SUPERSEDED = Result(Outcome.SUPERSEDED)


class Sink(Opened, Protocol):
    """Applies changes under claims. It never sees a delivery, so it cannot ack."""

    grade: Grade
    forgets_deletions: bool
    """A conditional sink that may accept an old version again some time after a deletion."""
    batch_max: int
    """How many changes one call may carry."""

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[Result]:
        """One result per change. Raising (or being cancelled) means that the outcome of all of them is unknown."""


class AtomicSink(Opened, Protocol):
    """Writes inside a transaction of the ledger's database."""

    database: object
    batch_max: int
    runs_user_code: bool
    """User code may kill the process, so its batch is noted as in flight first."""

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        """Write all changes or raise; the caller then rolls back and finds the bad one."""


class Content(msgspec.Struct, frozen=True):
    """What a sink holds of one key."""

    body: bytes | Mapping[str, Any]
    """The whole body, or those of its fields that the sink keeps."""
    version: int | None = None
    """None if the sink does not keep it."""


class Readable(Protocol):
    """What a sink has besides if its content can be compared with the source of truth."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        """What it holds of these keys; one that it does not hold is left out."""


class Sought(msgspec.Struct, frozen=True):
    """Which dead letters are looked for; without anything, all of them."""

    since: float = -math.inf
    """Buried at this moment of the store's clock, or later."""
    until: float = math.inf
    """Buried before."""
    cause: str = ""
    """Part of their cause."""

    def covers(self, buried_at: float, letter: Letter) -> bool:
        return self.since <= buried_at < self.until and self.cause in letter.cause


EVERY_LETTER = Sought()


class Census(msgspec.Struct, frozen=True):
    """A ledger's scope in figures."""

    keys: int
    tombstones: int
    claims: int
    suspects: int
    dead: int


class Operator(Protocol):
    """The operator's hand on one ledger scope."""

    async def inspect(self, key: str) -> Entry | None:
        """What the ledger remembers of a key."""

    async def census(self) -> Census: ...

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        """Keys whose content in the sink has been in doubt for a while, and has not become more so since."""

    async def mend(self, claim: Claim, written: Want | None) -> None:
        """End a repair under an exclusion."""

    async def doubt(self, wants: Sequence[Want], resync_due: bool | None = None) -> None:
        """Make keys suspect that were written without a claim; each want says the newest order that was. It may be
        asked with none. True notes besides that a full resync is due since now, unless it is already; False ends that.
        """

    async def letters(self, limit: int, sought: Sought = EVERY_LETTER) -> list[tuple[int, float, Letter]]:
        """Dead letters, newest first: number, when it was buried, and what."""

    async def drop(self, numbers: Sequence[int]) -> int:
        """Forget dead letters; return how many there were."""

    async def now(self) -> float:
        """The store's clock, to say how long ago something was."""


class Governor(Protocol):
    """What an operator sets in one ledger scope, and what workers of it agree on."""

    async def standing(self) -> Standing:
        """What holds for all keys now."""

    async def pause(self, pause: Pause) -> None:
        """From now on no claim on these keys is granted; claims that are held go on. Pausing again renews it."""

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        """End one pause, named as it was made; False if there is none."""

    async def reset(self, claim: Claim) -> int | None:
        """End an exclusion and raise the era of its key; return it, or None if the claim is lost."""

    async def raise_era(self) -> int | None:
        """Raise the era of all keys above any that one of them has; None while a claim is held."""

    async def keys(self, after: str, limit: int) -> list[str]:
        """Known keys after one, in an order of the ledger's own that never changes; all are after an empty one."""

    async def held(self, after: str, limit: int) -> list[str]:
        """Keys after one that a claim is held on now, in their order."""

    async def turn(self, chore: str, every_s: float) -> bool:
        """True for one worker per interval: it has the turn at a chore. Without an interval, each call has to write."""


class Line(msgspec.Struct, frozen=True):
    """One line of the history: what happened to a key, or what an operator did."""

    at: float
    """By the store's clock."""
    what: str
    key: str = ""
    """Empty for what concerns the whole pipeline."""
    version: int | None = None
    detail: str = ""
    by: str = ""
    """The worker or the operator."""


class Historian(Protocol):
    """Keeps the history of one ledger scope: lines are only added, until they are too old or too many."""

    async def record(self, lines: Sequence[Line]) -> None: ...

    async def history(self, key: str | None, limit: int) -> list[Line]:
        """The newest lines of a key, newest first; None: of the whole pipeline and all keys."""

    async def trim(self, age_s: float, lines_max: int) -> int:
        """Forget old lines, and the oldest above a count; return how many."""


ALARM, CALM = "alarm", "alarm over"
ENDS_ALARM = (CALM, "era raised", "resynced")
"""An operator who raises the era, or says that everything was written again, has done what an alarm asks for."""


class Reporter(Protocol):
    """An observer that also reports by itself, and keeps what it has seen in the ledger. Maintenance runs it."""

    def __call__(self, event: Event) -> None: ...

    def due(self, pipeline: str, now: float) -> Sequence[Event]:
        """What it has to say to all observers now; most of the time nothing."""

    async def flush(self, historian: Historian, operator: Operator, *, is_last: bool = False) -> None:
        """Write what has gathered. What cannot be written waits for the next time."""


@runtime_checkable
class LosesWrites(Protocol):
    """What a ledger has besides if its store may lose what it had confirmed."""

    @property
    def losses(self) -> int:
        """How often this opening has found that."""


class Part(msgspec.Struct, frozen=True):
    """Some of what a ledger keeps of one scope."""

    entries: Sequence[tuple[str, Entry]] = ()
    letters: Sequence[tuple[float, Letter]] = ()
    """Each with when it was buried; the oldest first, by that moment or by its number."""
    lines: Sequence[Line] = ()
    """The oldest first."""
    cursor: str = ""
    """Where to go on; empty at the end."""


class Archive(Protocol):
    """All of one ledger scope, to be carried to another ledger while nobody works on it."""

    async def scopes(self) -> list[str]:
        """All scopes of this store that hold something, in their order."""

    async def part(self, cursor: str, limit: int) -> Part:
        """Up to `limit` things behind a cursor: first entries, whatever the policy is, then letters, then lines."""

    async def add(self, part: Part) -> None:
        """Take in what another ledger told: keys that are not known here, and letters and lines behind those that are.

        Only `updated_at` may change, to the next whole second. Half of a part may be there after an error.
        """

    async def clear(self) -> None:
        """Forget everything of this scope but its standing."""

    async def stand(self, standing: Standing) -> None:
        """Replace what holds for all keys."""

    async def tokens_above(self, floor: int) -> int:
        """Grant only tokens above this one from now on; return one that no earlier token is above."""
