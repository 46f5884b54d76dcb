"""Reports for an operator: what is known of one object, and which objects of a pipeline are being read."""

import msgspec

from keywise.core.change import Order, is_unversioned
from keywise.core.entry import Entry
from keywise.core.errors import ObjectAccessError, ObjectError, UnavailableError
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.away_store import AwayStore
from keywise.ingest.keys import is_shortened
from keywise.ingest.object_note import ContentNote, ObjectNote
from keywise.ingest.open_objects import OpenObjects
from keywise.ingest.versions import VersionScale

HELD_MAX = 1000
"""How many claimed objects are looked at to find those that are read in parts."""
SHOWN = 3


class Progress(msgspec.Struct, frozen=True):
    """How far the work on one version of an object has come. The next message that is not newer resumes there."""

    version: int | None
    generation: int
    records: int
    """How many records are done, bad ones included."""
    read: int
    """How many bytes of the object they took, as they are in the store."""
    etag: str = ""
    """The ETag of the content that is being read; empty before the first part."""
    missing_since: float | None = None
    """Since when the store has no such object, though it was announced."""
    deletes_tail: bool = False
    """All records are written, and those of an earlier version behind them are being deleted."""


class StoredObject(msgspec.Struct, frozen=True):
    """What the store says about an object."""

    etag: str = ""
    """Empty if it has no such object."""
    size: int | None = None
    cause: str = ""
    """Why the store gave no answer."""


class ObjectReport(msgspec.Struct, frozen=True):
    """What a pipeline knows of one object. Times are seconds of the wall clock."""

    uri: str
    """Empty if the ledger has only the hash of a long URI."""
    progress: Progress | None
    content: ContentNote | None
    """What the sink holds since the last commit; None if nothing was committed."""
    extent: int
    """No record with an ordinal at or above it is in the sink; 0 if the sink finds the records of an object."""
    stored: StoredObject | None
    """None if the URI is not known."""

    @property
    def differs(self) -> bool:
        """Whether the store has other content than was committed."""
        stored, content = self.stored, self.content
        return stored is not None and not stored.cause and stored.etag != (content.etag if content else "")

    @property
    def stays_removed(self) -> bool:
        """Whether an operator has removed what the store has, so that a backfill leaves it alone."""
        stored, content = self.stored, self.content
        return bool(stored is not None and stored.etag and content is not None and content.stays_removed(stored.etag))


class RunningObject(msgspec.Struct, frozen=True):
    """An object that a worker reads in parts now."""

    uri: str
    """The key, if the ledger has only the hash of a long URI."""
    records: int
    read: int


class ObjectFigures(msgspec.Struct, frozen=True):
    """The figures of an object pipeline."""

    store: str
    scale: str
    """What orders the versions of its events; empty before the first event."""
    promise: str
    """What this scale promises; empty before the first event."""
    in_parts: int
    """How many objects workers read in parts now."""
    largest: list[RunningObject]
    """Those of which most records are written."""
    cause: str = ""
    """Why the store cannot be reached; empty if it can."""


async def object_report_of(pipeline: OpenPipeline, given: str, wall: float) -> ObjectReport | None:
    """Report what is known of an object, by its URI or key; None if the pipeline reads no objects."""
    objects = pipeline.objects
    if not isinstance(objects, OpenObjects):
        return None
    entry = await pipeline.admin.inspect(await pipeline.key_of(given)) or Entry()
    content = ContentNote.of(entry) if entry.mark is not None else None
    uri = content.uri if content is not None and content.uri else "" if is_shortened(given) else given
    return ObjectReport(
        uri=uri,
        progress=_progress(entry, wall - await pipeline.admin.now()),
        content=content,
        extent=entry.extent,
        stored=await _stored(objects, uri) if uri else None,
    )


async def object_figures_of(pipeline: OpenPipeline) -> ObjectFigures | None:
    """Return the figures of an object pipeline; None if the pipeline reads no objects."""
    objects = pipeline.objects
    if not isinstance(objects, OpenObjects):
        return None
    running: list[RunningObject] = []
    for key in await pipeline.control_store.held("", HELD_MAX):
        entry = await pipeline.admin.inspect(key) or Entry()
        if (progress := _progress(entry, 0.0)) is not None and progress.records:
            running.append(RunningObject(ContentNote.of(entry).uri or key, progress.records, progress.read))
    scale = (await pipeline.control_store.controls()).scale
    return ObjectFigures(
        store=objects.selection.root,
        scale=scale,
        promise=VersionScale(scale).promise.value if scale else "",
        in_parts=len(running),
        largest=sorted(running, key=lambda one: -one.records)[:SHOWN],
        cause=objects.store.cause if isinstance(objects.store, AwayStore) else "",
    )


def _progress(entry: Entry, ahead_s: float) -> Progress | None:
    if entry.position is None or entry.advanced is None:
        return None
    try:
        note = ObjectNote.decode(entry.position.note)
    except ObjectError:
        note = ObjectNote()
    read = note.read
    return Progress(
        version=_version(entry.advanced),
        generation=max(0, entry.advanced[2]),
        records=entry.position.place,
        read=read.start if read is not None else 0,
        etag=read.etag if read is not None else note.done.etag if note.done is not None else "",
        missing_since=note.gone_at + ahead_s if note.gone_at else None,
        deletes_tail=note.done is not None,
    )


async def _stored(objects: OpenObjects, uri: str) -> StoredObject:
    if not uri.startswith(f"{objects.selection.root}/"):
        return StoredObject(cause=f"it is not in {objects.selection.root}")
    try:
        found = await objects.store.get(objects.selection.name_of(uri))
    except (UnavailableError, ObjectError, ObjectAccessError) as error:
        return StoredObject(cause=str(error))
    if found is None:
        return StoredObject()
    await found.chunks.aclose()
    return StoredObject(found.etag, found.size)


def _version(order: Order) -> int | None:
    return None if is_unversioned(order) else order[1]
