"""Carries what a ledger keeps of a pipeline to another ledger, and proves that all of it arrived.

While a copy is not finished, its target is paused by a pause of its own, which `keywise resume --all` does not end.
A copy that was cut off leaves that pause behind: the next one sees it, and begins anew.
"""

import enum
import hashlib
import math
import shlex
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec.structs import asdict, replace

from keywise.core import rules
from keywise.core.admin import LedgerCounts
from keywise.core.controls import PLAIN, Controls, Pause
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Entry
from keywise.core.errors import AdminError
from keywise.core.failures import storable
from keywise.core.history import HistoryRecord
from keywise.core.ledger import TransferableLedger
from keywise.core.transfer import TransferPage
from keywise.operate.admin import AuditNote

UNFINISHED = "**"
"""A pattern for every key that the command line cannot name: `*` is what it makes of it."""
COPIED = "copied"
"""Lines of the history that say so belong to one ledger, and are not compared."""
PAGE_MAX = 1000
SAME_CLOCK_S = 2.0
"""Clocks that differ by less count as one: a copy takes longer than that, and reading two clocks takes time as well."""
_MOMENTS = ("updated_at", "lease_until", "unknown_until", "tried_at", "not_before", "suspected_at", "rate_at")


class LedgerHandle(msgspec.Struct, frozen=True):
    """An opened ledger of one pipeline, and what people know it by."""

    name: str
    ledger: TransferableLedger


class Checksum(msgspec.Struct):
    """How many things there are, and a sum over what each of them is."""

    count: int = 0
    digest: int = 0

    def add(self, *thing: object) -> None:
        """Count one more. In which order they come makes no difference."""
        hashed = hashlib.blake2b(msgspec.msgpack.encode(thing), digest_size=16)
        self.count += 1
        self.digest = (self.digest + int.from_bytes(hashed.digest(), "big")) % 2**128

    def __str__(self) -> str:
        return f"{self.digest:032x}"


class Checksums(msgspec.Struct):
    """What a ledger holds of one pipeline, kind by kind."""

    keys: Checksum = msgspec.field(default_factory=Checksum)
    letters: Checksum = msgspec.field(default_factory=Checksum)
    lines: Checksum = msgspec.field(default_factory=Checksum)

    def add(self, page: TransferPage) -> None:
        """Lines are told in the order in which they were written, so their place counts too."""
        for key, entry in page.entries:
            self.keys.add(key, entry)
        for at, letter in page.dead_letters:
            self.letters.add(at, letter)
        for line in page.records:
            if line.what != COPIED:
                self.lines.add(self.lines.count, line)

    def difference(self, other: "Checksums") -> str:
        """In which kind another ledger differs first, in words; empty if it does not."""
        for mine, theirs, noun in (
            (self.keys, other.keys, "keys"),
            (self.letters, other.letters, "dead letters"),
            (self.lines, other.lines, "lines of history"),
        ):
            if mine.count != theirs.count:
                return f"{theirs.count:,} {noun} instead of {mine.count:,}"
            if mine != theirs:
                return f"{mine.count:,} {noun}, and some of them are different"
        return ""


class TargetState(enum.StrEnum):
    """What a target holds before the copy."""

    NOTHING = "nothing"
    UNFINISHED = "unfinished"
    """A copy from the same ledger was cut off."""
    SAME = "same"
    OTHER = "other"


class Plan(msgspec.Struct, frozen=True):
    """What there is to do."""

    pipeline: str
    found: TargetState
    counts: LedgerCounts
    controls: Controls
    """Of the source."""
    since: float
    """By the clock of the source: what was charged for a rate before is over."""
    shift_s: float
    """By how much the clock of the target is ahead."""
    difference: str = ""
    """How what the target holds differs, in words."""


async def resting(pipeline: str, handle: LedgerHandle) -> Controls:
    """What is set for a pipeline that is to be copied from a ledger. Nobody may work on it."""
    controls: Controls = await handle.ledger.control_store.controls()
    if _mark_of(controls) is not None:
        raise AdminError(
            f"{handle.name} holds a copy of pipeline {pipeline!r} that was cut off; copy from the ledger that is whole"
        )
    if not controls.is_paused:
        raise AdminError(
            f"pipeline {pipeline!r} is not paused in {handle.name}, so a worker could change it meanwhile; "
            f"first {_pausing(pipeline)}"
        )
    await _check_claims(pipeline, handle)
    return controls


