"""The write-ahead journal of degraded mode: which keys were written without the ledger, one file per worker.

A key is journaled before it is written. Its record is removed only when the ledger knows that the key is suspect.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from keywise.core.change import UNVERSIONED_GENERATION, VERSION_MIN, ChangeHeader, Order
from keywise.core.errors import UnavailableError

BYTES_A_KEY = 2000
"""A file is compacted when it is larger than this many bytes for each key that it may hold."""
BYTES_MIN = 1_000_000


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line of a journal."""

    since: float = 0.0
    """When the outage began, by the wall clock; only in the first line."""
    begun: list[tuple[str, Order, bool]] = []
    """Keys that are about to be written, each with its order and whether it is deleted."""
    written: list[str] = []
    """Keys whose write has ended and may be in the sink."""
    clean: list[str] = []
    """Keys whose write has ended without an effect."""
    full: bool = False
    """More keys were written than the journal may hold: a full resync is due."""


class JournalContents(msgspec.Struct):
    """The combined state of all lines of a journal."""

    since: float = 0.0
    headers: dict[str, ChangeHeader] = {}
    """The newest order of each key that may be in the sink."""
    flying: dict[str, ChangeHeader] = {}
    """Writes that have begun and have not ended: one of them may have crashed the worker."""
    is_full: bool = False

    def add(self, line: JournalLine) -> None:
        self.since = self.since or line.since
        self.is_full = self.is_full or line.full
        for key, order, deleted in line.begun:
            self.flying[key] = ChangeHeader(key, order, deleted)
        for key in line.written:
            if (header := self.flying.pop(key, None)) is not None:
                self.headers[key] = newer(self.headers.get(key), header)
        for key in line.clean:
            self.flying.pop(key, None)

    @property
    def keys(self) -> set[str]:
        return self.headers.keys() | self.flying.keys()

    def suspects(self) -> list[ChangeHeader]:
        """Return the keys to mark as suspect. A write that has not ended counts as written."""
        return [newer(self.headers.get(key), self.flying.get(key)) for key in sorted(self.keys)]

    def covers(self, other: "JournalContents") -> bool:
        """Whether `other`, a later state of the same journal, has no further suspects."""
        return (self.suspects(), self.is_full) == (other.suspects(), other.is_full)

    def copy(self) -> "JournalContents":
        return replace(self, headers=dict(self.headers), flying=dict(self.flying))

    def lines(self) -> list[JournalLine]:
        """Return the same state in as few lines as possible."""
        headers = [
            (key, header.order, header.deleted) for key, header in self.headers.items() if header.order is not None
        ]
        flying = [
            (key, header.order, header.deleted) for key, header in self.flying.items() if header.order is not None
        ]
        return [
            JournalLine(since=self.since, begun=headers, written=[key for key, _, _ in headers], full=self.is_full),
            JournalLine(begun=flying),
        ]


def newer(one: ChangeHeader | None, other: ChangeHeader | None) -> ChangeHeader:
    """Return the newer of two headers of a key; at least one of them is not None."""
    known = [header for header in (one, other) if header is not None]
    return max(known, key=lambda header: header.order or _LOWEST)


