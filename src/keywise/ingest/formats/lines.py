"""Text lines and JSON lines."""

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

from keywise.ingest.formats.rows import LineFraming

_validate = msgspec.json.Decoder(msgspec.Raw).decode
"""Checks JSON without making values of it."""


class LinesFormat:
    """Every line is a record, an empty one too."""

    name = "lines"
    has_header = False

    def framing(self) -> LineFraming:
        return LineFraming()

    def check_header(self, header: str) -> None:
        pass

    def is_blank(self, row: bytes) -> bool:
        return False

    def are_good(self, rows: Sequence[bytes], header: str) -> bool:
        return True

    def fault(self, row: bytes, header: str) -> str:
        return ""

    def decode(self, record: bytes, header: str) -> str:
        return record.decode()


class NdjsonFormat:
    """Every line is a JSON value; blank lines are no records."""

    name = "ndjson"
    has_header = False

    def framing(self) -> LineFraming:
        return LineFraming()

    def check_header(self, header: str) -> None:
        pass

    def is_blank(self, row: bytes) -> bool:
        return not row or row.isspace()

    def are_good(self, rows: Sequence[bytes], header: str) -> bool:
        try:
            collections.deque(map(_validate, rows), maxlen=0)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def fault(self, row: bytes, header: str) -> str:
        try:
            _validate(row)
        except (msgspec.DecodeError, RecursionError) as error:
            return str(error)
        return ""

    def decode(self, record: bytes, header: str) -> Any:
        return msgspec.json.decode(record)
