"""The ways of an atomic batch that takes no claim: decide, write and mark in one transaction."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from keywise import events
from keywise.causes import cause_of_error, cause_of_refusal, is_permanent, look_again_s
from keywise.change import Change, Delivery, Outcome
from keywise.envelope import Readings
from keywise.errors import UnavailableError
from keywise.lanes import Ended, Endings, Fold, Lanes, Ticket, fold, grouped
from keywise.news import News
from keywise.pipeline import Pipeline
from keywise.protocols import AtomicSink, Inlet, InlineSource, Transaction
from keywise.rules import Answer, Refusal

PEEK_AFTER_S = 0.0002


class Worked(msgspec.Struct):
    """What a transaction made of a batch with one change per key."""

    applied: list[Ticket] = []
    refused: list[tuple[Ticket, Refusal]] = []
    """Stale or duplicate."""
    waiting: list[tuple[Ticket, float]] = []
    """Busy, deferred or failed, with the seconds to wait."""
    buried: list[Ticket] = []
    news: list[events.Event] = []
    """To be told once the transaction has committed."""


class Ahead(msgspec.Struct):
    """A batch that was read before it was its turn; it may be gone by then."""

    deliveries: Sequence[Delivery] = ()
    readings: Readings = msgspec.field(default_factory=Readings)


class OneTransaction:
    """Receive, decide, write, mark and ack in one transaction: the queue lives in the ledger's database."""

    def __init__(self, pipeline: Pipeline, source: int) -> None:
        self._pipeline = pipeline
        self._index = source
        self._stopping = False
        self._waiting: asyncio.Task[bool] | None = None
        self._ahead: asyncio.Task[Ahead] | None = None

    def stop(self) -> None:
        self._stopping = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> None:
        source: InlineSource = self._pipeline.sources[self._index][1]  # type: ignore[assignment]
        unreachable = 0
        while not self._stopping:
            try:
                if await source.arrived(0.0) or await self._arrived(source):
                    await self._batch(source)
                unreachable = 0
            except UnavailableError as error:
                # If the transaction arrived all the same, its messages are gone with it.
                unreachable += 1
                await self._pipeline.pause("database", error, unreachable)

    async def _arrived(self, source: InlineSource) -> bool:
        """Wait for a message, or for the stop."""
        waiting = self._waiting = asyncio.ensure_future(source.arrived(self._pipeline.settings.poll_s))
        await asyncio.wait([waiting])
        self._waiting = None
        return not waiting.cancelled() and waiting.result()

    async def _batch(self, source: InlineSource) -> None:
        """The whole batch at once first; if one of its changes is bad, again and carefully."""
        ahead = await self._read_ahead()
        try:
            await self._transaction(source, ahead, careful=False)
        except BadBatchError:
            await self._transaction(source, ahead, careful=True)

    async def _transaction(self, source: InlineSource, ahead: "Ahead", *, careful: bool) -> None:
        with ExitStack() as batch:
            await self._transact(source, ahead, batch, careful=careful)

    async def _transact(self, source: InlineSource, ahead: "Ahead", batch: ExitStack, *, careful: bool) -> None:
        pipeline, limit = self._pipeline, self._pipeline.settings.batch_max
        async with pipeline.ledger.transaction() as transaction:
            inlet = source.inlet(transaction.connection)
            deliveries = await inlet.receive(limit, ahead.deliveries)
            if not deliveries:
                return
            batch.enter_context(pipeline.batch(len(deliveries)))
            readings = ahead.readings if deliveries is ahead.deliveries else self._read(deliveries)
            folded = fold(readings.tickets)
            worked = await transact(pipeline, transaction, folded.survivors, careful=careful)
            ended = await self._end(transaction, inlet, readings, folded, worked)
            if len(deliveries) == limit:
                # The next batch is read and decoded while this one is made durable.
                self._ahead = asyncio.create_task(self._peek(source, deliveries[-1]))
        for event in worked.news:
            pipeline.emit(event)
        pipeline.tell_unread(readings)
        pipeline.tell_ended(ended)

    def _read(self, deliveries: Sequence[Delivery]) -> Readings:
        return self._pipeline.envelope.read(deliveries, self._index, 0.0)

    async def _peek(self, source: InlineSource, after: Delivery) -> "Ahead":
        # The commit has to be on its way first: its thread cannot begin while this one is busy.
        await asyncio.sleep(PEEK_AFTER_S)
        try:
            deliveries = await source.peek(self._pipeline.settings.batch_max, after)
        except UnavailableError:
            return Ahead()
        return Ahead(deliveries, self._read(deliveries))

    async def _read_ahead(self) -> "Ahead":
        ahead, self._ahead = self._ahead, None
        return await ahead if ahead is not None else Ahead()

    async def _end(
        self, transaction: Transaction, inlet: Inlet, readings: Readings, folded: Fold, worked: Worked
    ) -> Endings:
        """Ack what has ended and put off the rest; followers of a buried change stay for the next batch."""
        ended = _endings(folded, worked)
        for ticket, wait_s in worked.waiting:
            together = [ticket, *folded.followers.get(ticket.change.key, ())]
            await inlet.release([one.delivery for one in together], wait_s)
        if readings.malformed:
            unread = [self._pipeline.unread_letter(*bad, self._index) for bad in readings.malformed]
            await transaction.bury([(None, letter) for letter in unread])
        gone = [ticket.delivery for tickets in ended.values() for ticket in tickets]
        gone += (delivery for delivery, _ in (*readings.malformed, *readings.ignored))
        await inlet.ack(gone)
        return ended