def read(text: bytes) -> JournalContents:
    """Parse a journal. An incomplete last line is skipped: nothing was written after it.

    Any other damage may hide keys, so the journal then counts as full, and a full resync is due.
    """
    contents = JournalContents()
    *whole, _ = text.split(b"\n")
    for line in whole:
        try:
            contents.add(_DECODE(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            contents.is_full = True
    return contents


class JournalFile(Protocol):
    """A journal that is locked by this worker, as long as it lives."""

    name: str

    async def read(self) -> bytes: ...

    async def append(self, text: bytes, *, durably: bool) -> None:
        """Append lines. With `durably`, return only when they would survive a crash of the machine."""

    async def rewrite(self, text: bytes) -> None:
        """Replace the whole content, durably and atomically."""

    async def remove(self) -> None:
        """Delete the journal from the disk."""

    def close(self) -> None:
        """Release the lock; another worker may take the journal over."""


class Orphans(NamedTuple):
    """Journals of dead workers, and the errors of those that could not be opened."""

    files: Sequence[JournalFile]
    troubles: Sequence[str] = ()


class JournalStore(Protocol):
    """The storage of the journals of one pipeline."""

    async def create(self) -> JournalFile:
        """Create an empty journal."""

    async def orphans(self) -> Orphans:
        """Take over the journals of dead workers. Each journal is given to one worker only."""


class DirtyKeyJournal:
    """The journal of one worker, and the journals of dead workers that it has taken over.

    Their keys are suspect, and the ledger has yet to be informed: the worker hands them over when the ledger is back.
    """

    def __init__(self, journal_store: JournalStore, keys_max: int) -> None:
        self._journal_store = journal_store
        self._keys_max = keys_max
        self._bytes_max = max(BYTES_MIN, keys_max * BYTES_A_KEY)
        self._own: JournalFile | None = None
        self._contents = JournalContents()
        self._bytes = 0
        self._found: list[tuple[JournalFile, JournalContents]] = []
        self._outdated: list[JournalFile] = []
        """Journals that were handed over to the ledger, and have to be removed."""
        self._writing = asyncio.Lock()
        """Without it, two concurrent first notes would each create a file."""

    @property
    def is_empty(self) -> bool:
        return self._own is None and not self._found

    @property
    def is_full(self) -> bool:
        """Whether this worker has written more keys than its journal may hold."""
        return self._contents.is_full

    @property
    def withheld(self) -> set[str]:
        """Keys that may have crashed other workers."""
        return {key for _, contents in self._found for key in contents.flying}

    def pending(self) -> list[tuple[JournalFile, JournalContents]]:
        """Return the journals to hand over, each with a snapshot of its contents."""
        own = [(self._own, self._contents.copy())] if self._own is not None else []
        return [*self._found, *own]

    async def note(self, headers: Sequence[ChangeHeader], since: float) -> None:
        """Record changes that are about to be written. Raises UnavailableError if it cannot; then write nothing."""
        async with self._writing:
            await self._note(headers, since)

    async def _note(self, headers: Sequence[ChangeHeader], since: float) -> None:
        known = self._contents.keys
        new = [header for header in headers if header.key not in known]
        room = 0 if self.is_full else max(0, self._keys_max - len(known))
        left_out = {header.key for header in new[room:]}
        begun = [(header.key, _order(header), header.deleted) for header in headers if header.key not in left_out]
        line = JournalLine(begun=begun, full=bool(left_out) and not self.is_full)
        if self._own is None:
            self._own = await self._journal_store.create()
            self._contents, self._bytes = JournalContents(), 0
        if not self._contents.since:
            line.since = since
        if line != JournalLine():
            await self._append(line, durably=True)

    async def ended(self, written: Sequence[str], clean: Sequence[str]) -> None:
        """Record writes that have ended. If the record is lost, the keys only count as possibly written."""
        async with self._writing:
            await self._end(written, clean)

    async def _end(self, written: Sequence[str], clean: Sequence[str]) -> None:
        flying = self._contents.flying
        line = JournalLine(
            written=[key for key in written if key in flying], clean=[key for key in clean if key in flying]
        )
        if line == JournalLine():
            return
        await self._append(line, durably=False)
        if self._bytes > self._bytes_max and self._own is not None:
            text = b"".join(map(_encoded, self._contents.lines()))
            await self._own.rewrite(text)
            self._bytes = len(text)

    async def find(self) -> None:
        """Take over journals of dead workers. Raises UnavailableError for those it cannot read, after the others."""
        files, troubles = await self._journal_store.orphans()
        causes, unread = list(troubles), list(files)
        try:
            while unread:
                try:
                    self._found.append((unread[0], read(await unread[0].read())))
                except UnavailableError as error:
                    unread[0].close()
                    causes.append(str(error))
                unread.pop(0)
        finally:
            for file in unread:
                file.close()
        if causes:
            raise UnavailableError("; ".join(causes))

    async def forget(self, file: JournalFile, known: JournalContents) -> None:
        """Drop a journal whose contents the ledger knows, unless more was recorded in it meanwhile."""
        async with self._writing:
            if file is self._own:
                if not known.covers(self._contents):
                    return
                self._own, self._contents = None, JournalContents()
            self._found = [(one, contents) for one, contents in self._found if one is not file]
            self._outdated.append(file)

    async def tidy(self) -> None:
        """Delete dropped journals. Raises UnavailableError for those it cannot delete, after the others."""
        causes = []
        for file in list(self._outdated):
            try:
                await file.remove()
            except UnavailableError as error:
                causes.append(str(error))
            else:
                self._outdated.remove(file)
        if causes:
            raise UnavailableError("; ".join(causes))

    def close(self) -> None:
        """Release all journals to the next worker."""
        for file in [*self._outdated, *(file for file, _ in self.pending())]:
            file.close()
        self._own, self._contents, self._found, self._outdated = None, JournalContents(), [], []

    async def _append(self, line: JournalLine, *, durably: bool) -> None:
        assert self._own is not None, "a journal is created with its first note"
        text = _encoded(line)
        await self._own.append(text, durably=durably)
        # Only after the append: changes that could not be journaled are not written.
        self._contents.add(line)
        self._bytes += len(text)


def _order(header: ChangeHeader) -> Order:
    assert header.order is not None, "a change has an order"
    return header.order


def _encoded(line: JournalLine) -> bytes:
    return _ENCODE(line) + b"\n"


_LOWEST: Order = (0, VERSION_MIN, UNVERSIONED_GENERATION)
_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder(JournalLine).decode
