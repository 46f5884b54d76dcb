"""Writes objects whose records are changes with keys and versions of their own: a pipeline of records applies them."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from keywise.core.change import Change, Delivery, Outcome
from keywise.core.entry import Claim
from keywise.core.record import OBJECT_HEADER, Record
from keywise.core.sink import Grade, SinkResult
from keywise.flow.handover import Handover, HandoverQueue
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.portion import Portion, PortionState
from keywise.ingest.portion_writers import LedgerSteps, WriteFailedError

SETTLE_S = 60.0
"""How long an object waits for the records of a part. After that it gives way, and goes on there later."""
SHARED_SETTLE_S = 2.0
"""How long objects that are written together wait for each other. A record may be paused, or wait for a retry."""


class EnvelopeWriter:
    """Hands records to the pipeline of records, and keeps the position once all of a portion have ended.

    The ledger of the records decides about each of them, so a portion that is repeated does no harm.
    """

    fails_clean = True
    finds_records = True

    def __init__(
        self, pipeline: OpenPipeline, heartbeat: Heartbeat, queue: HandoverQueue, stopping: asyncio.Event
    ) -> None:
        self._heartbeat = heartbeat
        self._steps = LedgerSteps(pipeline, heartbeat)
        self._queue = queue
        self._stopping = stopping

    async def write(self, portions: Sequence[Portion]) -> None:
        """Write portions; one whose records have not ended while others have stays open."""
        handovers = [self._queue.put(_deliveries_of(one)) for one in portions]
        try:
            with self._heartbeat.limit([one.claim for one in portions]):
                await self._wait(handovers)
        finally:
            for handover in handovers:
                self._queue.forget(handover)
        ended = [one for one, handover in zip(portions, handovers, strict=True) if handover.ended.is_set()]
        await self._steps.store_letters(ended)
        followed = [one for one in ended if one.content is None]
        if followed:
            await self._steps.advance(followed, [one.advance for one in followed])
        for one in ended:
            one.state = PortionState.WRITTEN
        await self._steps.commit([one for one in ended if one.content is not None])

    async def _wait(self, handovers: Sequence[Handover]) -> None:
        """Wait until all records have ended, also as dead letters, or for as long as the others may wait.

        Raises if the records of no portion have ended by then, or before the worker stops.
        """
        ending = asyncio.gather(*(handover.ended.wait() for handover in handovers))
        stopping = asyncio.ensure_future(self._stopping.wait())
        waits: set[asyncio.Future[Any]] = {ending, stopping}
        wait_s = SETTLE_S if len(handovers) == 1 else SHARED_SETTLE_S
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            stopping.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not any(handover.ended.is_set() for handover in handovers):
            left = sum(len(handover.waiting) for handover in handovers)
            cause = f"{left} records of a part have not ended yet; the object goes on later"
            raise WriteFailedError(SinkResult(Outcome.BUSY, cause, wait_s=0.0))


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


def _deliveries_of(portion: Portion) -> list[Delivery]:
    """Return the records of a portion. What an earlier content had in place of a bad one is a change like any other."""
    return [_delivery_of(record, portion.sent_at) for record in portion.records if not record.deleted]


def _delivery_of(record: Record[Any], sent_at: float) -> Delivery:
    headers = {OBJECT_HEADER: record.object, "ordinal": str(record.ordinal)}
    identity = f"{record.key}@{'.'.join(map(str, record.order))}"
    return Delivery(identity, 0, record.body, sent_at, headers=headers)
