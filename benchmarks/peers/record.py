"""The log of what handlers did: a file to which every process of a contender appends lines of equal size.

A line costs a handler a few microseconds, and is written whole or not at all, so processes and threads may
share the file. The clock counts from the boot of the machine and is the same for all of them.
"""

import enum
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LINE = struct.Struct("<B16sqqq")

clock_ns = time.monotonic_ns


class Kind(enum.IntEnum):
    """What a line tells."""

    WROTE = 1
    """A handler wrote a version of a key, between two moments. It counts as one settled change."""
    SKIPPED = 2
    """A handler was called, and left a version of a key alone. It counts as one settled change."""
    SETTLED = 3
    """So many changes are settled by now, in one go."""
    CALLED = 4
    """As WROTE, by a contender that tells with SETTLED what is settled."""


class Line(NamedTuple):
    """One line of the log."""

    kind: Kind
    key: bytes
    version: int
    """How many, if changes were settled in one go."""
    began_ns: int
    ended_ns: int

    @property
    def settled(self) -> int:
        """How many changes it brought to an end."""
        if self.kind in (Kind.WROTE, Kind.SKIPPED):
            return 1
        return self.version if self.kind is Kind.SETTLED else 0


class Recorder:
    """Appends lines."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: Kind, key: str, version: int, began_ns: int) -> None:
        """What ends now, and began then."""
        os.write(self._file, LINE.pack(kind, code(key), version, began_ns, clock_ns()))

    def note_all(self, kind: Kind, versions: Iterable[tuple[str, int]], began_ns: int) -> None:
        """Many that ended together."""
        now = clock_ns()
        os.write(self._file, b"".join(LINE.pack(kind, code(key), version, began_ns, now) for key, version in versions))

    def settled(self, count: int) -> None:
        os.write(self._file, LINE.pack(Kind.SETTLED, b"", count, now := clock_ns(), now))


class Reader:
    """Reads what was appended since it read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.lines: list[Line] = []
        self.settled = 0

    def read_on(self) -> int:
        """How many changes are settled by now."""
        if self._path.exists() and self._path.stat().st_size > self._read:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
            whole = len(content) - len(content) % LINE.size
            self._read += whole
            for kind, *rest in LINE.iter_unpack(content[:whole]):
                self.lines.append(line := Line(Kind(kind), *rest))
                self.settled += line.settled
        return self.settled


def code(key: str) -> bytes:
    """The keys of the workload are uuids."""
    return bytes.fromhex(key.replace("-", ""))
