"""A portion of an object: the records that are written at one time, and what the ledger stores with them."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, Commit, Position
from keywise.core.errors import ObjectError
from keywise.core.record import Record
from keywise.ingest.object_note import ContentNote, ObjectNote
from keywise.ingest.parts import PartSettings
from keywise.ingest.records import RecordMaker


class PortionState(enum.Enum):
    """What became of a portion."""

    OPEN = enum.auto()
    """It is not written."""
    WRITTEN = enum.auto()
    """The object goes on behind it, or records behind its end are left."""
    COMMITTED = enum.auto()
    """It was the last, and the mark is raised."""
    LOST = enum.auto()
    """It was the last, and the ledger refused the commit: another worker has the key."""


@dataclass(slots=True, kw_only=True)
class Portion:
    """Some records of one object under its claim. The last one may have none, and ends the object."""

    claim: Claim
    maker: RecordMaker
    sent_at: float
    records: Sequence[Record[Any]]
    letters: list[DeadLetter]
    """Of records that cannot be read, and later of those that the sink refuses."""
    start: Position
    place: int
    """The place behind the portion."""
    note: ObjectNote
    """How to go on behind the portion."""
    content: ContentNote | None = None
    """Set if the portion is the last: what the sink holds of the object after it, refused records left out."""
    tail: int | None = None
    """Set if the sink has to delete the records of the object with this ordinal and above."""
    former: int | None = None
    """Ordinals below this may have records of an earlier content in the sink; None if that is not known."""
    reserves: bool = False
    """Whether the ledger keeps how many records the sink may hold, because the sink does not find them by itself."""
    repairs: bool = False
    """The object is read as a whole after its last suspicious write."""
    state: PortionState = PortionState.OPEN

    @property
    def size(self) -> int:
        """How many bytes its records have."""
        return sum(len(record.body) for record in self.records)

    def has_former(self, ordinal: int) -> bool:
        """Whether a record that is not written leaves one of an earlier content, which has to be deleted."""
        return self.former is None or ordinal < self.former

    def refuse(self, record: Record[Any], cause: str, traceback: str = "") -> None:
        """The sink will never take a record: it becomes a dead letter."""
        order = self.claim.order
        assert order is not None, "records are written at an order"
        self.letters.append(self.maker.refused_letter(record, cause, order, self.sent_at, traceback))
        self.note = replace(self.note, refused=self.note.refused + 1)

    def check_refused(self, settings: PartSettings) -> None:
        """Raise `ObjectError` if the sink has refused too many records of the object."""
        refused = self.note.refused
        share = refused / max(self.place, 1)
        if refused >= settings.bad_records_min and share > settings.bad_share_max:
            raise ObjectError(
                f"the sink refused {refused} of the first {self.place} records, and a share of "
                f"{settings.bad_share_max:g} may be bad (bad_share_max); the last cause was: {self.letters[-1].cause}"
            )

    @property
    def advance(self) -> Advance:
        """Keep the position behind the portion, in the transaction that writes its records."""
        return Advance(self.claim, Position(self.place, self.note.encode()), self.place if self.reserves else 0)

    @property
    def reservation(self) -> Advance:
        """Keep the position before the portion, and reserve the ordinals that the next calls write."""
        return Advance(self.claim, self.start, self.place)

    def commit(self, *, overdue: bool = False) -> Commit:
        assert self.content is not None, "only the last portion is committed"
        claim = replace(self.claim, deleted=not self.content.etag)
        content = replace(self.content, bad=self.content.bad + self.note.refused)
        extent = content.records if self.reserves else None
        return Commit(claim, overdue, extent, content.encode(), self.repairs)
