"""The work on one claimed object: ask the store what is there, read it in parts, write each, and end with a commit."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from keywise.core import events
from keywise.core.change import Outcome, above
from keywise.core.entry import Advance, Position
from keywise.core.errors import ObjectAccessError, ObjectReplacedError, UnavailableError
from keywise.core.object_store import ObjectStore
from keywise.core.sink import APPLIED, SinkResult
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.leased.disposition import NOT_STARTED, Execution, Ran
from keywise.flow.leased.executors import Job
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.settlement import Settlement
from keywise.ingest.announcement import AnnouncedObject, decode_announcement
from keywise.ingest.notification import ObjectSelection
from keywise.ingest.object_note import BEGINNING, ContentNote, ObjectNote
from keywise.ingest.parts import Part, decode_note
from keywise.ingest.portion import Portion, PortionState
from keywise.ingest.portion_writers import ClaimLostError, PortionWriter
from keywise.ingest.reader import ObjectReader, ReadPlan, open_object
from keywise.ingest.records import Decode, RecordMaker

T = TypeVar("T")

GONE_S = 60.0
"""An announced object that the store does not have counts as gone only if it is still missing after this time."""
RESTARTS_MAX = 5
"""An object that is replaced more often than this while it is read has to wait for its next attempt."""


@dataclass(slots=True, kw_only=True)
class ObjectTools:
    """What the work on every object of a pipeline needs."""

    pipeline: OpenPipeline
    settlement: Settlement
    heartbeat: Heartbeat
    store: ObjectStore
    selection: ObjectSelection
    plan: ReadPlan
    writer: PortionWriter
    decode: Decode | None
    """Decodes the value of a record; None leaves it to the format."""
    gone_s: float
    """`GONE_S`, or what the pipeline has set."""
    stopping: asyncio.Event
    """Set when the worker drains: every object stops at its next part."""


class StoreError(Exception):
    """The store did not answer, or refused the request. Whether the object exists is unknown."""


class ObjectRun:
    """Works on one object, from the position that an earlier holder kept."""

    def __init__(self, tools: ObjectTools, job: Job) -> None:
        self._tools = tools
        self._ticket = job.ticket
        self._claim = job.claim
        self._at = job.claim.position or Position(0)
        """The position behind all that is written."""
        self._note = ObjectNote.decode(self._at.note)
        self._announcement: AnnouncedObject = decode_announcement(job.ticket.change.body)
        self._maker = RecordMaker(self._announcement.uri, job.claim.key, tools.decode)
        self._repairs = False

    async def run(self) -> Execution:
        """Work until the object is committed, has to wait, or the worker stops."""
        self._repairs = await self._is_repair()
        for _ in range(RESTARTS_MAX):
            try:
                return await self._continue()
            except ObjectReplacedError:
                await self._restart()
        cause = f"{self._announcement.uri!r} is replaced faster than it can be read; it is tried again"
        return Ran(SinkResult(Outcome.FAILED, cause))

    async def read_small(self, bytes_max: int) -> Portion | Execution | None:
        """Return an object that has one part as its only portion; None if it has to be worked on alone.

        An execution in place of a portion says that the object has to wait.
        """
        if self._claim.position is not None:
            return None
        self._repairs = await self._is_repair()
        found = await self._look()
        if isinstance(found, ObjectReader):
            if found.size > bytes_max:
                await found.close()
                return None
            with self._tools.heartbeat.limit([self._claim]), _store_errors():
                part = await found.only_part()
            if part is None:
                return None
            found = self._portion(found, part)
        if not isinstance(found, Portion):
            return found
        return self._with_tail(found) if self._is_whole(found) else None

    # The steps of one object.

    async def _continue(self) -> Execution:
        if self._note.done is not None:
            return await self._delete_tail(self._note.done)
        match await self._look():
            case ObjectReader() as reader:
                return await self._write_parts(reader)
            case Portion() as portion:
                return await self._finish(portion)
            case execution:
                return execution

    async def _write_parts(self, reader: ObjectReader) -> Execution:
        async with aclosing(self._parts(reader)) as parts:
            async for part in parts:
                portion = self._portion(reader, part)
                if portion.content is not None:
                    return await self._finish(portion)
                if part.count == 0:
                    continue  # Blank lines: there is no new place to keep.
                await self._write(portion)
                self._report(reader)
                if self._must_stop():
                    return self._stopped()
        raise AssertionError("every object has a last part")

    async def _finish(self, portion: Portion) -> Execution:
        """Write the last portion, and delete what an earlier version has behind it."""
        content = portion.content
        assert content is not None, "the last portion says what the sink holds"
        # A redelivery must not arrive during the commit.
        await self._tools.settlement.extend([self._ticket], age=1 / 2)
        if self._is_whole(portion):
            await self._write(self._with_tail(portion))
        else:
            portion.content, portion.note = None, portion.note.kept(done=content)
            if portion.records or portion.letters:
                await self._write(portion)
        return _ended(portion) if portion.state in _ENDINGS else await self._delete_tail(content)

    async def _delete_tail(self, content: ContentNote) -> Execution:
        """Delete the records behind the end of the object, some at a time, and commit with the last of them."""
        tools, order, extent = self._tools, self._claim.order, self._claim.extent
        assert order is not None, "an object is written at an order"
        note = self._note.kept(done=content)
        while True:
            portion = self._new_portion(self._at.place, note)
            if tools.writer.finds_records:
                portion.content = content
                self._with_tail(portion)
            else:
                first = max(self._at.place, content.records)
                portion.place = min(first + tools.plan.settings.part_records, extent)
                portion.records = self._maker.deletions(range(first, portion.place), order)
                if portion.place >= extent:
                    portion.content = content
            await self._write(portion)
            note = portion.note
            if portion.state in _ENDINGS:
                return _ended(portion)
            if self._must_stop():
                return self._stopped()

    async def _restart(self, note: ObjectNote = BEGINNING) -> None:
        """Start again at the beginning, at the next generation: the object is another one than was read."""
        order = self._claim.order
        assert order is not None, "an object is read at an order"
        await self._advance(Advance(self._claim, Position(0, note.encode()), restart=above(order)))

    async def _write(self, portion: Portion) -> None:
        await self._tools.writer.write([portion])
        self._claim, self._note = portion.claim, portion.note
        self._at = Position(portion.place, portion.note.encode())

    async def _advance(self, advance: Advance) -> None:
        """Keep a position with which no records are written."""
        tools, ledger = self._tools, self._tools.pipeline.ledger
        with tools.heartbeat.limit([self._claim]):
            if await tools.pipeline.retry_until_reachable(LEDGER, lambda: ledger.advance([advance])):
                raise ClaimLostError("the claim is lost")
        tools.heartbeat.advanced([advance])
        self._claim, self._at = advance.claim_after, advance.position
        self._note = ObjectNote.decode(self._at.note)

    def _must_stop(self) -> bool:
        controls = self._tools.pipeline.controls
        is_paused = controls.is_paused or controls.pauses_key(self._claim.key)
        return self._tools.stopping.is_set() or is_paused or self._ticket.is_orphaned

    def _stopped(self) -> Execution:
        """Return how the object is given up between two portions; the next holder goes on behind them."""
        if self._ticket.is_orphaned:
            # The message is another consumer's by now. That one resumes, so this one must not claim the key again.
            return Ran(SinkResult(Outcome.BUSY, "the source has given the message to another consumer", wait_s=0.0))
        return NOT_STARTED

    # What the store has.

    async def _look(self) -> ObjectReader | Portion | Execution:
        """Ask the store. Return the open object, its deletion if it is gone, or how to wait.

        The notification only says that something has happened: what counts is what the store has now.
        """
        if self._announcement.removed and self._is_own_order:
            return self._removal()
        if (reader := await self._open()) is not None:
            return reader
        return self._deletion() if self._announcement.deleted and self._is_own_order else await self._missing()

    @property
    def _is_own_order(self) -> bool:
        """Whether the claim is at the order of this message. An older message may continue newer work.

        A deletion says nothing about a newer order, whose object may only not be visible in the store yet.
        """
        order = self._claim.order
        return order is not None and order[1:] == self._ticket.change.order[1:]

    async def _open(self) -> ObjectReader | None:
        """Open the object where reading goes on; None if the store says that it has no such object."""
        tools, read = self._tools, self._note.read
        name = tools.selection.name_of(self._announcement.uri)
        if read is not None and read.format != tools.plan.format.name:
            raise ObjectReplacedError(f"{name!r} was begun as {read.format}")
        note = read.encode() if read is not None else b""
        with tools.heartbeat.limit([self._claim]), _store_errors():
            return await open_object(tools.store, name, tools.plan, place=self._at.place, note=note)

    async def _parts(self, reader: ObjectReader) -> AsyncGenerator[Part, None]:
        """Yield the parts; each is read while the claim lasts."""
        async with aclosing(reader.parts()) as parts:
            while True:
                with self._tools.heartbeat.limit([self._claim]), _store_errors():
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part

    async def _missing(self) -> Portion | Execution:
        """The store has no such object, though it was announced: return its deletion, if that is so for long."""
        root, uri, gone_s = self._tools.selection.root, self._announcement.uri, self._tools.gone_s
        now = await self._asked(self._tools.pipeline.admin.now)
        if not self._note.gone_at:
            note = replace(self._note, gone_at=now)
            await self._advance(Advance(self._claim, Position(self._at.place, note.encode())))
        missing_s = now - self._note.gone_at
        if missing_s >= gone_s:
            if self._note.read is not None:
                # Records may be written at this order. They have to be deleted at a higher one, from the first on.
                await self._restart(ObjectNote(gone_at=self._note.gone_at))
            return self._deletion()
        cause = f"{root} has no object {uri[len(root) + 1 :]!r}; if it stays missing for {gone_s:g} s, it is gone"
        return Ran(SinkResult(Outcome.BUSY, cause, wait_s=gone_s - missing_s))

    async def _is_repair(self) -> bool:
        """Whether the commit ends the suspicion: the last suspicious write can no longer arrive after this reading."""
        claim, pipeline = self._claim, self._tools.pipeline
        if not claim.suspicions or claim.took_over or self._at.place > 0:
            return False
        entry = await self._asked(lambda: pipeline.admin.inspect(claim.key))
        horizon = await self._asked(pipeline.admin.now) - pipeline.settings.horizon_s
        return entry is not None and entry.suspected_at <= horizon

    async def _asked(self, act: Callable[[], Awaitable[T]]) -> T:
        """Ask the ledger, while the claim lasts."""
        with self._tools.heartbeat.limit([self._claim]):
            return await self._tools.pipeline.retry_until_reachable(LEDGER, act)

    # Portions.

    def _portion(self, reader: ObjectReader, part: Part) -> Portion:
        order, read = self._claim.order, decode_note(part.note)
        assert order is not None, "an object is read at an order"
        portion = self._new_portion(part.place, self._note.kept(read=read))
        if self._note.read is None:
            # The next holder must not write another content at this order: it starts again at a higher one.
            portion.start = Position(self._at.place, self._note.kept(read=read.at_start).encode())
        portion.records = self._maker.of_part(part, order, reader)
        if gaps := [one.ordinal for one in part.bad if portion.has_former(one.ordinal)]:
            portion.records = [*portion.records, *self._maker.deletions(gaps, order)]
        portion.letters += self._maker.bad_letters(part.bad, reader.etag, order, portion.sent_at)
        if part.is_last:
            portion.content = self._content(reader.etag, part.place, read.bad)
        return portion

    def _deletion(self) -> Portion:
        """Return the last portion of an object that is gone."""
        portion = self._new_portion(self._at.place, BEGINNING)
        portion.content = self._content("", 0, 0)
        return portion

    def _removal(self) -> Portion:
        """Return the last portion of an object that an operator has removed, which a backfill leaves alone."""
        portion = self._deletion()
        assert portion.content is not None, "a deletion is the last portion"
        portion.content = replace(portion.content, removed=True, removed_etag=self._announcement.etag)
        return portion

    def _is_whole(self, portion: Portion) -> bool:
        """Whether nothing follows a portion, no deletion of records behind the end either."""
        if portion.content is None:
            return False
        return self._tools.writer.finds_records or self._claim.extent <= portion.content.records

    def _with_tail(self, portion: Portion) -> Portion:
        """Let a sink that finds the records of an object delete those behind its end."""
        content = portion.content
        if self._tools.writer.finds_records and content is not None:
            portion.tail = content.records
            portion.note = portion.note.kept(done=content)
        return portion

    def _content(self, etag: str, records: int, bad: int) -> ContentNote:
        uri = self._announcement.uri
        return ContentNote(etag, records, bad, "" if uri == self._claim.key else uri)

    def _new_portion(self, place: int, note: ObjectNote) -> Portion:
        return Portion(
            claim=self._claim,
            maker=self._maker,
            sent_at=self._ticket.delivery.sent_at,
            records=(),
            letters=[],
            start=self._at,
            place=place,
            note=note,
            former=None if self._tools.writer.finds_records else self._claim.extent,
            reserves=not self._tools.writer.finds_records,
            repairs=self._repairs,
        )

    def _report(self, reader: ObjectReader) -> None:
        read = self._note.read
        pipeline = self._tools.pipeline
        done = read.start if read is not None else 0
        pipeline.emit(
            events.Advanced(
                pipeline=pipeline.name, key=self._claim.key, records=self._at.place, read=done, size=reader.size
            )
        )


_ENDINGS = (PortionState.COMMITTED, PortionState.LOST)


def _ended(portion: Portion) -> Execution:
    # The worker commits a lost claim again, and learns from the ledger that it is lost.
    return Ran(APPLIED, committed=portion.state is PortionState.COMMITTED)


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except (UnavailableError, ObjectAccessError) as error:
        raise StoreError(str(error)) from error