async def _check_claims(pipeline: str, handle: LedgerHandle) -> None:
    if held := await handle.ledger.control_store.held("", 1):
        entry = await handle.ledger.admin.inspect(held[0]) or EMPTY
        raise AdminError(
            f"{held[0]!r} of pipeline {pipeline!r} is still held by {entry.owner} in {handle.name}; "
            f"wait for it with {_pausing(pipeline)}"
        )


def _pausing(pipeline: str) -> str:
    return f"keywise pause --all --wait --pipeline {shlex.quote(pipeline)}"


class LedgerCopy:
    """One pipeline on its way from one ledger to another."""

    def __init__(
        self, pipeline: str, source: LedgerHandle, target: LedgerHandle, report: Callable[[str, int], None]
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._target = target
        self._report = report
        """Called with what is done now, and how many keys and letters are through."""

    async def plan(self) -> Plan:
        """Look at both sides, and refuse what cannot be copied. Nothing is changed."""
        controls = await resting(self._pipeline, self._source)
        counts, since = await self._source.ledger.admin.counts(), await self._source.ledger.admin.now()
        ahead_s = await self._target.ledger.admin.now() - since
        shift_s = 0.0 if abs(ahead_s) < SAME_CLOCK_S else float(math.ceil(ahead_s))
        plan = Plan(self._pipeline, TargetState.NOTHING, counts, controls, since, shift_s)
        there = await self._target.ledger.control_store.controls()
        if (mark := _mark_of(there)) is not None:
            if mark.why == self._why:
                return replace(plan, found=TargetState.UNFINISHED)
            return replace(plan, found=TargetState.OTHER, difference=f"a copy that was cut off: {mark.why}")
        if there == PLAIN and await self._is_empty():
            return plan
        shift_s = _shift_of(controls, there, plan.shift_s)
        mine = await self._checksummed(self._source, "comparing", since, shift_s)
        theirs = await self._checksummed(self._target, "comparing", since + shift_s)
        difference = mine.difference(theirs) or await self._miscount()
        return replace(plan, found=TargetState.OTHER if difference else TargetState.SAME, difference=difference)

    async def check_replaceable(self) -> None:
        """Refuse to replace what is worked with."""
        controls = await self._target.ledger.control_store.controls()
        if not controls.is_paused and _mark_of(controls) is None:
            raise AdminError(
                f"pipeline {self._pipeline!r} is not paused in {self._target.name}, so it may be in use; "
                f"if it is not, pause it there first: {_pausing(self._pipeline)}"
            )
        await _check_claims(self._pipeline, self._target)

    async def run(self, plan: Plan, audit_note: AuditNote) -> Checksums:
        """Copy everything and compare both sides. What the target holds is replaced."""
        target, before = self._target.ledger, await self._target.ledger.control_store.controls()
        there = shifted_controls(plan.controls, plan.shift_s)
        mark = Pause(UNFINISHED, True, await target.admin.now(), storable(audit_note.who), self._why)
        await target.transfer.set_controls(replace(there, pauses=(*there.pauses, mark)))
        await self._refuse_itself(before)
        if plan.found is not TargetState.NOTHING:
            await target.transfer.clear()
        if not await self._is_empty():
            await target.transfer.set_controls(before)
            raise AdminError(f"{self._target.name} is being worked with; stop its workers, and run it again")
        # A store that compares tokens has seen those of the source.
        await target.transfer.tokens_above(await self._source.ledger.transfer.tokens_above(0))
        copied = await self._copied(plan)
        await self._verify(plan, copied)
        figures = f"{copied.keys.count:,} keys, {copied.letters.count:,} dead letters"
        await self._record(self._target, f"from {self._source.name}: {figures}", audit_note)
        await target.transfer.set_controls(there)
        await self._record(self._source, f"to {self._target.name}: {figures}", audit_note)
        return copied

    async def _refuse_itself(self, before: Controls) -> None:
        """One ledger may have two names. Then the mark of the target is found in the source, which had none."""
        if _mark_of(await self._source.ledger.control_store.controls()) is not None:
            await self._target.ledger.transfer.set_controls(before)
            raise AdminError(
                f"{self._source.name} and {self._target.name} are the same ledger; nothing was changed, "
                "name another one to copy to"
            )

    @property
    def _why(self) -> str:
        return storable(f"keywise ledger copy from {self._source.name} is not finished")

    async def _copied(self, plan: Plan) -> Checksums:
        checksums = Checksums()
        async for page in _pages(self._source):
            there = carried(page, plan.since, plan.shift_s)
            await self._target.ledger.transfer.add(there)
            checksums.add(there)
            self._report("copying", checksums.keys.count + checksums.letters.count)
        return checksums

    async def _verify(self, plan: Plan, copied: Checksums) -> None:
        arrived = await self._checksummed(self._target, "checking the copy", plan.since + plan.shift_s)
        if difference := copied.difference(arrived):
            raise AdminError(
                f"{self._target.name} does not hold what was copied to it: {difference}; "
                f"stop whatever works on it, and run it again; pipeline {self._pipeline!r} stays paused there"
            )
        left = await self._checksummed(self._source, "checking the original", plan.since, plan.shift_s)
        difference = copied.difference(left)
        if difference or await resting(self._pipeline, self._source) != plan.controls:
            raise AdminError(
                f"{self._source.name} was changed while it was copied ({difference or 'its pauses'}); "
                f"stop its workers, and run it again; pipeline {self._pipeline!r} stays paused in {self._target.name}"
            )
        if miscount := await self._miscount():
            raise AdminError(
                f"not everything that {self._source.name} counts was told to {self._target.name} ({miscount}), "
                f"by a mistake of one of their adapters; pipeline {self._pipeline!r} stays paused there"
            )

    async def _miscount(self) -> str:
        """What both ledgers count by themselves, where it differs: what one of them has not told is missed here."""
        mine, theirs = [await handle.ledger.admin.counts() for handle in (self._source, self._target)]
        for noun, count, expected in (
            ("keys", theirs.keys, mine.keys),
            ("tombstones", theirs.tombstones, mine.tombstones),
            ("suspects", theirs.suspects, mine.suspects),
            ("dead", theirs.dead, mine.dead),
        ):
            if count != expected:
                return f"{noun}: {count:,} instead of {expected:,}"
        return ""

    async def _checksummed(self, handle: LedgerHandle, what: str, since: float, shift_s: float = 0.0) -> Checksums:
        checksums = Checksums()
        async for page in _pages(handle):
            checksums.add(carried(page, since, shift_s))
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
        await handle.ledger.history_store.record(
            [HistoryRecord(at, COPIED, detail=detail, by=storable(audit_note.who))]
        )


async def _pages(handle: LedgerHandle) -> AsyncIterator[TransferPage]:
    """All of a scope, one part after another."""
    cursor = ""
    while True:
        page = await handle.ledger.transfer.page(cursor, PAGE_MAX)
        yield page
        cursor = page.cursor
        if not cursor:
            return


def _mark_of(controls: Controls) -> Pause | None:
    """The pause of an unfinished copy, if there is one."""
    return next((one for one in controls.pauses if one.is_pattern and one.keys == UNFINISHED), None)


def _shift_of(mine: Controls, theirs: Controls, otherwise_s: float) -> float:
    """By how much moments were moved when what is set was copied: the clocks may be a little further apart by now."""
    moments = {replace(pause, at=0.0): pause.at for pause in mine.pauses}
    apart_s = [pause.at - moments[same] for pause in theirs.pauses if (same := replace(pause, at=0.0)) in moments]
    return float(round(apart_s[0])) if apart_s else otherwise_s


def carried(page: TransferPage, since: float, shift_s: float) -> TransferPage:
    """A part as any other ledger keeps it: in whole seconds where only they are kept, on a clock that is ahead."""
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
    """What is set, on a clock that is ahead."""
    resync_at = controls.resync_at + shift_s if controls.resync_at else 0.0
    pauses = tuple(replace(pause, at=pause.at + shift_s) for pause in controls.pauses)
    return replace(controls, pauses=pauses, resync_at=resync_at)


def _text(text: str) -> str:
    """Not every store has NUL in its texts."""
    return text.replace("\0", "\ufffd")
