"""The contract of formats whose records follow each other, each ended by a newline."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class Framing(Protocol):
    """Finds the ends of records in a growing buffer that begins with a record."""

    def find_end(self, content: bytes, least: int) -> int:
        """Return the first end of a record that is at least at `least`, behind its newline; 0 if there is none yet.

        Called again with the same content and more behind it, it goes on where it was.
        """

    def tail(self, content: bytes) -> int:
        """Return where the last, unfinished record of the content begins."""

    def carry(self) -> None:
        """Expect a buffer that continues the last one."""

    def is_open(self, content: bytes) -> bool:
        """Whether the content ends inside of quotes."""

    def split(self, content: bytes) -> list[bytes]:
        """Return all records without their newlines. The last one may have none."""


@runtime_checkable
class RowFormat(Protocol):
    """One record per row. Rows come without their newline and without a carriage return before it."""

    @property
    def name(self) -> str: ...

    @property
    def has_header(self) -> bool:
        """Whether the first row names the columns."""

    def framing(self) -> Framing: ...

    def check_header(self, header: str) -> None:
        """Raise `ObjectError` for a header that cannot be used."""

    def is_blank(self, row: bytes) -> bool:
        """Whether a row is no record at all."""

    def are_good(self, rows: Sequence[bytes], header: str) -> bool:
        """Whether all rows are good records; False has them looked at one by one."""

    def fault(self, row: bytes, header: str) -> str:
        """Say what is wrong with a row; nothing if it is a good record."""

    def decode(self, record: bytes, header: str) -> Any: ...


class LineFraming:
    """A record ends at every newline."""

    def find_end(self, content: bytes, least: int) -> int:
        return content.find(b"\n", max(least - 1, 0)) + 1

    def tail(self, content: bytes) -> int:
        return content.rfind(b"\n") + 1

    def carry(self) -> None:
        pass

    def is_open(self, content: bytes) -> bool:
        return False

    def split(self, content: bytes) -> list[bytes]:
        rows = content.split(b"\n")
        if not rows[-1]:
            rows.pop()
        return rows
