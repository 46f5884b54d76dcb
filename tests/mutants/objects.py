"""Variants that break one clause of the rules on objects: what is read, what is deleted, when a message is acked."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import ChangeHeader, Delivery, Order
from keywise.core.controls import Controls
from keywise.core.entry import Advance, Commit, CommitResult, Entry, LedgerPolicy
from keywise.core.record import Record
from keywise.core.sink import Grade
from keywise.ingest.announcement_source import AnnouncementSource
from keywise.ingest.object_run import ObjectRun
from keywise.ingest.parts import Part
from keywise.ingest.portion import Portion, PortionState
from keywise.ingest.portion_writers import AtomicPortionWriter, LeasedPortionWriter
from keywise.ingest.reader import ObjectReader
from keywise.ingest.records import RecordMaker
from mutants.mutant import Mutant

_advance, _commit = rules.advance, rules.commit
_look, _restart, _end = ObjectRun._look, ObjectRun._restart, AnnouncementSource._end


async def _gone_at_once(self: ObjectRun) -> Any:
    return self._deletion()


async def _deletion_is_believed(self: ObjectRun) -> Any:
    return self._deletion() if self._announcement.deleted else await _look(self)


async def _records_before_the_position_stay(self: ObjectRun, *note: Any) -> None:
    if not (note and note[0].gone_at):
        await _restart(self, *note)


def _place_stays(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    after = _advance(entry, advance, now, is_repeatable=is_repeatable)
    is_restart = entry is not None and after is not None and entry.advanced not in (None, after.advanced)
    return replace(after, position=entry.position) if is_restart else after


def _not_continued(header: ChangeHeader, entry: Entry | None, controls: Controls) -> ChangeHeader:
    return rules.in_era(header, entry, controls)


def _nothing_reserved(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    return _advance(entry, replace(advance, extent=0), now, is_repeatable=is_repeatable)


async def _no_tail(self: AtomicPortionWriter, transaction: object, portions: Sequence[Portion]) -> bool:
    return True


def _always_whole(self: ObjectRun, portion: Portion) -> bool:
    return portion.content is not None


def _nothing_former(self: Portion, ordinal: int) -> bool:
    return False


async def _kept_before_written(self: LeasedPortionWriter, portions: Sequence[Portion]) -> None:
    await self._steps.advance(portions, [one.advance for one in portions])
    with self._heartbeat.limit([one.claim for one in portions]):
        await self._apply(portions)
        await self._steps.store_letters(portions)
    for one in portions:
        one.state = PortionState.WRITTEN
    await self._steps.commit([one for one in portions if one.content is not None])


def _bad_records_not_counted(self: RecordMaker, part: Part, order: Order, reader: ObjectReader) -> list[Record[Any]]:
    return [
        Record(f"{self._prefix}{ordinal}", order, body=body, object=self.uri, ordinal=ordinal)
        for ordinal, body in enumerate(part.records, start=part.first)
    ]


async def _acked_with_the_first(self: AnnouncementSource, parts: Sequence[Delivery], delay_s: float | None) -> None:
    for part in parts:
        if (message := self._messages.get(part.message)) is not None:
            message.waiting = {part.number}
    await _end(self, parts, delay_s)


def _every_commit_repairs(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    return _commit(entry, replace(commit, repairs=True), now, policy)


OBJECTS = (
    Mutant("a missing object is gone at once", 24, ObjectRun, "_missing", _gone_at_once),
    Mutant("an announced deletion is believed", 24, ObjectRun, "_look", _deletion_is_believed, Grade.CONDITIONAL),
    Mutant("a gone object keeps what was read", 24, ObjectRun, "_restart", _records_before_the_position_stay),
    Mutant("a restart keeps the old place", 24, rules, "advance", _place_stays, Grade.CONDITIONAL),
    Mutant("a restart is not continued", 24, rules, "current", _not_continued, Grade.ATOMIC),
    Mutant("a table keeps the tail", 24, AtomicPortionWriter, "_delete_tails", _no_tail, Grade.ATOMIC),
    Mutant("a shorter object keeps the tail", 24, ObjectRun, "_is_whole", _always_whole, Grade.CONDITIONAL),
    Mutant("only a commit raises the extent", 24, rules, "advance", _nothing_reserved, Grade.CONDITIONAL),
    Mutant("a bad record keeps an older one", 24, Portion, "has_former", _nothing_former, Grade.ATOMIC),
    Mutant("a position is kept before its records", 24, LeasedPortionWriter, "write", _kept_before_written),
    Mutant("bad records are not counted", 24, RecordMaker, "of_part", _bad_records_not_counted, Grade.ATOMIC),
    Mutant("a message is acked with its first object", 24, AnnouncementSource, "_end", _acked_with_the_first),
    Mutant("every commit ends the suspicion", 24, rules, "commit", _every_commit_repairs),
)
