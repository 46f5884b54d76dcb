"""An open object pipeline: what its flow does differently from that of other pipelines."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from keywise.core.change import Order, order_of
from keywise.core.entry import Entry
from keywise.core.errors import AdminError
from keywise.core.object_store import ObjectStore
from keywise.core.record import RecordTable
from keywise.core.sink import is_atomic
from keywise.flow.handover import HandoverQueue
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.settlement import Settlement
from keywise.ingest.announcement import announced_again
from keywise.ingest.envelope_writer import EnvelopeWriter
from keywise.ingest.executor import ObjectExecutor
from keywise.ingest.formats import CsvFormat
from keywise.ingest.keys import is_shortened, object_key
from keywise.ingest.notification import ObjectSelection
from keywise.ingest.object_note import ContentNote
from keywise.ingest.object_run import GONE_S, ObjectTools
from keywise.ingest.portion_writers import AtomicPortionWriter, LeasedPortionWriter, PortionWriter
from keywise.ingest.reader import ReadPlan
from keywise.ingest.records import Decode
from keywise.ingest.versions import VersionScale


class OpenObjects:
    """The store of a pipeline, and how its objects are read."""

    def __init__(  # noqa: PLR0913 - one parameter per setting
        self,
        store: ObjectStore,
        selection: ObjectSelection,
        plan: ReadPlan,
        *,
        decode: Decode | None = None,
        queue: HandoverQueue | None = None,
        gone_s: float = GONE_S,
        has_versions: bool | None = None,
    ) -> None:
        """With a queue, the records are changes of their own, which another pipeline takes from it."""
        self._queue = queue
        self.has_versions = has_versions
        """Whether the dialect of the first source has versions; None if that is up to a user's function."""
        self.store = store
        self.selection = selection
        self.plan = plan
        self.gone_s = gone_s
        self._decode = decode

    def executor(self, pipeline: OpenPipeline, settlement: Settlement, heartbeat: Heartbeat) -> ObjectExecutor:
        sink, settings = pipeline.sink, self.plan.settings
        plan = _for_table(self.plan, sink) if isinstance(sink, RecordTable) else self.plan
        stopping = asyncio.Event()
        writer: PortionWriter
        if self._queue is not None:
            writer = EnvelopeWriter(pipeline, heartbeat, self._queue, stopping)
        elif is_atomic(sink):
            writer = AtomicPortionWriter(pipeline, sink, heartbeat, settings)
        else:
            writer = LeasedPortionWriter(pipeline, sink, heartbeat, settings)
        tools = ObjectTools(
            stopping=stopping,
            pipeline=pipeline,
            settlement=settlement,
            heartbeat=heartbeat,
            store=self.store,
            selection=self.selection,
            plan=plan,
            writer=writer,
            decode=self._decode,
            gone_s=self.gone_s,
        )
        return ObjectExecutor(tools)

    async def key_of(self, pipeline: OpenPipeline, given: str) -> str:
        key = object_key(given)
        if key == given or not is_shortened(given):
            return key
        # An operator may have copied the key of a long URI. An object may be named like that, too.
        return key if await pipeline.admin.inspect(key) is not None else given

    async def announce(self, pipeline: OpenPipeline, key: str, *, removed: bool = False) -> bytes:
        """`key` may be the URI of an object, or its key in the ledger."""
        entry = await pipeline.admin.inspect(await self.key_of(pipeline, key))
        content = ContentNote.of(entry)
        uri = content.uri or key
        if is_shortened(uri):
            raise AdminError(f"{key!r} has only the beginning of a long URI; give the whole URI of the object")
        self.check_uri(uri)
        seen = orders_seen(entry)
        is_gone = entry is not None and entry.deleted
        lowest = None if seen else await self.lowest_order(pipeline)
        again = announced_again(uri, *seen, deleted=is_gone, removed=removed, lowest=lowest)
        if removed:
            again = replace(again, etag=content.etag or content.removed_etag)
        body = again.encode()
        [_, source], *_ = pipeline.sources
        await source.send([body])
        return body

    def check_uri(self, uri: str) -> None:
        """Raise `AdminError` unless this is the URI of an object that the pipeline may read."""
        if not uri.startswith(f"{self.selection.root}/"):
            raise AdminError(f"{uri!r} is not in {self.selection.root}; give the URI of an object in it")

    async def lowest_order(self, pipeline: OpenPipeline) -> Order:
        """Return the order of an object of which nothing was seen: below those of its events, and comparable to them.

        Raises `AdminError` if a user's function decides whether events have versions, and none has come yet.
        """
        scale = (await pipeline.control_store.controls()).scale
        is_versioned = scale != VersionScale.UNVERSIONED if scale else self.has_versions
        if is_versioned is None:
            raise AdminError(
                f"whether the events of {pipeline.name!r} have versions is known from the first one that a worker "
                "reads; announce one object through its source, and try again"
            )
        return order_of(0 if is_versioned else None)


def _for_table(plan: ReadPlan, table: RecordTable) -> ReadPlan:
    """Let a header of CSV need the columns of the table: one that it lacks would be null in every row."""
    if not isinstance(plan.format, CsvFormat) or not table.columns:
        return plan
    return ReadPlan(plan.format.storing(table.columns), plan.settings, compression=plan.compression)


def orders_seen(entry: Entry | None) -> Sequence[Order]:
    """Return the orders at which an object was written, or may have been."""
    seen = (entry.mark, entry.advanced, entry.unknown) if entry is not None else ()
    return [order for order in seen if order is not None]
