"""The values that reading an object yields: parts, bad records, and the note with which reading resumes."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import msgspec

from keywise.core.errors import ObjectError, SettingsError

NOTE_MAX_BYTES = 8 * 1024
"""The most that the ledger keeps with a position."""
UPLOAD_AGAIN = (
    "upload it again, and if no newer version is announced then, read it with keywise dead replay or keywise objects "
    "backfill"
)
"""What to do about an object that cannot be read."""
HEAD_BYTES = 64 * 1024
"""How much of a bad record is kept."""
HEADER_MAX_BYTES = 7 * 1024
"""The longest header of a CSV file: it is a part of the note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """How objects are cut into parts; the defaults suit most."""

    part_bytes: int = 4 * 1024 * 1024
    """A part ends with the record that reaches so many bytes, after decompression."""
    part_records: int = 10_000
    """The most lines of one part."""
    record_max: int = 8 * 1024 * 1024
    """A record of more bytes is a bad record."""
    object_max: int = 64 * 1024 * 1024
    """The most bytes of an object, after decompression, whose format needs the whole object at once."""
    bad_share_max: float = 0.01
    """Reading stops if the share of bad records is higher."""
    bad_records_min: int = 10
    """Reading does not stop for fewer bad records."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = field.type in (int, "int")
            if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float) or value < 0:
                raise SettingsError(f"{field.name}={value!r} must be a {'whole ' if is_whole else ''}number above zero")
            if value == 0 and is_whole:
                raise SettingsError(f"{field.name}={value!r} must be above zero")
        if self.bad_share_max > 1:
            raise SettingsError(f"bad_share_max={self.bad_share_max} is a share; write a number from 0 to 1")


class BadRecord(msgspec.Struct, frozen=True):
    """A record that cannot be used; the rest of its object can."""

    ordinal: int
    offset: int
    """Its first byte in the object, after decompression."""
    length: int
    head: bytes
    """Its first 64 KiB."""
    reason: str


class Part(msgspec.Struct, frozen=True):
    """Some records of an object, in their order, and the position behind them.

    Parts are a function of the content and the settings only, so a part that is read again is the same part.
    """

    first: int
    """The ordinal of its first record; records of an object are counted from 0, bad ones too."""
    records: list[bytes]
    """The good records, as bytes of the object."""
    bad: list[BadRecord]
    place: int
    """The ordinal of the first record behind this part."""
    note: bytes
    """What reading needs to go on at `place`; at most 8 KiB."""
    is_last: bool
    """Each object has one last part. It may have no records."""

    @property
    def count(self) -> int:
        """How many records it has, bad ones included."""
        return self.place - self.first

    def ordinals(self) -> Iterator[int]:
        """Yield the ordinal of each good record."""
        bad = {record.ordinal for record in self.bad}
        return (ordinal for ordinal in range(self.first, self.place) if ordinal not in bad)


class ReadNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where to go on in an object, and how it is cut."""

    etag: str
    format: str
    part_bytes: int
    part_records: int
    record_max: int
    start: int = 0
    """The byte of the object to read from: the next record, or the last compressed member that begins before it."""
    skip: int = 0
    """How many decompressed bytes to drop behind `start`."""
    offset: int = 0
    """The decompressed bytes before the next record."""
    block: int = 0
    """How many bytes before `offset` the cut begins, of which this part is not the last one."""
    bad: int = 0
    """How many bad records came before."""
    compression: str = ""
    header: str = ""
    """The header of a CSV file."""

    @property
    def at_start(self) -> "ReadNote":
        """The note with which the same content is read from its beginning."""
        return ReadNote(
            self.etag,
            self.format,
            self.part_bytes,
            self.part_records,
            self.record_max,
            compression=self.compression,
        )

    def encode(self) -> bytes:
        note = msgspec.json.encode(self)
        if len(note) > NOTE_MAX_BYTES:
            raise ObjectError(
                f"the note about reading this object would have {len(note)} bytes, and {NOTE_MAX_BYTES} is the most; "
                "shorten the header of the CSV file"
            )
        return note


def decode_note(note: bytes) -> ReadNote:
    """Read a note that `Part.note` was. Any other text is refused."""
    try:
        return msgspec.json.decode(note, type=ReadNote)
    except msgspec.MsgspecError as error:
        raise ObjectError(
            f"the position of this object has a note that cannot be read ({error}); read the object from its start"
        ) from error
