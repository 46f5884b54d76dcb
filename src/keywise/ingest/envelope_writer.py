"""Writes objects whose records are changes with keys and versions of their own: a pipeline of records applies them."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from keywise.core.change import Change, Outcome
from keywise.core.entry import Claim
from keywise.core.record import Record
from keywise.core.sink import Grade, SinkResult
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.portion import Portion, PortionState
from keywise.ingest.portion_writers import LedgerSteps, WriteFailedError
from keywise.ingest.record_queue import RecordBatch, RecordQueue

SETTLE_S = 60.0
"""How long an object waits for the records of a part. After that it gives way, and goes on there later."""


class EnvelopeWriter:
    """Hands records to the pipeline of records, and keeps the position once all of a portion have ended.

    The ledger of the records decides about each of them, so a portion that is repeated does no harm.
    """

    fails_clean = True
    finds_records = True

    def __init__(
        self, pipeline: OpenPipeline, heartbeat: Heartbeat, queue: RecordQueue, stopping: asyncio.Event
    ) -> None:
        self._heartbeat = heartbeat
        self._steps = LedgerSteps(pipeline, heartbeat)
        self._queue = queue
        self._stopping = stopping

    async def write(self, portions: Sequence[Portion]) -> None:
        batches = [self._queue.put(_changes_of(one), one.sent_at) for one in portions]
        try:
            with self._heartbeat.limit([one.claim for one in portions]):
                await self._wait(batches)
        finally:
            for batch in batches:
                self._queue.forget(batch)
        await self._steps.store_letters(portions)
        followed = [one for one in portions if one.content is None]
        if followed:
            await self._steps.advance(followed, [one.advance for one in followed])
        for one in portions:
            one.state = PortionState.WRITTEN
        await self._steps.commit([one for one in portions if one.content is not None])

    async def keep(self, portion: Portion) -> None:
        pass

    async def _wait(self, batches: Sequence[RecordBatch]) -> None:
        """Wait until all records have ended, also as dead letters. Raises if that takes long or the worker stops."""
        ending = asyncio.gather(*(batch.ended.wait() for batch in batches))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            waits: set[asyncio.Future[Any]] = {ending, stopping}
            await asyncio.wait(waits, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                left = sum(len(batch.waiting) for batch in batches)
                cause = f"{left} records of a part have not ended yet; the object goes on later"
                raise WriteFailedError(SinkResult(Outcome.BUSY, cause, wait_s=0.0))
        finally:
            ending.cancel()
            stopping.cancel()


class RecordHandover:
    """What stands in for a sink where records go to another pipeline; nothing is written to it."""

    grade = Grade.CONDITIONAL
    forgets_deletions = False
    batch_max = 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        raise AssertionError("the executor of objects hands records over, and calls no sink")


def _changes_of(portion: Portion) -> list[Record[Any]]:
    """Return the records of a portion. What an earlier content had in place of a bad one is a change like any other."""
    return [record for record in portion.records if not record.deleted]
