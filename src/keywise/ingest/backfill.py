"""Backfill: compares the objects of a store with the ledger, and announces again what differs.

A worker then reads each of them as after a notification: what the store has at that time counts, not the listing.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from hashlib import blake2b
from itertools import islice

import msgspec
from msgspec.structs import asdict, replace

from keywise.core.change import Order
from keywise.core.entry import Entry
from keywise.core.errors import AdminError, MalformedError, ObjectError
from keywise.core.object_store import ListedObject
from keywise.core.source import Source
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.announcement import AnnouncedObject, announced_again
from keywise.ingest.keys import is_shortened, object_key
from keywise.ingest.notification import FOLDER_ENDINGS
from keywise.ingest.object_note import ContentNote, ObjectNote
from keywise.ingest.open_objects import OpenObjects, orders_seen

PAGE = 1000
LOOKS_AT_ONCE = 16
"""How many entries are asked of the ledger side by side."""
AT_ONCE = 100
"""How many objects are compared, and announced with one call."""
BUCKETS = 4096
DIGEST_BYTES = 8


class BackfillReport(msgspec.Struct, frozen=True):
    """What a backfill has done so far."""

    listed: int = 0
    """How many objects the store has listed."""
    unchanged: int = 0
    """The committed content has the same ETag."""
    running: int = 0
    """The same content is being read, or was begun; nothing was announced."""
    announced: int = 0
    """New objects and those with another ETag. With `dry_run`, how many would be announced."""
    removed: int = 0
    """An operator has removed the same content; nothing was announced."""
    missing: int = 0
    """Objects that the ledger knows and the store has not listed: announced, so that a worker asks the store."""
    skipped: int = 0
    """Folders, and names with another prefix or suffix than the pipeline's."""
    after: str = ""
    """The name behind which to go on."""
    is_listed: bool = False
    """The store was listed to its end."""


Report = Callable[[BackfillReport], None]


async def backfill(  # noqa: PLR0913 - one parameter per option
    pipeline: OpenPipeline,
    *,
    prefix: str = "",
    after: str = "",
    limit: int | None = None,
    dry_run: bool = False,
    missing: bool = True,
    also_removed: bool = False,
) -> BackfillReport:
    """Announce the objects of a store that differ from what the ledger has committed; see `Backfill`."""
    walk = Backfill(pipeline, prefix=prefix, after=after, limit=limit, dry_run=dry_run, also_removed=also_removed)
    return await walk.run(missing=missing)


