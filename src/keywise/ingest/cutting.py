"""Cuts the content of an object into parts; the cuts depend on the content and the settings, never on the chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from keywise.core.errors import ObjectError
from keywise.ingest.formats.rows import RowFormat
from keywise.ingest.formats.whole import WholeFormat
from keywise.ingest.parts import HEAD_BYTES, HEADER_MAX_BYTES, UPLOAD_AGAIN, BadRecord, PartSettings

UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Cut(msgspec.Struct, frozen=True):
    """The records of one part, and where the next part begins."""

    first: int
    records: list[bytes]
    bad: list[BadRecord]
    end: "CutPlace"


class CutPlace(msgspec.Struct, frozen=True):
    """Where the content is cut: all that is needed to cut the rest."""

    place: int = 0
    """How many records came before."""
    offset: int = 0
    """How many bytes came before."""
    block: int = 0
    """Where the block begins that `offset` is in. Blocks are cut by their bytes, and parts of a block by their rows."""
    bad: int = 0
    header: str = ""


@dataclass(slots=True)
class _LongRecord:
    """A record above the limit, of which only the head is in memory."""

    head: bytes
    length: int


class Cutter(Protocol):
    """Cuts content that comes in chunks."""

    def feed(self, chunk: bytes) -> Iterator[Cut]:
        """Take more content, and yield the parts that it completes. None of them is the last one."""

    def finish(self) -> Iterator[Cut]:
        """Yield the rest. The last part of all is the last one of the object; it may be empty."""


class RowCutter:
    """Cuts content whose records end with newlines.

    A block is as short as possible, but has `part_bytes` and ends with a record. Its rows make one part, or several of
    `part_records` rows. Both can be found again from the place behind any part.
    """

    def __init__(self, row_format: RowFormat, settings: PartSettings, start: CutPlace) -> None:
        self._format = row_format
        self._settings = settings
        self._framing = row_format.framing()
        self._at = start
        self._chunks: list[bytes] = []
        self._size = 0
        self._look_at = 0
        self._rows = b""
        """The complete rows before a long record."""
        self._long: _LongRecord | None = None
        self._held: Cut | None = None

    def feed(self, chunk: bytes) -> Iterator[Cut]:
        if not chunk:
            return
        if self._held:
            held, self._held = self._held, None
            yield held
        if self._long:
            end = self._count_long(self._long, chunk)
            if not end:
                return
            chunk = chunk[end:]
            yield from self._release(self._cut_block(b"", self._long_end() + 1), is_more=bool(chunk))
        self._add(chunk)
        yield from self._complete_blocks()

    def finish(self) -> Iterator[Cut]:
        self._look_at = 0
        yield from self._complete_blocks()
        if self._held:
            yield self._held
            return
        content = self._joined()
        if self._framing.is_open(content):
            tail = len(self._rows) if self._long else self._framing.tail(content)
            raise ObjectError(
                f"the object ends inside a quoted field, in the record that begins at byte {self._at.offset + tail}; "
                f"a quote is not closed there, or the object is truncated: correct it; {UPLOAD_AGAIN}"
            )
        yield from self._cut_block(content, self._long_end() + len(content))

    def _add(self, chunk: bytes) -> None:
        if chunk:
            self._chunks.append(chunk)
            self._size += len(chunk)

    def _joined(self) -> bytes:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    def _complete_blocks(self) -> Iterator[Cut]:
        while not self._long and self._size >= max(self._least, self._look_at):
            content = self._joined()
            end = self._framing.find_end(content, self._least)
            if end:
                self._drop(content, end)
                yield from self._release(self._cut_block(content[:end], self._at.offset + end), is_more=self._size > 0)
            elif self._size > self._least + self._settings.record_max:
                self._begin_long(content)
            else:
                # Joining costs a copy of everything, so it has to pay.
                self._look_at = self._size + self._settings.part_bytes // 4
                return

    @property
    def _least(self) -> int:
        """How many bytes of content the block needs yet; at least one."""
        return max(self._at.block + self._settings.part_bytes - self._at.offset, 1)

    def _drop(self, content: bytes, end: int) -> None:
        self._chunks = [content[end:]] if end < len(content) else []
        self._size = len(content) - end
        self._look_at = 0
        self._framing = self._format.framing()

    def _release(self, cuts: Iterator[Cut], *, is_more: bool) -> Iterator[Cut]:
        """Yield cuts, but hold the last one if no content is known behind it: it may be the last of all."""
        for cut in cuts:
            if self._held:
                yield self._held
            self._held = cut
        if self._held and is_more:
            held, self._held = self._held, None
            yield held

    def _begin_long(self, content: bytes) -> None:
        """Keep the complete rows and the head of the record that is too long, and only count the rest of it."""
        tail = self._framing.tail(content)
        self._rows = content[:tail]
        self._long = _LongRecord(content[tail : tail + HEAD_BYTES], len(content) - tail)
        self._chunks, self._size = [], 0
        self._framing.carry()

    def _count_long(self, long: _LongRecord, chunk: bytes) -> int:
        """Count a chunk as a part of the long record; return where the record ends in it, or 0."""
        end = self._framing.find_end(chunk, 0)
        more = chunk[: end - 1] if end else chunk
        long.head += more[: HEAD_BYTES - len(long.head)]
        long.length += len(more)
        if end:
            self._framing = self._format.framing()
        else:
            self._framing.carry()
        return end

    def _long_end(self) -> int:
        """The offset behind the bytes of the long record that were counted."""
        return self._at.offset + len(self._rows) + (self._long.length if self._long else 0)

    def _cut_block(self, content: bytes, end: int) -> Iterator[Cut]:
        """Cut one block into parts. `end` is the offset behind it."""
        long, content = self._long, self._rows + content
        self._long, self._rows = None, b""
        rows = self._framing.split(content) if content else []
        if long:
            rows.append(long.head)
        is_clean = not long and len(content) <= self._settings.record_max and _is_utf8(content)
        has_returns = b"\r" in content or long is not None
        step = self._settings.part_records
        for at in range(0, max(len(rows), 1), step):
            some = rows[at : at + step]
            is_tail = at + step >= len(rows)
            offset = end if is_tail else self._at.offset + sum(map(len, some)) + len(some)
            block = end if is_tail else self._at.block
            yield self._cut(_Rows(some, is_clean, has_returns, long if is_tail else None), offset, block)

    def _cut(self, rows: "_Rows", offset: int, block: int) -> Cut:
        contents = rows.contents()
        start = self._at
        if start.offset == 0 and contents:
            contents[0] = _without_mark(contents[0])
        header = start.header
        has_blanks = self._format.is_blank(b"") and not all(contents)
        needs_header = self._format.has_header and not header
        is_plain = rows.is_clean and not has_blanks and not needs_header
        records, bad, place = contents, list[BadRecord](), start.place + len(contents)
        if not is_plain or not self._format.are_good(contents, header):
            records, bad, place, header = self._judge(rows, contents)
        self._at = CutPlace(place, offset, block, start.bad + len(bad), header)
        check_share(self._at, self._settings)
        return Cut(start.place, records, bad, self._at)

    def _judge(self, rows: "_Rows", contents: list[bytes]) -> tuple[list[bytes], list[BadRecord], int, str]:
        """Look at rows one by one. Return the good records, the bad ones, the next ordinal and the header."""
        records: list[bytes] = []
        bad: list[BadRecord] = []
        place, offset, header = self._at.place, self._at.offset, self._at.header
        for number, content in enumerate(contents):
            length = rows.length(number)
            # Of a long record only the head may be in memory, so nothing but its length is judged.
            if length > self._settings.record_max or not self._format.is_blank(content):
                if self._format.has_header and not header:
                    header = self._header(content, length)
                else:
                    if reason := self._fault(content, length, header):
                        bad.append(BadRecord(place, offset, length, rows.rows[number][:HEAD_BYTES], reason))
                    else:
                        records.append(content)
                    place += 1
            offset += length + 1
        return records, bad, place, header

    def _fault(self, content: bytes, length: int, header: str) -> str:
        if length > self._settings.record_max:
            return too_long(length, self._settings)
        if not _is_utf8(content):
            return "not UTF-8"
        return self._format.fault(content, header)

    def _header(self, content: bytes, length: int) -> str:
        if length > HEADER_MAX_BYTES:
            raise ObjectError(
                f"the CSV header has {length} bytes, and {HEADER_MAX_BYTES} is the most; shorten it, or use ndjson"
            )
        if not _is_utf8(content):
            raise ObjectError("the CSV header is not UTF-8; convert the object to UTF-8")
        header = content.decode()
        self._format.check_header(header)
        return header


class WholeCutter:
    """Cuts the records of a format that needs the whole content at once, by their bytes and their number."""

    def __init__(self, whole_format: WholeFormat, settings: PartSettings, start: CutPlace) -> None:
        self._format = whole_format
        self._settings = settings
        self._start = start
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Cut]:
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > self._settings.object_max:
            raise ObjectError(
                f"the content has more than object_max={self._settings.object_max} bytes, and the format "
                f"{self._format.name} needs all of it in memory; raise object_max, or use ndjson"
            )
        return iter(())

    def finish(self) -> Iterator[Cut]:
        end, is_any = self._start, False
        for cut in self._cuts():
            end = cut.end
            if end.place > self._start.place:
                is_any = True
                yield cut
        if not is_any:
            yield Cut(end.place, [], [], end)

    def _cuts(self) -> Iterator[Cut]:
        """Yield the parts from the first one on, those that were read before too."""
        at, size = CutPlace(), 0
        records: list[bytes] = []
        bad: list[BadRecord] = []
        content, self._chunks = b"".join(self._chunks), []
        for record in self._format.records(content):
            if len(record) > self._settings.record_max:
                ordinal, reason = at.place + len(records) + len(bad), too_long(len(record), self._settings)
                bad.append(BadRecord(ordinal, 0, len(record), record[:HEAD_BYTES], reason))
            else:
                records.append(record)
            size += len(record)
            if size >= self._settings.part_bytes or len(records) + len(bad) >= self._settings.part_records:
                cut = self._cut(at, records, bad)
                yield cut
                at, size, records, bad = cut.end, 0, [], []
        yield self._cut(at, records, bad)

    def _cut(self, at: CutPlace, records: list[bytes], bad: list[BadRecord]) -> Cut:
        end = CutPlace(at.place + len(records) + len(bad), bad=at.bad + len(bad))
        check_share(end, self._settings)
        return Cut(at.place, records, bad, end)


def too_long(length: int, settings: PartSettings) -> str:
    return f"{length} bytes, above record_max={settings.record_max}"


def check_share(at: CutPlace, settings: PartSettings) -> None:
    """Raise `ObjectError` if too many of the records so far are bad."""
    if at.bad >= settings.bad_records_min and at.bad / at.place > settings.bad_share_max:
        raise ObjectError(
            f"{at.bad} of the first {at.place} records are bad, a share of {at.bad / at.place:.1%}, above "
            f"bad_share_max={settings.bad_share_max:.1%}; check the format of the object, or raise the limit"
        )


@dataclass(slots=True)
class _Rows:
    """The rows of one part."""

    rows: list[bytes]
    is_clean: bool
    """Whether all are UTF-8 and none is too long."""
    has_returns: bool
    long: _LongRecord | None
    """The last row, if it was too long to be kept."""

    def contents(self) -> list[bytes]:
        if not self.has_returns:
            return self.rows.copy()
        return [row[:-1] if row.endswith(b"\r") else row for row in self.rows]

    def length(self, number: int) -> int:
        """How many bytes a row has in the object, without its newline."""
        is_long = self.long and number == len(self.rows) - 1
        return self.long.length if self.long and is_long else len(self.rows[number])


def _is_utf8(content: bytes) -> bool:
    if content.isascii():
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _without_mark(row: bytes) -> bytes:
    """The first row of an object without its byte order mark."""
    if row.startswith(UTF16_MARKS):
        raise ObjectError("the object is UTF-16; convert it to UTF-8")
    return row.removeprefix(UTF8_MARK)
