"""Copies a pipeline's data from one ledger to another, and verifies that everything arrived.

While a copy is not finished, a special pause covers the target; `keywise resume --all` does not end it.
An interrupted copy leaves that pause behind. The next copy finds it, clears the target and starts again.
"""

import enum
import hashlib
import math
import shlex
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec.structs import asdict, astuple, replace

from keywise.core import rules
from keywise.core.admin import LedgerCounts
from keywise.core.controls import PLAIN, Controls, Pause, ReindexRun
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Entry
from keywise.core.errors import AdminError
from keywise.core.failures import storable
from keywise.core.history import HistoryRecord
from keywise.core.ledger import TransferableLedger
from keywise.core.transfer import TransferPage
from keywise.operate.admin import AuditNote

UNFINISHED = "**"
"""The pattern of the special pause. It covers every key, and no command can set or end it: `--all` means `*`."""
COPIED = "copied"
"""History records of this kind say that a copy was made. Each ledger has its own, so they are not compared."""
PAGE_MAX = 1000
SAME_CLOCK_S = 2.0
"""Clocks that differ by less count as equal, because the two readings are not simultaneous."""
_MOMENTS = ("updated_at", "lease_until", "unknown_until", "tried_at", "not_before", "suspected_at", "rate_at")


class LedgerHandle(msgspec.Struct, frozen=True):
    """An open ledger of one pipeline, with its display name."""

    name: str
    ledger: TransferableLedger


class Checksum(msgspec.Struct):
    """A count of items, and a digest over them that does not depend on their order."""

    count: int = 0
    digest: int = 0

    def add(self, *thing: object) -> None:
        """Add one item."""
        hashed = hashlib.blake2b(msgspec.msgpack.encode(thing), digest_size=16)
        self.count += 1
        self.digest = (self.digest + int.from_bytes(hashed.digest(), "big")) % 2**128

    def __str__(self) -> str:
        return f"{self.digest:032x}"


class Checksums(msgspec.Struct):
    """Checksums of a pipeline's keys, dead letters and history in one ledger."""

    keys: Checksum = msgspec.field(default_factory=Checksum)
    letters: Checksum = msgspec.field(default_factory=Checksum)
    lines: Checksum = msgspec.field(default_factory=Checksum)

    def add(self, page: TransferPage) -> None:
        """Add a page. A history record is hashed with its index, because the order of records matters."""
        for key, entry in page.entries:
            # All fields: an entry as it is stored leaves out defaults, but not a zero that is another object.
            self.keys.add(key, astuple(entry))
        for at, letter in page.dead_letters:
            self.letters.add(at, letter)
        for line in page.records:
            if line.what != COPIED:
                self.lines.add(self.lines.count, line)

    def difference(self, other: "Checksums") -> str:
        """Describe the first kind of item in which another ledger differs; empty if none does."""
        nouns = ("keys", "dead letters", "lines of history")
        for noun, mine, theirs in zip(nouns, astuple(self), astuple(other), strict=True):
            if mine.count != theirs.count:
                return f"{theirs.count:,} {noun} instead of {mine.count:,}"
            if mine != theirs:
                return f"{mine.count:,} {noun}, and some of them are different"
        return ""


class TargetState(enum.StrEnum):
    """What the target holds before the copy."""

    NOTHING = "nothing"
    UNFINISHED = "unfinished"
    """An interrupted copy from the same ledger."""
    SAME = "same"
    OTHER = "other"


class Plan(msgspec.Struct, frozen=True):
    """What a copy found, and what it will do."""

    pipeline: str
    found: TargetState
    counts: LedgerCounts
    controls: Controls
    """The controls of the source."""
    since: float
    """When the plan was made, by the source's clock. Rate limits that had expired by then are not copied."""
    shift_s: float
    """By how many seconds the clock of the target is ahead; times are shifted by it."""
    difference: str = ""
    """A description of how the target differs from the source."""


