"""An open object pipeline: what its flow does differently from that of other pipelines."""

import asyncio

from keywise.core.errors import AdminError
from keywise.core.object_store import ObjectStore
from keywise.core.sink import is_atomic
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.settlement import Settlement
from keywise.ingest.announcement import announced_again
from keywise.ingest.envelope_writer import EnvelopeWriter
from keywise.ingest.executor import ObjectExecutor
from keywise.ingest.keys import is_shortened, object_key
from keywise.ingest.notification import ObjectSelection
from keywise.ingest.object_note import ContentNote
from keywise.ingest.object_run import GONE_S, ObjectTools
from keywise.ingest.portion_writers import AtomicPortionWriter, LeasedPortionWriter, PortionWriter
from keywise.ingest.reader import ReadPlan
from keywise.ingest.record_queue import RecordQueue
from keywise.ingest.records import Decode


class OpenObjects:
    """The store of a pipeline, and how its objects are read."""

    def __init__(
        self,
        store: ObjectStore,
        selection: ObjectSelection,
        plan: ReadPlan,
        decode: Decode | None = None,
        queue: RecordQueue | None = None,
        gone_s: float = GONE_S,
    ) -> None:
        """With a queue, the records are changes of their own, which another pipeline takes from it."""
        self._queue = queue
        self.store = store
        self.selection = selection
        self.plan = plan
        self.gone_s = gone_s
        self._decode = decode

    def executor(self, pipeline: OpenPipeline, settlement: Settlement, heartbeat: Heartbeat) -> ObjectExecutor:
        sink, settings = pipeline.sink, self.plan.settings
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
            plan=self.plan,
            writer=writer,
            decode=self._decode,
            gone_s=self.gone_s,
        )
        return ObjectExecutor(tools)

    async def announce(self, pipeline: OpenPipeline, key: str, *, removed: bool = False) -> bytes:
        """`key` may be the URI of an object, or its key in the ledger."""
        entry = await pipeline.admin.inspect(object_key(key)) or await pipeline.admin.inspect(key)
        uri = ContentNote.of(entry).uri or key
        if is_shortened(uri):
            raise AdminError(f"{key!r} has only the beginning of a long URI; give the whole URI of the object")
        if not uri.startswith(f"{self.selection.root}/"):
            raise AdminError(f"{uri!r} is not in {self.selection.root}; give the URI of an object in it")
        seen = (entry.mark, entry.advanced, entry.unknown) if entry is not None else ()
        body = announced_again(uri, *seen, removed=removed).encode()
        [_, source], *_ = pipeline.sources
        await source.send([body])
        return body
