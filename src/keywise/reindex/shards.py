"""The shards of a run: a ledger scope of their own, with one entry for each.

The mark of a shard is the generation to which it was read, and its position is how far the current run has come. The
same scope has entries for the sweep, the notice, the catch-up, and rows that were postponed.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from keywise.core.change import ChangeHeader, Order
from keywise.core.clock import Clock, boot_time
from keywise.core.entry import (
    NOTE_MAX_BYTES,
    Advance,
    Claim,
    Commit,
    Entry,
    LeaseTerms,
    Level,
    Position,
    Refusal,
    RefusalReason,
)
from keywise.core.errors import AdminError
from keywise.core.ledger import Failure, Ledger, PluggedLedger, TransferableLedger
from keywise.core.origin import Page, Shard
from keywise.core.settings import Settings
from keywise.core.tracebacks import escaped
from keywise.flow.heartbeat import Heartbeat
from keywise.reindex.row_governor import Pace

ENTRIES_AT_ONCE = 1000
SHARDS = "/reindex"
"""The name of the scope is that of the pipeline, followed by this."""
SWEEP = "sweep"
"""The key of the sweep, the stage after the scan."""
NOTICE = "notice"
"""The key of the notice that a run has ended."""
CATCH_UP = "catch up"
"""The key of the work on a run beside the live target, from its last row to the swap. It is never committed."""
SHARD_KEY, ROW_KEY = "shard", "row"
"""How the keys of shards and of postponed rows begin."""
READ, POSTPONED = "read", "postponed"
"""What a shard counts besides outcomes: rows that were read, and rows that are left to the sweep."""
FOUND, GONE, LAGGING = "found", "gone", "lagging"
"""What a sweep counts besides outcomes: rows that the origin has, keys that are gone, and keys that may only lag."""


class ShardProgress(msgspec.Struct, frozen=True):
    """How far a shard is read. The ledger keeps it in the note of the position, and finally in that of the commit."""

    shard: Shard
    start: int = 0
    """Which start of the run has written the shard: the number of the last one is `ReindexRun.starts`."""
    keys: Sequence[str] = ()
    """Read these keys, and nothing else."""
    rows_max: int | None = None
    """Read so many rows at the most; None: all rows of the shard."""
    after: str = ""
    """The cursor after the last page whose rows have ended, or are postponed."""
    pages: int = 0
    counts: Mapping[str, int] = {}
    """How many rows were read, and how many of them ended with each outcome."""
    is_last: bool = False
    """The last page has ended."""
    pace: Pace | None = None
    """How slowly the worker of the last page went on; None: at full speed."""

    def rows_left(self, page_rows: int) -> int:
        """How many rows the next page may have."""
        return page_rows if self.rows_max is None else min(page_rows, self.rows_max - self.counts.get(READ, 0))

    def past(
        self, page: Page, outcomes: Mapping[str, int], postponed: int, pace: Pace | None = None
    ) -> "ShardProgress":
        """Return the progress after a page whose rows have ended, or are postponed."""
        counts = Counter(self.counts)
        counts.update(outcomes)
        counts.update({READ: len(page.rows), POSTPONED: postponed})
        is_last = page.is_last or (self.rows_max is not None and counts[READ] >= self.rows_max)
        return replace(self, after=page.after, pages=self.pages + 1, counts=dict(+counts), is_last=is_last, pace=pace)

    @property
    def position(self) -> Position:
        # A place never falls, so a start cannot replace what a later start of the same run has written.
        return Position(self.start + self.pages, msgspec.json.encode(self))

    @property
    def rows_expected(self) -> int | None:
        """About how many rows the shard has; None if that is not known. Once the shard is read, the number is exact."""
        if self.is_last:
            return self.counts.get(READ, 0)
        if self.keys:
            return len(self.keys)
        rows = [one for one in (self.shard.rows, self.rows_max) if one is not None]
        return min(rows) if rows else None


def rows_expected(shards: Sequence[ShardProgress]) -> int | None:
    """Return about how many rows these shards have together; None if that is known of no shard.

    The last shard of a table has no end, so its size is not known. It counts as half of an average shard.
    """
    rows = [shard.rows_expected for shard in shards]
    known = [one for one in rows if one is not None]
    if not known:
        return None
    return sum(known) + (len(rows) - len(known)) * (sum(known) // len(known)) // 2


class SweepProgress(msgspec.Struct, frozen=True):
    """How far a sweep has come. After a takeover it starts again at the beginning, which does no harm."""

    steps: int = 0
    """The place of the position, which rises with each attempt that has come to its end."""
    counts: Mapping[str, int] = {}
    gone: int = 0
    """How many keys seem to be gone, if they are too many to be deleted without the operator's consent."""
    deleted: int = 0
    """How many gone keys the run has deleted so far."""

    @property
    def position(self) -> Position:
        return Position(self.steps, msgspec.json.encode(self))


BEHIND_FEW = 100
"""A pass that writes fewer keys counts as short, even if it is not shorter than the pass before."""