def _endings(folded: Fold, worked: Worked) -> Endings:
    """What ended together in a transaction: survivors, and whoever followed them."""
    others: list[Ended] = [(ticket, Outcome.DEAD) for ticket in worked.buried]
    for ticket, refusal in worked.refused:
        others.append((ticket, Outcome(refusal.answer.value)))
        for other in folded.followers.get(ticket.change.key, ()):
            is_same = other.change.order == refusal.mark
            others.append((other, Outcome.DUPLICATE if is_same else Outcome.STALE))
    apart = {ticket.change.key for ticket, _ in (*others, *worked.waiting)}
    others += folded.followed(apart)
    ended = grouped(others)
    if worked.applied:
        ended[Outcome.APPLIED] = worked.applied
    return ended


class ClaimInTransaction:
    """Decide, write and mark in one transaction; the ack follows it, because the queue is elsewhere."""

    def __init__(self, pipeline: Pipeline, lanes: Lanes, news: News, room: News) -> None:
        self._pipeline = pipeline
        self._lanes = lanes
        self._news = news
        self._room = room
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        self._news.tell()

    async def run(self) -> None:
        unreachable = 0
        while not self._stopping:
            tickets = self._lanes.take(self._pipeline.settings.batch_max, self._pipeline.clock())
            if not tickets:
                await self._news.wait(self._pipeline.until(self._lanes.next_due()))
                continue
            try:
                await self._batch(tickets)
                unreachable = 0
            except UnavailableError as error:
                # If the transaction arrived all the same, the next try finds duplicates.
                for ticket in tickets:
                    self._lanes.hold(ticket, self._pipeline.clock())
                unreachable += 1
                await self._pipeline.pause("ledger", error, unreachable)

    async def _batch(self, tickets: list[Ticket]) -> None:
        """The whole batch at once first; if one of its changes is bad, again and carefully."""
        try:
            await self._transaction(tickets, careful=False)
        except BadBatchError:
            await self._transaction(tickets, careful=True)

    async def _transaction(self, tickets: list[Ticket], *, careful: bool) -> None:
        pipeline = self._pipeline
        with pipeline.batch(len(tickets)):
            async with pipeline.ledger.transaction() as transaction:
                worked = await transact(pipeline, transaction, tickets, careful=careful)
        for event in worked.news:
            pipeline.emit(event)
        ended = self._finish(worked)
        await pipeline.settle(ended)
        self._room.tell()

    def _finish(self, worked: Worked) -> list[Ended]:
        lanes, ended = self._lanes, list[Ended]()
        for ticket in worked.applied:
            ended += lanes.finish(ticket, Outcome.APPLIED, ticket.change.order)
        for ticket, refusal in worked.refused:
            assert refusal.mark is not None, "only a mark makes a change stale"
            ended += lanes.finish(ticket, Outcome(refusal.answer.value), refusal.mark)
        for ticket in worked.buried:
            ended += lanes.bury(ticket)
        for ticket, wait_s in worked.waiting:
            lanes.hold(ticket, self._pipeline.clock() + wait_s)
        return ended