class Backfill:
    """One comparison of a store with the ledger.

    It costs a listing of the store, and one look into the ledger per object listed and per key of the ledger. It keeps
    one page of each in memory, and 8 bytes per listed object to find the missing ones: 80 MB for ten million.
    It may run beside workers. An object that changes meanwhile is announced once too often at most.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        *,
        prefix: str = "",
        after: str = "",
        limit: int | None = None,
        dry_run: bool = False,
        also_removed: bool = False,
    ) -> None:
        """`after` goes on behind a name; `limit` is how many objects are announced at most.

        `also_removed` announces those too that an operator has removed.
        """
        if not isinstance(pipeline.objects, OpenObjects):
            raise AdminError(f"pipeline {pipeline.name!r} reads no objects; define one with app.objects(...)")
        self.report = BackfillReport(after=after)
        self._pipeline = pipeline
        self._objects = pipeline.objects
        self._prefix = _narrowed(prefix, pipeline.objects.selection.prefix)
        self._after = after
        self._limit = limit
        self._dry_run = dry_run
        self._also_removed = also_removed
        self._seen = NameDigests()

    async def run(self, *, missing: bool = True, on_page: Report = lambda report: None) -> BackfillReport:
        """List the store, then look for missing objects; `on_page` gets the report after each page.

        Missing objects are looked for only if the listing has come to its end, and among the names that it covers.
        After an error, `report` says how far it came.
        """
        lowest = await self._objects.lowest_order(self._pipeline)
        async with aclosing(self._objects.store.list_objects(self._prefix, self._after)) as pages:
            async for page in pages:
                if not await self._take(page, lowest):
                    return self.report
                on_page(self.report)
        self.report = replace(self.report, is_listed=True)
        if missing:
            async with aclosing(self._known_names()) as known_pages:
                async for known in known_pages:
                    if not await self._take_missing(known):
                        return self.report
                    on_page(self.report)
        return self.report

    # Listed objects.

    async def _take(self, page: Sequence[ListedObject], lowest: Order) -> bool:
        """Compare some listed objects, and announce those that differ; return False once the limit is reached."""
        for start in range(0, len(page), AT_ONCE):
            some = page[start : start + AT_ONCE]
            wanted = [one.name for one in some if self._is_wanted(one.name)]
            entries = dict(zip(wanted, await self._entries(map(self._key, wanted)), strict=True))
            due: list[AnnouncedObject] = []
            counted: Counter[str] = Counter()
            for one in some:
                kind = self._compared(one, entries[one.name]) if one.name in entries else "skipped"
                if kind == "announced":
                    if self._is_full(len(due)):
                        break
                    seen = orders_seen(entries[one.name])
                    again = announced_again(self._uri(one.name), *seen, lowest=lowest)
                    due.append(replace(again, etag=one.etag, size=one.size))
                counted.update((kind, "listed"))
                self._seen.add(one.name)
            await self._send(due)
            if counted["listed"]:
                self._count(counted, after=some[counted["listed"] - 1].name)
            if counted["listed"] < len(some):
                return False
        return True

    def _compared(self, one: ListedObject, entry: Entry | None) -> str:
        """Return which count of the report a listed object belongs to."""
        if entry is None:
            return "announced"
        if entry.position is not None and _begun_etag(entry) == one.etag:
            return "running"
        content = ContentNote.of(entry)
        if entry.mark is not None and not entry.deleted and content.etag == one.etag:
            return "unchanged"
        is_removed = entry.deleted and content.stays_removed(one.etag)
        return "removed" if is_removed and not self._also_removed else "announced"

    def _is_wanted(self, name: str) -> bool:
        selection = self._objects.selection
        if not (name.startswith(selection.prefix) and name.endswith(selection.suffix)) or name.endswith(FOLDER_ENDINGS):
            return False
        try:
            object_key(self._uri(name))
        except MalformedError:
            return False  # No ledger can store it, so it can be announced to none.
        return True

    # Missing objects.

    async def _known_names(self) -> AsyncGenerator[list[tuple[str, Entry]], None]:
        """Yield the URIs of objects that exist, as far as the ledger knows, with their entries, in pages.

        Of a long URI that was never committed, the ledger has a hash only; it is left out.
        """
        after = ""
        while keys := await self._pipeline.control_store.keys(after, PAGE):
            after = keys[-1]
            for start in range(0, len(keys), AT_ONCE):
                some = keys[start : start + AT_ONCE]
                entries = await self._entries(some)
                known = [(ContentNote.of(entry).uri or key, entry) for key, entry in zip(some, entries, strict=True)]
                yield [(uri, entry) for uri, entry in known if entry is not None and not is_shortened(uri)]

    async def _take_missing(self, known: Sequence[tuple[str, Entry]]) -> bool:
        """Announce the objects that were not listed; return False once the limit is reached.

        A worker deletes nothing before it has asked the store itself: an object that exists is read.
        """
        due: list[AnnouncedObject] = []
        is_full = False
        for uri, entry in known:
            if entry.mark is None or entry.deleted or not self._covers(uri):
                continue
            if is_full := self._is_full(len(due)):
                break
            due.append(announced_again(uri, *orders_seen(entry), deleted=True))
        await self._send(due)
        self._count(Counter(missing=len(due)))
        return not is_full

    def _covers(self, uri: str) -> bool:
        """Whether the listing would have had the object, and has not."""
        selection = self._objects.selection
        if not uri.startswith(f"{selection.root}/"):
            return False
        name = selection.name_of(uri)
        in_range = name.startswith(self._prefix) and (not self._after or name > self._after)
        return in_range and self._is_wanted(name) and name not in self._seen

    # Steps.

    async def _entries(self, keys: Iterable[str]) -> list[Entry | None]:
        """Return the entries of keys. Some are asked for side by side."""
        found: list[Entry | None] = []
        rest = iter(keys)
        while some := list(islice(rest, LOOKS_AT_ONCE)):
            found += await asyncio.gather(*map(self._pipeline.admin.inspect, some))
        return found

    async def _send(self, due: Sequence[AnnouncedObject]) -> None:
        if due and not self._dry_run:
            await self._source().send([one.encode() for one in due])

    def _source(self) -> Source:
        """Return the first source of the bulk lane, or the first of all."""
        bulk = min(self._pipeline.bulk, default=0)
        return self._pipeline.sources[bulk][1]

    def _is_full(self, due: int) -> bool:
        return self._limit is not None and self.report.announced + self.report.missing + due >= self._limit

    def _count(self, counted: Counter[str], after: str = "") -> None:
        """Add to the report what is done: it has to be right after an error, too."""
        before = asdict(self.report)
        sums = {name: before[name] + number for name, number in counted.items()}
        self.report = replace(self.report, **sums, after=after or self.report.after)

    def _uri(self, name: str) -> str:
        return f"{self._objects.selection.root}/{name}"

    def _key(self, name: str) -> str:
        return object_key(self._uri(name))


class NameDigests:
    """A set of names that keeps 8 bytes of each.

    Among ten million names, another name counts as one of them with a chance of 1 to two million millions.
    """

    def __init__(self) -> None:
        self._buckets = [bytearray() for _ in range(BUCKETS)]

    def add(self, name: str) -> None:
        digest = _digest(name)
        self._bucket(digest).extend(digest)

    def __contains__(self, name: str) -> bool:
        digest = _digest(name)
        bucket, place = self._bucket(digest), -1
        while (place := bucket.find(digest, place + 1)) >= 0:
            if place % DIGEST_BYTES == 0:
                return True
        return False

    def _bucket(self, digest: bytes) -> bytearray:
        return self._buckets[int.from_bytes(digest[:2]) % BUCKETS]


def _narrowed(given: str, selected: str) -> str:
    """Return the longer of two prefixes; raises `AdminError` if no name can have both."""
    longer, shorter = (given, selected) if len(given) > len(selected) else (selected, given)
    if not longer.startswith(shorter):
        raise AdminError(f"the pipeline reads names with the prefix {selected!r} only; give one that begins so")
    return longer


def _digest(name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _begun_etag(entry: Entry) -> str:
    """Return the ETag of the content that is being read; empty if it is not known."""
    try:
        note = ObjectNote.decode(entry.position.note) if entry.position is not None else ObjectNote()
    except ObjectError:
        return ""
    return note.read.etag if note.read is not None else note.done.etag if note.done is not None else ""