class CatchUpProgress(msgspec.Struct, frozen=True):
    """What the last pass has found, and why the last try to swap has failed."""

    steps: int = 0
    """The place of the position, which rises with each pass, and not within one: failed attempts are counted since."""
    passes: int = 0
    keys: int = 0
    """How many keys with a row the live target has."""
    behind: int = 0
    """At how many keys the targets differed."""
    behind_before: int = 0
    """At how many keys they differed in the pass before."""
    interval_s: float = 0.0
    """From the beginning of the pass before to that of the last one; 0 if there was no pass before."""
    lagging: int = 0
    """For how many of the keys that differed the origin has an older row than the live target, or none."""
    stuck: int = 0
    """How many keys have lagged for longer than the horizon."""
    stuck_keys: tuple[str, ...] = ()
    """Some of the stuck keys."""
    gone: int = 0
    """How many keys are gone from the origin, if they are too many to be deleted without the operator's consent."""
    gone_keys: tuple[str, ...] = ()
    """Some of the gone keys."""
    deleted: int = 0
    """How many gone keys the run has deleted so far."""
    run_started_at: float = 0.0
    """Of which run this is the progress: a rollback has the generation of the run before it."""
    unwritten: int = 0
    """How many keys could not be written."""
    failed: Mapping[str, str] = {}
    """Some of the keys that could not be written, with the cause."""
    unresolved: tuple[str, ...] = ()
    """Some keys that are claimed or suspect, or have a write of unknown outcome, in one of the targets."""
    seconds: float = 0.0
    """How long the pass took."""
    refused: tuple[str, ...] = ()
    """Why the last swap was refused or called off."""

    @property
    def position(self) -> Position:
        """The position that keeps this progress. Keys and causes are shortened as far as its note has no room."""
        characters = NOTE_MAX_BYTES
        while len(note := msgspec.json.encode(self._shortened(characters))) > NOTE_MAX_BYTES:
            characters //= 2
        return Position(self.steps, note)

    def _shortened(self, characters: int) -> "CatchUpProgress":
        def short(texts: Iterable[str]) -> tuple[str, ...]:
            return tuple(_shortened(text, characters) for text in texts)

        return replace(
            self,
            stuck_keys=short(self.stuck_keys),
            gone_keys=short(self.gone_keys),
            failed=dict(zip(short(self.failed), short(self.failed.values()), strict=True)),
            unresolved=short(self.unresolved),
            refused=short(self.refused),
        )

    @property
    def shrinks(self) -> bool:
        """Whether the passes get shorter, or have little to write."""
        return self.behind < max(self.behind_before, BEHIND_FEW)

    @property
    def live_per_s(self) -> float:
        """At how many keys a second the live changes make the targets differ, by the last two passes."""
        return self.behind / self.interval_s if self.interval_s > 0 else 0.0

    @property
    def written_per_s(self) -> float:
        """How many keys a second the last pass has made equal."""
        return self.behind / self.seconds if self.seconds > 0 else 0.0