class BadBatchError(Exception):
    """A change of the batch cannot be written; the transaction has to be rolled back and run again, carefully."""


async def transact(pipeline: Pipeline, transaction: Transaction, tickets: Sequence[Ticket], *, careful: bool) -> Worked:
    """Bring one change per key to an end, inside a transaction; only a careful one finds out which of them is bad."""
    worked = Worked()
    refusals = await transaction.decide([ticket.change for ticket in tickets])
    granted = tickets
    if refusals:
        granted = [ticket for ticket in tickets if ticket.change.key not in refusals]
        for ticket in tickets:
            if (refusal := refusals.get(ticket.change.key)) is not None:
                await _refuse(pipeline, transaction, worked, ticket, refusal)
    sink: AtomicSink = pipeline.sink  # type: ignore[assignment]
    changes = [ticket.change for ticket in granted]
    errors = (
        await write_all(transaction, sink, changes) if careful else await _write_at_once(transaction, sink, changes)
    )
    worked.applied = [t for i, t in enumerate(granted) if i not in errors] if errors else list(granted)
    await transaction.mark([ticket.change for ticket in worked.applied] if errors else changes)
    for index, error in errors.items():
        await _fail(pipeline, transaction, worked, granted[index], error)
    return worked


async def _write_at_once(
    transaction: Transaction, sink: AtomicSink, changes: Sequence[Change[Any]]
) -> dict[int, Exception]:
    """Write without savepoints, which would cost a third of the throughput on SQLite."""
    try:
        for start in range(0, len(changes), sink.batch_max):
            await sink.write(transaction, changes[start : start + sink.batch_max])
    except UnavailableError:
        raise
    except Exception as error:
        raise BadBatchError from error
    return {}


async def write_all(transaction: Transaction, sink: AtomicSink, changes: Sequence[Change[Any]]) -> dict[int, Exception]:
    """Write all changes but the bad ones, which are returned by index: the whole batch first, then by halves."""
    errors: dict[int, Exception] = {}
    size = sink.batch_max
    pending = [(start, min(start + size, len(changes))) for start in range(0, len(changes), size)]
    while pending:
        start, end = pending.pop()
        try:
            async with transaction.savepoint():
                await sink.write(transaction, changes[start:end])
        except UnavailableError:
            raise
        except Exception as error:
            if end - start == 1:
                errors[start] = error
            else:
                middle = (start + end) // 2
                pending += [(start, middle), (middle, end)]
    return errors


async def _refuse(
    pipeline: Pipeline, transaction: Transaction, worked: Worked, ticket: Ticket, refusal: Refusal
) -> None:
    match refusal.answer:
        case Answer.STALE | Answer.DUPLICATE:
            worked.refused.append((ticket, refusal))
        case Answer.MIXED | Answer.FORGOTTEN:
            # What goes on with the key is not this change's doing.
            await _bury(pipeline, transaction, worked, ticket, cause_of_refusal(refusal), tried=False)
        case _:
            worked.waiting.append((ticket, look_again_s(refusal, pipeline.rng)))


async def _fail(pipeline: Pipeline, transaction: Transaction, worked: Worked, ticket: Ticket, error: Exception) -> None:
    cause = cause_of_error(error)
    [attempts] = await transaction.fail([ticket.change])
    if is_permanent(error) or attempts >= pipeline.settings.attempts_max:
        await _bury(pipeline, transaction, worked, ticket, cause)
        return
    retry_s = pipeline.retry_s(attempts)
    worked.waiting.append((ticket, retry_s))
    worked.news.append(pipeline.failed(ticket, cause, attempts, retry_s))


async def _bury(
    pipeline: Pipeline, transaction: Transaction, worked: Worked, ticket: Ticket, cause: str, *, tried: bool = True
) -> None:
    await transaction.bury([(ticket.change if tried else None, pipeline.letter(ticket, cause))])
    worked.buried.append(ticket)
    worked.news.append(pipeline.buried(ticket, cause))
