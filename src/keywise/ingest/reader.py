"""Reads one object in parts, and resumes behind any of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from keywise.core.errors import ObjectError, ObjectReplacedError, SettingsError, UnavailableError
from keywise.core.object_store import ObjectStore, ObjectStream
from keywise.ingest.compression import (
    COMPRESSIONS,
    MAGIC_BYTES,
    Decompressor,
    MemberDecompressor,
    PlainContent,
    compression_of,
)
from keywise.ingest.cutting import Cut, CutPlace, Cutter, RowCutter, WholeCutter
from keywise.ingest.formats import Format
from keywise.ingest.formats.whole import WholeFormat
from keywise.ingest.parts import Part, PartSettings, ReadNote, decode_note


class ReadPlan:
    """How objects of one pipeline are read."""

    def __init__(
        self, object_format: Format, settings: PartSettings | None = None, *, compression: str = "auto"
    ) -> None:
        if compression not in COMPRESSIONS:
            raise SettingsError(f"compression={compression!r} is not known; write one of {', '.join(COMPRESSIONS)}")
        self.format = object_format
        # Asking a protocol is slow, so it is done once, and not for each object.
        self.cutter: Callable[[PartSettings, CutPlace], Cutter]
        if isinstance(object_format, WholeFormat):
            self.cutter = partial(WholeCutter, object_format)
        else:
            self.cutter = partial(RowCutter, object_format)
        self.settings = settings or PartSettings()
        self.compression = compression


async def open_object(
    store: ObjectStore, name: str, plan: ReadPlan, *, place: int = 0, note: bytes = b""
) -> "ObjectReader | None":
    """Open an object at its start, or at the position behind a part; None if the store has no such object.

    `ObjectReplacedError` means that the object is no longer the one that the position is about.
    """
    begun = decode_note(note) if note else None
    if begun and begun.format != plan.format.name:
        raise ObjectError(
            f"{name!r} was begun as {begun.format}, and is now to be read as {plan.format.name}; "
            "read it from its start, or set the format back"
        )
    stream = await store.get(name, begun.start, begun.etag) if begun else await store.get(name)
    return ObjectReader(store, name, plan, stream, begun, place) if stream else None


class ObjectReader:
    """An open object. Its parts can be read once."""

    def __init__(
        self, store: ObjectStore, name: str, plan: ReadPlan, stream: ObjectStream, begun: ReadNote | None, place: int
    ) -> None:
        self.etag, self.size = stream.etag, stream.size
        self._store, self._name, self._stream = store, name, stream
        self._format, self._compression = plan.format, plan.compression
        self._make_cutter = plan.cutter
        settings = plan.settings
        if begun:
            # What was begun is cut by the settings that it was begun with, so that a repeated part is the same part.
            cuts = {"part_bytes": begun.part_bytes, "part_records": begun.part_records, "record_max": begun.record_max}
            settings = replace(settings, **cuts)
            self._compression = begun.compression or "none"
        self._settings = settings
        self._note = begun or ReadNote(
            self.etag, plan.format.name, settings.part_bytes, settings.part_records, settings.record_max
        )
        self._place = place
        self._skip = self._note.skip
        self._header = self._note.header

    def decode(self, record: bytes) -> Any:
        """Return a record of a part that was read as a value: text, what JSON says, or a dict by column."""
        return self._format.decode(record, self._header)

    def bodies(self, records: Sequence[bytes]) -> Sequence[bytes]:
        """Return records as a sink stores them: CSV rows as JSON objects, others as they are."""
        return [msgspec.json.encode(self.decode(record)) for record in records] if self._header else records

    async def close(self) -> None:
        """End the request, if its parts are not read."""
        await self._stream.chunks.aclose()

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield the parts from the position on; the last one says so. Leaving the loop early takes `aclosing`."""
        try:
            async with aclosing(self._read()) as parts:
                async for part in parts:
                    yield part
        except ObjectError as error:
            raise ObjectError(f"{self._name!r}: {error}") from error

    async def only_part(self) -> Part | None:
        """Return the part of an object that has one; None if it has more. All bytes of the object are in memory.

        Small objects are most of the objects, and each generator of `parts` costs them as much as their records.
        """
        async with aclosing(self._chunks()) as chunks:
            content = b"".join([chunk async for chunk in chunks])
        try:
            part = next(self._finish(self._decompressor(content), self._cutter(), content))
        except ObjectError as error:
            raise ObjectError(f"{self._name!r}: {error}") from error
        return part if part.is_last else None

    async def _read(self) -> AsyncGenerator[Part, None]:
        cutter, decompressor, begin = self._cutter(), None, b""
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                begin += chunk
                if decompressor is None and len(begin) < MAGIC_BYTES:
                    continue
                decompressor = decompressor or self._decompressor(begin)
                for content in decompressor.feed(begin):
                    for cut in cutter.feed(self._unskipped(content)):
                        yield self._part(cut, decompressor)
                    # Decompressing a chunk may take long.
                    await asyncio.sleep(0)
                begin = b""
        decompressor = decompressor or self._decompressor(begin)
        for part in self._finish(decompressor, cutter, begin):
            yield part

    def _finish(self, decompressor: Decompressor, cutter: Cutter, begin: bytes) -> Iterator[Part]:
        """Yield the rest. `begin` is all that was not fed: a whole small object, or one of a few bytes."""

        def rest() -> Iterator[Cut]:
            for content in decompressor.feed(begin):
                yield from cutter.feed(self._unskipped(content))
            decompressor.finish()
            yield from cutter.finish()

        last: Cut | None = None
        for cut in rest():
            if last:
                yield self._part(last, decompressor)
            last = cut
        assert last is not None, "an object has at least one part"
        yield self._part(last, decompressor, is_last=True)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the object. A lost connection is opened again where it broke off."""
        stream, at = self._stream, self._note.start
        while True:
            begun_at = at
            try:
                async with aclosing(stream.chunks) as chunks:
                    async for chunk in chunks:
                        at += len(chunk)
                        yield chunk
                if at >= self.size:
                    return
                raise UnavailableError(f"{self._name!r} ended after {at} of {self.size} bytes")
            except UnavailableError:
                if at == begun_at:
                    raise
            reopened = await self._store.get(self._name, at, self.etag)
            if reopened is None:
                raise ObjectReplacedError(f"{self._name!r} was removed while it was read")
            stream = reopened

    def _cutter(self) -> Cutter:
        note = self._note
        start = CutPlace(self._place, note.offset, note.offset - note.block, note.bad, note.header)
        return self._make_cutter(self._settings, start)

    def _decompressor(self, begin: bytes) -> Decompressor:
        if self._compression == "auto":
            self._compression = compression_of(begin) or "none"
        if self._compression == "none":
            return PlainContent()
        return MemberDecompressor(self._compression, self._note.start, self._note.offset - self._note.skip)

    def _unskipped(self, content: bytes) -> bytes:
        """Drop what comes before the position, behind the start of a compressed member."""
        if not self._skip:
            return content
        dropped = min(self._skip, len(content))
        self._skip -= dropped
        return content[dropped:]

    def _part(self, cut: Cut, decompressor: Decompressor, *, is_last: bool = False) -> Part:
        end = cut.end
        self._header = end.header
        start, offset = decompressor.boundary(end.offset)
        note = ReadNote(
            self.etag,
            self._note.format,
            self._note.part_bytes,
            self._note.part_records,
            self._note.record_max,
            start=start,
            skip=end.offset - offset,
            offset=end.offset,
            block=end.offset - end.block,
            bad=end.bad,
            compression="" if self._compression == "none" else self._compression,
            header=end.header,
        )
        return Part(cut.first, cut.records, cut.bad, end.place, note.encode(), is_last)