class ShardLedger:
    """The ledger scope of the shards of one pipeline, and the claims that this process holds on them."""

    def __init__(self, ledger: PluggedLedger, owner: str, settings: Settings, clock: Clock = boot_time) -> None:
        if not isinstance(ledger, TransferableLedger):
            raise AdminError("this ledger cannot list its entries, which a reindex needs; use another ledger")
        self._ledger = ledger
        self._terms = LeaseTerms(owner, settings.lease_s, Level.ALONE)
        self._clock = clock
        self._heartbeat = Heartbeat(
            lease_s=settings.lease_s,
            margin_s=settings.margin_s,
            runtime_max_s=settings.runtime_max_s,
            clock=clock,
            lost=lambda claim: None,  # The next advance or commit reports it.
        )

    async def renew_claims(self) -> None:
        """Renew the claims of this process until cancelled."""
        await self._heartbeat.run(self._ledger)

    # For workers.

    async def claim(self, key: str, generation: int) -> Claim | Refusal:
        """Claim a key of this scope, such as a shard or the sweep; the position of the claim says where to go on."""
        asked_at = self._clock()
        results = await self._ledger.claim([ChangeHeader(key, order_at(generation))], self._terms)
        if not results.granted:
            return results.refused[key]
        [claim] = results.granted
        if claim.order != order_at(generation):
            # The key belongs to a later run by now, of which this worker does not know yet.
            await self._ledger.release([claim])
            return Refusal(RefusalReason.BUSY)
        self._heartbeat.hold([claim], asked_at)
        return claim

    async def advance(self, claim: Claim, position: Position) -> Claim | None:
        """Keep a position; return the claim to go on with, or None if it is lost."""
        advance = Advance(claim, position)
        if await self._ledger.advance([advance]):
            return None
        self._heartbeat.advanced([advance])
        return advance.claim_after

    async def commit(self, claim: Claim, note: bytes = b"") -> bool:
        """End a claim at its generation; return False if it is lost."""
        self._heartbeat.end([claim])
        return not await self._ledger.commit([Commit(claim, note=note)])

    async def fail(self, failure: Failure) -> None:
        await self._ledger.fail([failure])

    async def release(self, claim: Claim) -> None:
        """Give up a claim; its position stays."""
        await self._ledger.release([claim])

    def stop_renewing(self, claim: Claim) -> None:
        """Stop renewing a claim that has ended, or that the caller leaves to expire. A second call does nothing."""
        self._heartbeat.drop([claim])

    async def postpone(self, keys: Sequence[str], generation: int) -> bool:
        """Store the keys of rows that have not ended in time; the sweep writes them.

        Returns False if some of the keys could not be stored, because another worker is storing them and may die first.
        """
        order, by_digest = order_at(generation), {_digest_key(key): key for key in keys}
        results = await self._ledger.claim([ChangeHeader(digest, order) for digest in by_digest], self._terms)
        # A key of a later run is granted at the order of that run.
        notes = [
            Advance(one, Position(0, by_digest[one.key].encode())) for one in results.granted if one.order == order
        ]
        refused = await self._ledger.advance(notes)
        await self._ledger.release(results.granted)
        # A refusal with a mark says that the sweep of this run has written the row, or that a later run has begun.
        ended = [refusal for refusal in results.refused.values() if refusal.mark is not None]
        return not refused and len(notes) + len(ended) == len(by_digest)

    # For operators and workers.

    async def write(self, shards: Sequence[ShardProgress], generation: int, start: int) -> bool:
        """Write the shards of a run in place of those that earlier starts of the run have written.

        Returns False if the shards belong to a later start or a later run by now.
        """
        order, written = order_at(generation), [replace(one, start=start) for one in shards]
        for first in range(0, len(written), ENTRIES_AT_ONCE):
            some = {shard_key(n): one for n, one in enumerate(written[first : first + ENTRIES_AT_ONCE], first)}
            results = await self._ledger.claim([ChangeHeader(key, order) for key in some], self._terms)
            # A shard of a later run is granted at the order of that run.
            own = [claim for claim in results.granted if claim.order == order]
            refused = await self._ledger.advance([Advance(claim, some[claim.key].position) for claim in own])
            await self._ledger.release(results.granted)
            for key, refusal in results.refused.items():
                if refusal.mark is None:
                    raise AdminError(
                        f"a worker of an earlier run, or another start, still holds {key!r}; start again in a few "
                        "seconds"
                    )
            if refused or len(own) < len(some):
                return False
        return True

    def entries(self) -> AsyncGenerator[tuple[str, Entry], None]:
        """Yield all entries of this scope, of the last run and of earlier ones."""
        return entries_of(self._ledger)


async def entries_of(ledger: Ledger) -> AsyncGenerator[tuple[str, Entry], None]:
    """Yield the entries of a scope.

    An entry that is written meanwhile may be yielded as it was before or after that. A new one may be left out.
    """
    assert isinstance(ledger, TransferableLedger), "a run starts only on a ledger that can list its entries"
    cursor = ""
    while True:
        page = await ledger.transfer.page(cursor, ENTRIES_AT_ONCE)
        for key, entry in page.entries:
            yield key, entry
        cursor = page.cursor
        if not cursor or not page.entries:
            return


def other_scope(name: str, generation: int) -> str:
    """Return the name of the ledger scope of the target that the run of a generation fills.

    Each run has a scope of its own, so that a worker that was stopped during an earlier one cannot disturb a later one.
    """
    return f"{name}@{generation}"


def shard_key(number: int) -> str:
    return f"{SHARD_KEY} {number:06d}"


def shard_number(key: str) -> int | None:
    """Return the number of a shard by its key; None for other keys."""
    kind, _, number = key.partition(" ")
    return int(number) if kind == SHARD_KEY else None


def order_at(generation: int) -> Order:
    """Return the order of a claim in this scope: its version is the generation of the run."""
    return (0, generation, 0)


def is_finished(entry: Entry, generation: int) -> bool:
    """Whether a shard, the sweep or a postponed row has ended in this run, or in a later one."""
    return entry.mark is not None and entry.mark >= order_at(generation)


def progress_of(entry: Entry, generation: int) -> ShardProgress | None:
    """Return how far a shard has come in this run; None before it is written."""
    note = entry.note if is_finished(entry, generation) else b""
    if not note and entry.position is not None and entry.advanced == order_at(generation):
        note = entry.position.note
    return msgspec.json.decode(note, type=ShardProgress) if note else None


def _digest_key(key: str) -> str:
    """Return the key of a postponed row. It has a digest: the row's own key may be as long as the ledger allows."""
    return f"{ROW_KEY} {blake2b(key.encode(), digest_size=16).hexdigest()}"


def _shortened(text: str, characters: int) -> str:
    """Return the text, or its beginning and its end if it is longer: keys often begin alike. It has no lone surrogates.

    Causes may have them, from file names, and JSON refuses them.
    """
    text, half = escaped(text), characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half:]}"