async def check_at_rest(pipeline: str, handle: LedgerHandle) -> Controls:
    """Return the controls of a pipeline that is at rest; raises `AdminError` if a worker may still change it."""
    controls: Controls = await handle.ledger.control_store.controls()
    if _unfinished_pause(controls) is not None:
        raise AdminError(
            f"{handle.name} holds an unfinished copy of pipeline {pipeline!r}; copy from the ledger that is complete"
        )
    if controls.move is not None:
        raise AdminError(
            f"pipeline {pipeline!r} moves to target {controls.move.after!r} now, which takes some seconds; try again"
        )
    if not controls.is_paused:
        raise AdminError(
            f"pipeline {pipeline!r} is not paused in {handle.name}, so a worker could change it meanwhile; "
            f"first {_pause_command(pipeline)}"
        )
    if (run := controls.run_beside) is not None:
        name = shlex.quote(pipeline)
        raise AdminError(
            f"reindex {run.generation} of pipeline {pipeline!r} fills {run.into!r} beside the live target, and its "
            f"marks are in a scope of their own in {handle.name}; wait for the swap (keywise reindex status {name}), "
            f"or end it with keywise reindex cancel {name}"
        )
    await _check_claims(pipeline, handle)
    return controls


async def _check_claims(pipeline: str, handle: LedgerHandle) -> None:
    if held := await handle.ledger.control_store.held("", 1):
        entry = await handle.ledger.admin.inspect(held[0]) or EMPTY
        raise AdminError(
            f"{held[0]!r} of pipeline {pipeline!r} is still held by {entry.owner} in {handle.name}; "
            f"wait for it with {_pause_command(pipeline)}"
        )


def _pause_command(pipeline: str) -> str:
    return f"keywise pause --all --wait --pipeline {shlex.quote(pipeline)}"


