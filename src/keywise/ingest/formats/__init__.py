"""What records are: lines, JSON lines, CSV rows, or what a function makes of a whole object.

A format says where records end and which of them are bad; `cutting.py` cuts the content into parts.
Compression is not a format: `compression.py` removes it before.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from keywise.core.errors import SettingsError
from keywise.ingest.formats.csv_rows import CsvFormat
from keywise.ingest.formats.lines import LinesFormat, NdjsonFormat
from keywise.ingest.formats.rows import RowFormat
from keywise.ingest.formats.whole import FunctionFormat, JsonArrayFormat, WholeFormat

__all__ = ["CsvFormat", "Format", "FunctionFormat", "JsonArrayFormat", "LinesFormat", "NdjsonFormat", "format_of"]

Format: TypeAlias = RowFormat | WholeFormat

_FORMATS: dict[str, Callable[[], Format]] = {
    "ndjson": NdjsonFormat,
    "lines": LinesFormat,
    "csv": CsvFormat,
    "json": JsonArrayFormat,
}


def format_of(given: str | Format | Callable[[bytes], Iterable[Any]]) -> Format:
    """Return the format with a name, a format itself, or the format that a function makes."""
    if isinstance(given, str):
        if given not in _FORMATS:
            raise SettingsError(f"format={given!r} is not known; write one of {', '.join(_FORMATS)}, or a function")
        return _FORMATS[given]()
    if isinstance(given, RowFormat | WholeFormat):
        return given
    return FunctionFormat(given)
