"""The workers of the commit strategies without a lease: decide, write and mark in one transaction."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeAlias

import msgspec

from keywise.core import events
from keywise.core.backoff import shortened
from keywise.core.change import Change, ChangeHeader, Delivery, Outcome
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Refusal, RefusalReason
from keywise.core.errors import TransactionFailedError, UnavailableError
from keywise.core.failures import cause_of_error, cause_of_refusal, concerns_key, is_permanent, look_again_s
from keywise.core.limits import Snooze
from keywise.core.rules import MOVE_LOOK_S
from keywise.core.sink import AtomicSink, is_atomic
from keywise.core.source import Source, TransactionalQueue, TransactionalSource
from keywise.core.tracebacks import traceback_of
from keywise.core.transaction import Transaction
from keywise.flow.coalesce import Coalesced, coalesce
from keywise.flow.dead_letters import identity_of, stored_since
from keywise.flow.intake import ReadBatch
from keywise.flow.lanes import (
    LIVE_BEFORE_BULK,
    Lanes,
    SettledByOutcome,
    SettledTicket,
    Ticket,
    is_at_or_below,
    outcome_of_follower,
)
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.settlement import Settlement

BULK_PART = 12
"""A bulk batch is this many times smaller than the largest batch, because live changes may have to wait for it."""

PARKED_KEYS_MAX = 10_000

Decide: TypeAlias = Callable[[Sequence[ChangeHeader]], Awaitable[dict[str, Refusal]]]
"""`Transaction.decide`, or `decide_and_mark` in its place."""


class BatchResult(msgspec.Struct):
    """The result of one transaction over a batch with one change per key."""

    applied: list[Ticket] = []
    refused: list[tuple[Ticket, Refusal]] = []
    """Stale, duplicate or removed."""
    waiting: list[tuple[Ticket, float]] = []
    """Busy, deferred or failed, with the seconds to wait."""
    blocks_newer: set[str] = set()
    """Keys in `waiting` whose newer changes must wait as well."""
    paused: set[str] = set()
    """Keys in `waiting` that an operator has paused."""
    dead_lettered: list[Ticket] = []
    to_emit: list[events.Event] = []
    """Events to emit once the transaction has committed."""


class QueueBatch(msgspec.Struct):
    """A batch from a queue, decoded and coalesced. A prefetched one was prepared while the previous one was written.

    A prefetched batch holds no locks: another worker may take its messages before its transaction begins.
    """

    source: int = 0
    deliveries: Sequence[Delivery] = ()
    read_batch: ReadBatch = msgspec.field(default_factory=ReadBatch)
    coalesced: Coalesced = msgspec.field(default_factory=lambda: Coalesced([], {}))


class QueueTransactionWorker:
    """The worker for queues in the ledger's database: receive, decide, write, mark and ack in one transaction."""

    def __init__(
        self, pipeline: OpenPipeline, settlement: Settlement, sources: Sequence[int], going: asyncio.Event
    ) -> None:
        self._pipeline = pipeline
        self._settlement = settlement
        self._sink = _atomic(pipeline)
        self._sources = {index: _transactional(pipeline.sources[index][1]) for index in sources}
        self._live = [index for index in sources if index not in pipeline.bulk]
        self._bulk = [index for index in sources if index in pipeline.bulk]
        self._going = going
        """Cleared while the whole pipeline is paused."""
        self._live_in_row = 0
        self._bulk_is_due = False
        """So many live batches in a row were taken that a bulk batch goes next."""
        self._stopping = False
        self._waiting: list[asyncio.Task[bool]] = []
        self._prefetching: asyncio.Task[QueueBatch] | None = None
        self._unreachable = 0
        self._parked: set[str] = set()
        """Keys of which this worker has parked messages since a change of the key has ended."""

    def stop(self) -> None:
        self._stopping = True
        for waiting in self._waiting:
            waiting.cancel()

    async def run(self) -> None:
        try:
            await self._work()
        finally:
            if self._prefetching is not None:  # No batch will use it any more.
                self._prefetching.cancel()

    async def _work(self) -> None:
        while not self._stopping:
            try:
                await self._going.wait()
                if (index := await self._next()) is not None and not self._stopping:
                    await self._batch(index)
                self._unreachable = 0
                self._pipeline.report_answer("database")
            except _AllPausedError:
                # The messages stay in the queue. The consumer sets `going` again when the pause ends.
                self._going.clear()
            except _MovingError:
                await asyncio.sleep(MOVE_LOOK_S)
            except UnavailableError as error:
                # If the transaction has committed all the same, its messages were removed with it.
                self._unreachable += 1
                await self._pipeline.back_off("database", error, self._unreachable)

    async def _next(self) -> int | None:
        """Return the source to take from: live before bulk, but not for ever. None means: check again."""
        self._bulk_is_due = self._live_in_row >= LIVE_BEFORE_BULK
        for index in (*self._bulk, *self._live) if self._bulk_is_due else (*self._live, *self._bulk):
            if await self._sources[index].arrived(0.0):
                return index
        self._live_in_row = 0
        await self._arrival()
        return None

    async def _is_overtaken(self, index: int) -> bool:
        """Whether a live message arrived while a bulk batch waited for its transaction, and may go first."""
        if index in self._live or self._bulk_is_due:
            return False
        return any([await self._sources[live].arrived(0.0) for live in self._live])

    async def _arrival(self) -> None:
        """Wait until a message arrives, the poll interval passes, or the worker is stopped."""
        poll_s = self._pipeline.settings.poll_s
        sources = [self._sources[index] for index in (*self._live, *self._bulk)]
        self._waiting = [asyncio.ensure_future(source.arrived(poll_s)) for source in sources]
        try:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in self._waiting:
                waiting.cancel()
            self._waiting = []
        errors = [waiting.exception() for waiting in done if not waiting.cancelled()]
        for error in filter(None, errors):
            raise error

    async def _batch(self, index: int) -> None:
        """Write a batch as a whole; if one of its changes fails, roll back and repeat it with savepoints."""
        prefetched = await self._take_prefetched(index)
        try:
            await self._transaction(index, prefetched, careful=False)
        except BadBatchError:
            await self._transaction(index, prefetched, careful=True)

    async def _transaction(self, index: int, prefetched: QueueBatch, *, careful: bool) -> None:
        with ExitStack() as batch:
            await self._transact(index, prefetched, batch, careful=careful)

    async def _transact(self, index: int, prefetched: QueueBatch, batch: ExitStack, *, careful: bool) -> None:
        pipeline, limit, source = self._pipeline, self._limit(index), self._sources[index]
        async with _open_transaction(pipeline, careful=careful) as (transaction, decide):
            if await self._is_overtaken(index):
                return
            queue = source.queue_in(transaction.connection)
            deliveries = await queue.receive(limit, prefetched.deliveries)
            if not deliveries:
                return
            self._live_in_row = self._live_in_row + 1 if index in self._live else 0
            batch.enter_context(pipeline.batch(len(deliveries)))
            received = prefetched if deliveries is prefetched.deliveries else self._read(index, deliveries)
            read_batch, coalesced = received.read_batch, received.coalesced
            if len(deliveries) == limit and self._prefetching is None:
                # Prepare the next batch while the database is busy with this one.
                self._prefetching = asyncio.create_task(self._peek(index, deliveries[-1]))
            tickets = coalesced.survivors
            result = await transact(self._settlement, self._sink, transaction, decide, tickets, careful=careful)
            if result.paused:
                # Roll back: the messages stay in the queue as they are, instead of each being put off.
                controls = await pipeline.control_store.controls()
                if controls.is_paused:
                    raise _AllPausedError
                if controls.move is not None:
                    raise _MovingError
            settled = await self._end(index, transaction, queue, read_batch, coalesced, result)
            await queue.ack(_gone(deliveries, settled, read_batch))
            if freed := self._freed(settled):
                await queue.recall(sorted(freed))
        self._parked -= freed
        for event in result.to_emit:
            pipeline.emit(event)
        self._settlement.report_unread(read_batch)
        self._settlement.report_settled(settled)

    def _limit(self, index: int) -> int:
        """How many messages to receive. Bulk batches are short if live changes may have to wait for them."""
        limit = shortened(self._pipeline.settings.batch_max, self._unreachable)
        return max(1, limit // BULK_PART) if index in self._bulk and self._pipeline.has_both_lanes else limit

    def _read(self, index: int, deliveries: Sequence[Delivery]) -> QueueBatch:
        read_batch = self._pipeline.reader.read(deliveries, index, 0.0)
        return QueueBatch(index, deliveries, read_batch, coalesce(read_batch.tickets))

    async def _peek(self, index: int, after: Delivery) -> QueueBatch:
        try:
            deliveries = await self._sources[index].peek(self._limit(index), after)
        except UnavailableError:
            return QueueBatch()
        return self._read(index, deliveries)

    async def _take_prefetched(self, index: int) -> QueueBatch:
        """Return the prefetched batch if it came from this source, else an empty one."""
        task, self._prefetching = self._prefetching, None
        prefetched = await task if task is not None else QueueBatch()
        return prefetched if prefetched.source == index else QueueBatch(index)

    async def _end(
        self,
        index: int,
        transaction: Transaction,
        queue: TransactionalQueue,
        read_batch: ReadBatch,
        coalesced: Coalesced,
        result: BatchResult,
    ) -> SettledByOutcome:
        """Return what has settled, and delay the rest. Followers of a dead-lettered change stay for the next batch."""
        settled = _settled(coalesced, result)
        parked: list[tuple[Ticket, float]] = []
        for ticket, wait_s in result.waiting:
            # A paused key may wait for long, so all its changes stay away for longer each time. Of other keys the
            # newest comes back when it is due. Its followers are released with it the first time, then parked until it
            # has ended.
            behind = coalesced.followers.get(ticket.change.key, [])
            if ticket.change.key in result.paused:
                behind = [ticket, *behind]
            else:
                await queue.release([ticket.delivery], wait_s)
            parked += ((one, max(wait_s, self._away_s(one))) for one in behind)
        if parked:
            keys = [one.change.key for one, _ in parked]
            await queue.park([one.delivery for one, _ in parked], keys, [delay_s for _, delay_s in parked])
            self._note_parked(keys)
        if read_batch.malformed:
            unread = [self._settlement.unread_letter(bad, index) for bad in read_batch.malformed]
            await transaction.dead_letter([(None, letter) for letter in unread])
        return settled

    def _away_s(self, ticket: Ticket) -> float:
        count = ticket.delivery.count
        return self._pipeline.settings.evict_s(count - 1) if count > 1 else 0.0

    def _note_parked(self, keys: Iterable[str]) -> None:
        """Remember keys for `recall`. If there are too many, their messages come back after their delays."""
        self._parked.update(keys)
        if len(self._parked) > PARKED_KEYS_MAX:
            self._parked.clear()

    def _freed(self, settled: SettledByOutcome) -> set[str]:
        """Return the keys of which a change has ended, and of which messages are parked."""
        if not self._parked:
            return set()
        return self._parked.intersection(ticket.change.key for tickets in settled.values() for ticket in tickets)


def _settled(coalesced: Coalesced, result: BatchResult) -> SettledByOutcome:
    """Return the tickets that ended in a transaction, by outcome: survivors, and the followers that end with them."""
    others: list[SettledTicket] = [(ticket, Outcome.DEAD) for ticket in result.dead_lettered]
    for ticket, refusal in result.refused:
        assert refusal.mark is not None, "only a mark refuses a change for good"
        outcome = Outcome(refusal.reason.value)
        others.append((ticket, outcome))
        for other in coalesced.followers.get(ticket.change.key, ()):
            # A removed row is above the mark, and so may be a follower: that one stays for the next batch.
            if is_at_or_below(other, refusal.mark):
                others.append((other, outcome_of_follower(other, refusal.mark, outcome)))
    apart = {ticket.change.key for ticket, _ in (*others, *result.waiting)}
    settled = coalesced.followed(apart)
    for ticket, outcome in others:
        settled.setdefault(outcome, []).append(ticket)
    if result.applied:
        settled[Outcome.APPLIED] = result.applied
    return settled


def _gone(deliveries: Sequence[Delivery], settled: SettledByOutcome, read_batch: ReadBatch) -> Sequence[Delivery]:
    """Return the deliveries to ack. Usually that is the whole batch, which is then returned as it is."""
    unread = read_batch.unread
    if sum(map(len, settled.values())) + len(unread) == len(deliveries):
        return deliveries
    return [ticket.delivery for tickets in settled.values() for ticket in tickets] + unread


class LedgerTransactionWorker:
    """The worker for queues outside of the ledger's database: decide, write and mark in one transaction, then ack."""

    def __init__(self, pipeline: OpenPipeline, settlement: Settlement, lanes: Lanes) -> None:
        self._pipeline = pipeline
        self._settlement = settlement
        self._sink = _atomic(pipeline)
        self._lanes = lanes
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        self._lanes.arrivals.notify()

    async def run(self) -> None:
        unreachable = 0
        while not self._stopping:
            limit = shortened(self._pipeline.settings.batch_max, unreachable)
            bulk_limit = max(1, limit // BULK_PART) if self._pipeline.has_both_lanes else limit
            tickets = self._lanes.take(limit, self._pipeline.clock(), bulk_limit)
            if not tickets:
                await self._lanes.arrivals.wait(self._pipeline.until(self._lanes.next_due()))
                continue
            asked_at = self._pipeline.clock()
            try:
                tickets = await self._without_dead(tickets)
                if tickets:
                    await self._batch(tickets)
                unreachable = 0
                self._pipeline.outage.answered()
            except UnavailableError as error:
                # If the transaction has committed all the same, the next attempt finds duplicates and dead letters.
                for ticket in tickets:
                    if ticket.unanswered_at is None:
                        ticket.unanswered_at = asked_at
                    self._lanes.hold(ticket, self._pipeline.clock())
                unreachable += 1
                await self._pipeline.back_off("ledger", error, unreachable)

    async def _without_dead(self, tickets: list[Ticket]) -> list[Ticket]:
        """Settle changes whose dead letters were stored by a transaction that was not answered; return the others."""
        times = [ticket.unanswered_at for ticket in tickets if ticket.unanswered_at is not None]
        if not times:
            return tickets
        stored = await stored_since(self._pipeline, min(times), len(tickets))
        left, settled = list[Ticket](), list[SettledTicket]()
        for ticket in tickets:
            cause = stored.get(identity_of(self._settlement.letter(ticket, "")))
            if ticket.unanswered_at is None or cause is None:
                left.append(ticket)
            else:
                self._pipeline.emit(self._settlement.dead_lettered(ticket, cause))
                settled += self._lanes.dead_letter(ticket)
        await self._settlement.settle(settled)
        return left

    async def _batch(self, tickets: list[Ticket]) -> None:
        """Write a batch as a whole; if one of its changes fails, roll back and repeat it with savepoints."""
        try:
            await self._transaction(tickets, careful=False)
        except BadBatchError:
            await self._transaction(tickets, careful=True)

    async def _transaction(self, tickets: list[Ticket], *, careful: bool) -> None:
        pipeline = self._pipeline
        with pipeline.batch(len(tickets)):
            async with _open_transaction(pipeline, careful=careful) as (transaction, decide):
                result = await transact(self._settlement, self._sink, transaction, decide, tickets, careful=careful)
        for event in result.to_emit:
            pipeline.emit(event)
        settled = self._finish(result)
        await self._settlement.settle(settled)
        self._lanes.departures.notify()

    def _finish(self, result: BatchResult) -> list[SettledTicket]:
        lanes, settled = self._lanes, list[SettledTicket]()
        for ticket in result.applied:
            settled += lanes.finish(ticket, Outcome.APPLIED, ticket.change.order)
        for ticket, refusal in result.refused:
            assert refusal.mark is not None, "only a mark refuses a change for good"
            settled += lanes.finish(ticket, Outcome(refusal.reason.value), refusal.mark)
        for ticket in result.dead_lettered:
            settled += lanes.dead_letter(ticket)
        for ticket, wait_s in result.waiting:
            lanes.hold(ticket, self._pipeline.clock() + wait_s, blocks_newer=ticket.change.key in result.blocks_newer)
        return settled


class _AllPausedError(Exception):
    """The whole pipeline is paused; the batch stays in the queue."""


class _MovingError(Exception):
    """A swap holds up all keys for some seconds; the batch stays in the queue."""


class BadBatchError(Exception):
    """A change of the batch cannot be written: the transaction is rolled back and repeated with savepoints."""


def _atomic(pipeline: OpenPipeline) -> AtomicSink:
    assert is_atomic(pipeline.sink), "these strategies write inside the ledger's transaction"
    return pipeline.sink


def _transactional(source: Source) -> TransactionalSource:
    assert isinstance(source, TransactionalSource), "only such a source has this strategy"
    return source


@asynccontextmanager
async def _open_transaction(pipeline: OpenPipeline, *, careful: bool) -> AsyncIterator[tuple[Transaction, Decide]]:
    """Open a transaction, and say how to decide in it.

    A batch that is not careful is rolled back unless all of it is written and marked, so it may be marked early.
    """
    if careful or pipeline.marking_ledger is None:
        async with pipeline.ledger.transaction() as transaction:
            yield transaction, transaction.decide
    else:
        try:
            async with pipeline.marking_ledger.marking_transaction() as marking:
                yield marking, marking.decide_and_mark
        except TransactionFailedError as error:
            raise BadBatchError from error


async def transact(
    settlement: Settlement,
    sink: AtomicSink,
    transaction: Transaction,
    decide: Decide,
    tickets: Sequence[Ticket],
    *,
    careful: bool,
) -> BatchResult:
    """Decide, write and mark one change per key inside a transaction.

    A careful transaction uses savepoints and finds the changes that cannot be written. Any other one raises
    `BadBatchError` for them.
    """
    result = BatchResult()
    changes = [ticket.change for ticket in tickets]
    refusals = await decide(changes)
    granted = tickets
    if refusals:
        granted = [ticket for ticket in tickets if ticket.change.key not in refusals]
        changes = [ticket.change for ticket in granted]
        for ticket in tickets:
            if (refusal := refusals.get(ticket.change.key)) is not None:
                await _refuse(settlement, transaction, result, ticket, refusal)
    errors = (
        await write_all(transaction, sink, changes) if careful else await _write_at_once(transaction, sink, changes)
    )
    result.applied = [t for i, t in enumerate(granted) if i not in errors] if errors else list(granted)
    await transaction.mark([ticket.change for ticket in result.applied] if errors else changes)
    for index, error in errors.items():
        await _fail(settlement, transaction, result, granted[index], error)
    return result


async def _write_at_once(
    transaction: Transaction, sink: AtomicSink, changes: Sequence[Change[Any]]
) -> dict[int, Exception]:
    """Write without savepoints, which cost a third of the throughput on SQLite."""
    try:
        for start in range(0, len(changes), sink.batch_max):
            await sink.write(transaction, changes[start : start + sink.batch_max])
    except UnavailableError:
        raise
    except Exception as error:
        raise BadBatchError from error
    return {}


async def write_all(transaction: Transaction, sink: AtomicSink, changes: Sequence[Change[Any]]) -> dict[int, Exception]:
    """Write all changes that can be written; return the errors of the others, by index.

    A batch that fails is bisected until the changes that fail are found.
    """
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
            if end - start == 1 or isinstance(error, Snooze):
                # A snooze is a request of the handler, not an error of one change, so there is nothing to search for.
                errors |= dict.fromkeys(range(start, end), error)
            else:
                middle = (start + end) // 2
                pending += [(start, middle), (middle, end)]
    return errors


async def _refuse(
    settlement: Settlement,
    transaction: Transaction,
    result: BatchResult,
    ticket: Ticket,
    refusal: Refusal,
) -> None:
    match refusal.reason:
        case RefusalReason.STALE | RefusalReason.DUPLICATE | RefusalReason.REMOVED:
            result.refused.append((ticket, refusal))
        case RefusalReason.MIXED | RefusalReason.FORGOTTEN:
            # This change was never tried: keep the attempts of the other changes of the key.
            letter = settlement.letter(ticket, cause_of_refusal(refusal))
            await _dead_letter(settlement, transaction, result, ticket, letter, tried=False)
        case _:
            result.waiting.append((ticket, look_again_s(refusal, settlement.pipeline.rng)))
            if refusal.reason is RefusalReason.PAUSED:
                result.paused.add(ticket.change.key)
            if concerns_key(refusal):
                result.blocks_newer.add(ticket.change.key)


async def _fail(
    settlement: Settlement,
    transaction: Transaction,
    result: BatchResult,
    ticket: Ticket,
    error: Exception,
) -> None:
    if isinstance(error, Snooze):
        result.waiting.append((ticket, error.delay_s))
        return
    cause, traceback = cause_of_error(error), traceback_of(error)
    [attempts] = await transaction.fail([ticket.change])
    if is_permanent(error) or attempts >= settlement.pipeline.settings.attempts_max:
        letter = settlement.letter(ticket, cause, traceback)
        await _dead_letter(settlement, transaction, result, ticket, letter)
        return
    retry_s = settlement.pipeline.retry_s(attempts)
    result.waiting.append((ticket, retry_s))
    result.to_emit.append(settlement.failed(ticket, cause, attempts, retry_s, traceback))


async def _dead_letter(
    settlement: Settlement,
    transaction: Transaction,
    result: BatchResult,
    ticket: Ticket,
    letter: DeadLetter,
    *,
    tried: bool = True,
) -> None:
    await transaction.dead_letter([(ticket.change if tried else None, letter)])
    result.dead_lettered.append(ticket)
    result.to_emit.append(settlement.dead_lettered(ticket, letter.cause, letter.traceback))