class LedgerCopy:
    """A copy of one pipeline from one ledger to another."""

    def __init__(
        self, pipeline: str, source: LedgerHandle, target: LedgerHandle, report: Callable[[str, int], None]
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._target = target
        self._report = report
        """Called with the current step, and how many keys and dead letters it has processed."""

    async def plan(self) -> Plan:
        """Inspect both ledgers; raises `AdminError` if the copy is impossible. Nothing is changed."""
        controls = await check_at_rest(self._pipeline, self._source)
        counts, since = await self._source.ledger.admin.counts(), await self._source.ledger.admin.now()
        ahead_s = await self._target.ledger.admin.now() - since
        shift_s = 0.0 if abs(ahead_s) < SAME_CLOCK_S else float(math.ceil(ahead_s))
        plan = Plan(self._pipeline, TargetState.NOTHING, counts, controls, since, shift_s)
        there = await self._target.ledger.control_store.controls()
        if (pause := _unfinished_pause(there)) is not None:
            if pause.why == self._why:
                return replace(plan, found=TargetState.UNFINISHED)
            return replace(plan, found=TargetState.OTHER, difference=f"an unfinished copy: {pause.why}")
        if there == PLAIN and await self._is_empty():
            return plan
        shift_s = _shift_of(controls, there, plan.shift_s)
        mine = await self._checksummed(self._source, "comparing", since, shift_s)
        theirs = await self._checksummed(self._target, "comparing", since + shift_s)
        difference = mine.difference(theirs) or await self._miscount()
        return replace(plan, found=TargetState.OTHER if difference else TargetState.SAME, difference=difference)

    async def check_replaceable(self) -> None:
        """Raise `AdminError` if the target may be in use, so that its data must not be replaced."""
        controls = await self._target.ledger.control_store.controls()
        if not controls.is_paused and _unfinished_pause(controls) is None:
            raise AdminError(
                f"pipeline {self._pipeline!r} is not paused in {self._target.name}, so it may be in use; "
                f"if it is not, pause it there first: {_pause_command(self._pipeline)}"
            )
        await _check_claims(self._pipeline, self._target)

    async def run(self, plan: Plan, audit_note: AuditNote) -> Checksums:
        """Copy everything, replacing what the target holds, and then compare both ledgers."""
        target, before = self._target.ledger, await self._target.ledger.control_store.controls()
        there = shifted_controls(plan.controls, plan.shift_s)
        pause = Pause(UNFINISHED, True, await target.admin.now(), storable(audit_note.who), self._why)
        await target.transfer.set_controls(replace(there, pauses=(*there.pauses, pause)))
        await self._refuse_itself(before)
        if plan.found is not TargetState.NOTHING:
            await target.transfer.clear()
        if not await self._is_empty():
            await target.transfer.set_controls(before)
            raise AdminError(f"{self._target.name} is in use; stop its workers, and run the copy again")
        # New tokens must be higher than all tokens of the source: a sink that compares tokens has seen those.
        await target.transfer.tokens_above(await self._source.ledger.transfer.tokens_above(0))
        copied = await self._checksummed(self._source, "copying", plan.since, plan.shift_s, add_to=self._target)
        await self._verify(plan, copied)
        figures = f"{copied.keys.count:,} keys, {copied.letters.count:,} dead letters"
        await self._record(self._target, f"from {self._source.name}: {figures}", audit_note)
        await target.transfer.set_controls(there)
        await self._record(self._source, f"to {self._target.name}: {figures}", audit_note)
        return copied

    async def _refuse_itself(self, before: Controls) -> None:
        """Raise `AdminError` if source and target are the same ledger under two names.

        In that case, the special pause that was just set in the target is found in the source.
        """
        if _unfinished_pause(await self._source.ledger.control_store.controls()) is not None:
            await self._target.ledger.transfer.set_controls(before)
            raise AdminError(
                f"{self._source.name} and {self._target.name} are the same ledger; nothing was changed, "
                "name another one to copy to"
            )

    @property
    def _why(self) -> str:
        return storable(f"keywise ledger copy from {self._source.name} is not finished")

    async def _verify(self, plan: Plan, copied: Checksums) -> None:
        arrived = await self._checksummed(self._target, "checking the copy", plan.since + plan.shift_s)
        if difference := copied.difference(arrived):
            raise AdminError(
                f"{self._target.name} does not hold what was copied to it: {difference}; "
                f"stop its workers, and run the copy again; pipeline {self._pipeline!r} stays paused there"
            )
        left = await self._checksummed(self._source, "checking the original", plan.since, plan.shift_s)
        difference = copied.difference(left)
        if difference or await check_at_rest(self._pipeline, self._source) != plan.controls:
            raise AdminError(
                f"{self._source.name} was changed while it was copied ({difference or 'its pauses'}); "
                f"stop its workers, and run the copy again; pipeline {self._pipeline!r} stays paused in "
                f"{self._target.name}"
            )
        if miscount := await self._miscount():
            raise AdminError(
                f"{self._target.name} counts differently than {self._source.name} ({miscount}), because of a bug in "
                f"one of their adapters; pipeline {self._pipeline!r} stays paused there"
            )

    async def _miscount(self) -> str:
        """Describe where the counts of the two ledgers differ; empty if they agree.

        This finds entries that an adapter counts but leaves out of its transfer pages.
        """
        mine, theirs = [asdict(await handle.ledger.admin.counts()) for handle in (self._source, self._target)]
        for noun in ("keys", "tombstones", "suspects", "dead"):
            if theirs[noun] != mine[noun]:
                return f"{noun}: {theirs[noun]:,} instead of {mine[noun]:,}"
        return ""

    async def _checksummed(
        self, handle: LedgerHandle, what: str, since: float, shift_s: float = 0.0, add_to: LedgerHandle | None = None
    ) -> Checksums:
        """Read all pages of a ledger as the target stores them; with `add_to`, write them there."""
        checksums = Checksums()
        async for page in _pages(handle):
            there = carried(page, since, shift_s)
            if add_to is not None:
                await add_to.ledger.transfer.add(there)
            checksums.add(there)
            self._report(what, checksums.keys.count + checksums.letters.count)
        return checksums

    async def _is_empty(self) -> bool:
        async for page in _pages(self._target):
            if page.entries or page.dead_letters or page.records:
                return False
        return True

    async def _record(self, handle: LedgerHandle, detail: str, audit_note: AuditNote) -> None:
        detail = storable("; ".join(part for part in (detail, audit_note.why) if part))
        at = await handle.ledger.admin.now()
        line = HistoryRecord(at, COPIED, detail=detail, by=storable(audit_note.who))
        await handle.ledger.history_store.record([line])


async def _pages(handle: LedgerHandle) -> AsyncIterator[TransferPage]:
    """Yield everything that a ledger holds of the pipeline, page by page."""
    cursor = ""
    while True:
        page = await handle.ledger.transfer.page(cursor, PAGE_MAX)
        yield page
        cursor = page.cursor
        if not cursor:
            return


def _unfinished_pause(controls: Controls) -> Pause | None:
    """Return the special pause of an unfinished copy, if there is one."""
    return next((one for one in controls.pauses if one.is_pattern and one.keys == UNFINISHED), None)


def _shift_of(mine: Controls, theirs: Controls, otherwise_s: float) -> float:
    """Return by how much an earlier copy shifted times, from the pauses that both ledgers have.

    The clocks may have drifted since. Shifted by their present difference, equal data would look different.
    """
    moments = {replace(pause, at=0.0): pause.at for pause in mine.pauses}
    apart_s = [pause.at - moments[same] for pause in theirs.pauses if (same := replace(pause, at=0.0)) in moments]
    return float(round(apart_s[0])) if apart_s else otherwise_s


def carried(page: TransferPage, since: float, shift_s: float) -> TransferPage:
    """Return a page as the target stores it: times are shifted to its clock, and rounded as all ledgers store them."""
    entries = [(key, _carried_entry(entry, since, shift_s)) for key, entry in page.entries]
    return TransferPage(
        entries=[(key, entry) for key, entry in entries if rules.kept(entry) is not None],
        dead_letters=[(at + shift_s, _carried_letter(letter)) for at, letter in page.dead_letters],
        records=[_carried_line(line, shift_s) for line in page.records],
    )


def _carried_entry(entry: Entry, since: float, shift_s: float) -> Entry:
    if entry.rate_at and entry.rate_at <= since:
        entry = replace(entry, rate_at=0.0)
    entry = replace(entry, updated_at=float(math.ceil(entry.updated_at)))
    if not shift_s:
        return entry
    fields = asdict(entry)
    return replace(entry, **{name: fields[name] + shift_s for name in _MOMENTS if fields[name]})


def _carried_letter(letter: DeadLetter) -> DeadLetter:
    headers = dict(letter.headers) if letter.headers else None
    return replace(letter, cause=_text(letter.cause), source=_text(letter.source), headers=headers)


def _carried_line(line: HistoryRecord, shift_s: float) -> HistoryRecord:
    what, detail, by = _text(line.what), _text(line.detail), _text(line.by)
    return replace(line, at=line.at + shift_s, what=what, detail=detail, by=by)


def shifted_controls(controls: Controls, shift_s: float) -> Controls:
    """Return the controls with their times shifted to the clock of the target."""
    resync_at = controls.resync_at + shift_s if controls.resync_at else 0.0
    pauses = tuple(replace(pause, at=pause.at + shift_s) for pause in controls.pauses)
    return replace(controls, pauses=pauses, resync_at=resync_at, run=_shifted_run(controls.run, shift_s))


def _shifted_run(run: ReindexRun | None, shift_s: float) -> ReindexRun | None:
    if run is None:
        return None
    ended_at = run.ended_at + shift_s if run.ended_at else 0.0
    return replace(run, started_at=run.started_at + shift_s, ended_at=ended_at)


def _text(text: str) -> str:
    """Replace NUL, which not every store accepts in a text."""
    return text.replace("\0", "\ufffd")
