"""CSV as RFC 4180 has it: a header, fields in quotes where needed, and quotes doubled inside of them."""

import functools
import itertools
import re
from collections.abc import Sequence

from keywise.core.errors import ObjectError, SettingsError
from keywise.ingest.formats.rows import LineFraming

QUOTE = b'"'
HEADER_SHOWN = 100
"""The most characters of a header that an error shows."""


class CsvFormat:
    """Every row is a record with the columns of the header; empty lines are no records."""

    name = "csv"
    has_header = True

    def __init__(self, delimiter: str = ",", columns: Sequence[str] | None = None) -> None:
        """`columns` are all names that the header must have, in any order; None accepts every header."""
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise SettingsError(f'delimiter={delimiter!r} must be one ASCII character, and neither " nor a line end')
        self._delimiter = delimiter.encode()
        self._columns = None if columns is None else tuple(columns)
        self._stored: tuple[str, ...] = ()

    def storing(self, columns: Sequence[str]) -> "CsvFormat":
        """Return this format for a table that stores these columns: a header without one of them is refused."""
        storing = CsvFormat(self._delimiter.decode(), self._columns)
        storing._stored = tuple(columns)
        return storing

    def framing(self) -> "QuotedFraming":
        return QuotedFraming()

    def check_header(self, header: str) -> None:
        names = self._names(header)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ObjectError(f"the CSV header has the columns {', '.join(twice)} twice; rename them in the object")
        if lacking := [name for name in self._stored if name not in names]:
            raise ObjectError(
                f"the CSV header {_shortened(header)!r} lacks {', '.join(lacking)}, which the table stores; "
                "upload the object with these columns, or change the delimiter or columns= of the sink"
            )
        if self._columns is None or set(names) == set(self._columns):
            return
        missing = [name for name in self._columns if name not in names]
        unknown = [name for name in names if name not in self._columns]
        parts = [f"{what}: {', '.join(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        raise ObjectError(
            f"the CSV header has other columns than this pipeline expects ({'; '.join(parts)}); "
            "upload the object with these columns, or change columns= of the pipeline"
        )

    def is_blank(self, row: bytes) -> bool:
        return not row

    def are_good(self, rows: Sequence[bytes], header: str) -> bool:
        delimiter, columns = self._delimiter, len(self._names(header))
        if QUOTE not in b"".join(rows):
            return set(map(bytes.count, rows, itertools.repeat(delimiter))) <= {columns - 1}
        return all(map(_row_pattern(delimiter, columns).fullmatch, rows))

    def fault(self, row: bytes, header: str) -> str:
        expected = len(self._names(header))
        if QUOTE not in row:
            found = row.count(self._delimiter) + 1
        else:
            try:
                found = len(split_fields(row, self._delimiter))
            except ValueError as error:
                return str(error)
        return "" if found == expected else f"{found} columns, and the header has {expected}"

    def decode(self, record: bytes, header: str) -> dict[str, str]:
        fields = [field.decode() for field in split_fields(record, self._delimiter)]
        return dict(zip(self._names(header), fields, strict=True))

    def _names(self, header: str) -> tuple[str, ...]:
        return _column_names(header, self._delimiter)


def _shortened(header: str) -> str:
    return header if len(header) <= HEADER_SHOWN else f"{header[: HEADER_SHOWN - 1]}…"


class QuotedFraming:
    """A record ends at a newline with an even number of quotes before it."""

    def __init__(self) -> None:
        self._seen = 0
        self._is_quoted = False

    def find_end(self, content: bytes, least: int) -> int:
        while True:
            if self._is_quoted:
                closing = content.find(QUOTE, self._seen)
                self._seen = len(content) if closing < 0 else closing + 1
                if closing < 0:
                    return 0
                self._is_quoted = False
            newline = content.find(b"\n", max(least - 1, self._seen))
            end = len(content) if newline < 0 else newline
            self._is_quoted = bool(content.count(QUOTE, self._seen, end) % 2)
            self._seen = end if newline < 0 else newline + 1
            if newline < 0:
                return 0
            if not self._is_quoted:
                return newline + 1

    def tail(self, content: bytes) -> int:
        rows = self.split(content)
        is_over = not rows or (content.endswith(b"\n") and rows[-1].count(QUOTE) % 2 == 0)
        return len(content) if is_over else len(content) - len(rows[-1])

    def carry(self) -> None:
        self._seen = 0

    def is_open(self, content: bytes) -> bool:
        return self._is_quoted != bool(content.count(QUOTE, self._seen) % 2)

    def split(self, content: bytes) -> list[bytes]:
        lines = LineFraming().split(content)
        if QUOTE not in content:
            return lines
        rows: list[bytes] = []
        opened: list[bytes] = []
        for line in lines:
            is_odd = QUOTE in line and line.count(QUOTE) % 2
            if opened:
                opened.append(line)
                if is_odd:
                    rows.append(b"\n".join(opened))
                    opened = []
            elif is_odd:
                opened = [line]
            else:
                rows.append(line)
        if opened:
            # The newline that ends the content is inside of the quotes too.
            rows.append(b"\n".join(opened) + (b"\n" if content.endswith(b"\n") else b""))
        return rows


@functools.lru_cache(maxsize=16)
def _row_pattern(delimiter: bytes, columns: int) -> re.Pattern[bytes]:
    """A row with so many columns. It never goes back, so it takes as long as the row is."""
    delimiter = re.escape(delimiter)
    field = rb'(?>"[^"]*+(?:""[^"]*+)*+"|[^"' + delimiter + rb"]*+)"
    return re.compile(field + b"(?>" + delimiter + field + b"){%d}" % (columns - 1))


@functools.lru_cache(maxsize=16)
def _column_names(header: str, delimiter: bytes) -> tuple[str, ...]:
    """Every record is decoded with the same header."""
    try:
        return tuple(field.decode() for field in split_fields(header.encode(), delimiter))
    except ValueError as error:
        raise ObjectError(f"the CSV header cannot be read: {error}; correct the object") from error


def split_fields(row: bytes, delimiter: bytes) -> list[bytes]:
    """Return the fields of a row without their quotes. A quote in the wrong place raises `ValueError`."""
    if QUOTE not in row:
        return row.split(delimiter)
    fields, at = [], 0
    while True:
        if row[at : at + 1] == QUOTE:
            end = _closing_quote(row, at)
            fields.append(row[at + 1 : end].replace(b'""', b'"'))
            at = end + 1
            if at < len(row) and row[at : at + 1] != delimiter:
                raise ValueError(f"something follows a closing quote, at byte {at} of the row")
        else:
            end = row.find(delimiter, at)
            end = len(row) if end < 0 else end
            if QUOTE in row[at:end]:
                raise ValueError(f"a quote is inside a field that is not quoted, behind byte {at} of the row")
            fields.append(row[at:end])
            at = end
        if at >= len(row):
            return fields
        at += 1


def _closing_quote(row: bytes, at: int) -> int:
    end = row.find(QUOTE, at + 1)
    while end >= 0 and row[end + 1 : end + 2] == QUOTE:
        end = row.find(QUOTE, end + 2)
    if end < 0:
        raise ValueError(f"the quote at byte {at} of the row is not closed")
    return end
