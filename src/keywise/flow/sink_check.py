"""Notices a sink that is empty although the ledger has marks of keys in it: a new table, or a new index.

The ledger would refuse everything that upstream sends again as a duplicate, so the sink would silently stay empty.
"""

from keywise.core import events
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.sink import EmptyReportingSink
from keywise.flow.pipeline import OpenPipeline


async def keys_missing(pipeline: OpenPipeline) -> int:
    """Return how many keys an empty sink should have, by the ledger; 0 if it is not empty, or cannot be asked."""
    sink = pipeline.sink
    if not isinstance(sink, EmptyReportingSink) or pipeline.objects is not None:
        return 0
    try:
        if not await sink.is_empty():
            return 0
        run = (await pipeline.control_store.controls()).run
        if run is not None and run.is_active:
            return 0  # It is being filled.
        # Counting reads the whole scope on some ledgers, so it comes second.
        counts = await pipeline.admin.counts()
    except (UnavailableError, DatabaseError):
        return 0  # What needs the sink or the ledger reports that it is away.
    return counts.keys - counts.tombstones


async def report_empty_sink(pipeline: OpenPipeline) -> None:
    """Emit `SinkEmpty` if the sink has lost what the ledger has marked. Called once, before the consumer starts."""
    if keys := await keys_missing(pipeline):
        pipeline.emit(events.SinkEmpty(pipeline=pipeline.name, keys=keys, advice=advice_of(pipeline)))


def advice_of(pipeline: OpenPipeline) -> str:
    """Return how to fill an empty sink: messages that were applied once are refused as duplicates."""
    if pipeline.shard_ledger is not None:
        return f"to write every row of the origin again, run keywise reindex start {pipeline.name}"
    return (
        "messages at the same versions are refused as duplicates; either name an origin and run keywise reindex start "
        f"{pipeline.name}, or run keywise reset --era and let upstream send everything again"
    )
