"""The consumer: it runs one pipeline in this process until it is stopped."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from keywise.core import events
from keywise.core.change import Delivery
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.sink import is_atomic
from keywise.core.source import RedrivingSource
from keywise.flow.dead_letters import DeadLetterStep
from keywise.flow.degraded.worker import DegradedWorker
from keywise.flow.eviction import EvictionQueue
from keywise.flow.heartbeat import Heartbeat, HeartbeatThread
from keywise.flow.intake import ReadBatch
from keywise.flow.lanes import Lanes
from keywise.flow.leased.executors import Executor, SinkExecutor, TransactionExecutor
from keywise.flow.leased.worker import Fallback, LeasedWorker, WaitForLedger
from keywise.flow.maintenance import Maintenance
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.settlement import Settlement
from keywise.flow.strategy import CommitStrategy, choose_strategy
from keywise.flow.transactional import LedgerTransactionWorker, QueueTransactionWorker

LOOK_S = 1.0
"""How often the consumer reads the operator's controls."""

DRAIN_LOOK_S = 5.0
"""How often the consumer reports what a drain waits for."""
KEYS_SHOWN = 5


class Worker(Protocol):
    """Takes changes from the lanes, or directly from the queue, and processes them until they are settled."""

    async def run(self) -> None:
        """Work until `stop` is called and the work that had begun is finished."""

    def stop(self) -> None: ...


class Consumer:
    """Runs one pipeline: it feeds the lanes from the sources, starts the workers, and drains them at the end."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._pipeline = pipeline
        self._settlement = Settlement(pipeline)
        self._lanes = Lanes(pipeline.settings.prefetch, bulk=pipeline.bulk, debounce=pipeline.debounce)
        self._stop = asyncio.Event()
        self._going = asyncio.Event()
        """Cleared while the whole pipeline is paused, and until the controls have been read for the first time."""
        if pipeline.journal_store is not None:
            # This pipeline writes even if the ledger is down, so it must not wait for the controls either.
            self._going.set()
        self._was_paused = False
        self._cut_off: list[str] = []
        """The keys whose changes were still running when the drain had to end."""
        self._asked = [0] * len(pipeline.sources)
        """How many deliveries each source is being asked for by a `receive` that is under way."""
        self._evictions = [EvictionQueue(self._settlement) for _ in pipeline.sources]
        self._redriving = [source if isinstance(source, RedrivingSource) else None for _, source in pipeline.sources]
        self._heartbeat = Heartbeat(
            lease_s=pipeline.settings.lease_s,
            margin_s=pipeline.settings.margin_s,
            runtime_max_s=pipeline.settings.runtime_max_s,
            clock=pipeline.clock,
            lost=self._lost,
        )

    def stop(self) -> None:
        """Take no more deliveries, finish the changes that have begun, and release the others to their sources."""
        self._stop.set()
        self._going.set()
        self._lanes.departures.notify()

    def left_now(self) -> events.Stopped:
        """Return how this consumer would end now, with what is running; it emits nothing."""
        return self._stopped(self._lanes.busy_keys())

    async def run(self) -> None:
        """Work until stopped. If it is cancelled, it ends at once: nothing is released, and leases expire."""
        thread = self._start_heartbeat_thread()
        try:
            await self._run(beats_here=thread is None)
        except BaseExceptionGroup as group:
            # Callers expect the error itself; the others in the group are consequences of the first.
            raise _first(group) from None
        finally:
            if thread is not None:
                thread.stop()
        self._pipeline.emit(self._stopped(self._cut_off))

    def _stopped(self, running: Sequence[str]) -> events.Stopped:
        return events.Stopped(pipeline=self._pipeline.name, changes=len(running), keys=running[:KEYS_SHOWN])

    async def _run(self, beats_here: bool) -> None:
        strategies = [choose_strategy(self._pipeline, source) for _, source in self._pipeline.sources]
        for strategy, (name, _) in zip(strategies, self._pipeline.sources, strict=True):
            grade = self._pipeline.grade.value
            self._pipeline.emit(
                events.Started(pipeline=self._pipeline.name, strategy=strategy.value, grade=grade, source=name)
            )
        if self._pipeline.journal_store is not None and self._pipeline.has_suspects and self._pipeline.refetch is None:
            self._pipeline.emit(events.Unrepairable(pipeline=self._pipeline.name))
        self._pipeline.enable_fair_writes()
        await self._refresh_controls()
        async with asyncio.TaskGroup() as group:
            acts = (self._extend, self._keep_looking, self._recall, *(one.run for one in self._evictions))
            background = [group.create_task(act()) for act in acts]
            maintenance = Maintenance(self._pipeline)
            group.create_task(maintenance.run())
            if beats_here:
                background.append(group.create_task(self._heartbeat.run(self._pipeline.ledger)))
            feeding = [
                group.create_task(self._feed(i))
                for i, strategy in enumerate(strategies)
                if strategy is not CommitStrategy.QUEUE_TRANSACTION
            ]
            workers = self._workers(strategies)
            working = [group.create_task(worker.run()) for worker in workers]
            await self._stop.wait()
            await self._drain(feeding, workers, working)
            maintenance.stop()
            for task in background:
                task.cancel()

    def _workers(self, strategies: Sequence[CommitStrategy]) -> list[Worker]:
        """Make one worker for all sources in the ledger's database, and one for all other sources together.

        The other sources share one strategy, because strategies differ only by the sink once `QUEUE_TRANSACTION` is
        out of the question.
        """
        transactional = [
            index for index, strategy in enumerate(strategies) if strategy is CommitStrategy.QUEUE_TRANSACTION
        ]
        workers: list[Worker] = (
            [QueueTransactionWorker(self._pipeline, self._settlement, transactional, self._going)]
            if transactional
            else []
        )
        shared = next((strategy for strategy in strategies if strategy is not CommitStrategy.QUEUE_TRANSACTION), None)
        if shared is CommitStrategy.LEDGER_TRANSACTION:
            workers.append(LedgerTransactionWorker(self._pipeline, self._settlement, self._lanes))
        elif shared is not None:
            workers.append(self._leased_worker())
        return workers

    def _leased_worker(self) -> LeasedWorker:
        pipeline, settlement, lanes, sink = self._pipeline, self._settlement, self._lanes, self._pipeline.sink
        executor: Executor
        if pipeline.objects is not None:
            executor = pipeline.objects.executor(pipeline, settlement, self._heartbeat)
        elif is_atomic(sink):
            executor = TransactionExecutor(pipeline, sink, self._heartbeat)
        else:
            executor = SinkExecutor(pipeline, sink, self._heartbeat)
        fallback: Fallback = WaitForLedger()
        if pipeline.journal_store is not None:
            fallback = DegradedWorker(pipeline, settlement, lanes, executor, pipeline.journal_store)
        return LeasedWorker(pipeline, settlement, lanes, self._heartbeat, executor, fallback)

    async def _feed(self, index: int) -> None:
        """Receive from one source and fill the lanes, within their capacity."""
        pipeline, (name, source) = self._pipeline, self._pipeline.sources[index]
        unreachable = 0
        while await self._is_going():
            self._evict_blocked()
            await self._evictions[index].until_idle()
            limit = self._asked[index] = self._room_to_ask_for(index)
            if limit == 0:
                # A lane that becomes blocked meanwhile has to make room, though nothing departs.
                now = pipeline.clock()
                await self._lanes.departures.wait(pipeline.until(self._lanes.next_blocked(now)))
                continue
            try:
                deliveries = await source.receive(limit, pipeline.settings.poll_s)
                unreachable = 0
                pipeline.report_answer(name)
            except UnavailableError as error:
                unreachable += 1
                await pipeline.back_off(name, error, unreachable)
                continue
            finally:
                self._asked[index] = 0
            await self._take_in(index, deliveries)
            if len(self._asked) > 1:
                self._lanes.departures.notify()

    def _room_to_ask_for(self, index: int) -> int:
        """How many deliveries to ask this source for.

        All sources receive at the same time, so the deliveries that the others have asked for need room as well.
        """
        sources, others = len(self._asked), sum(self._asked) - self._asked[index]
        room = min(self._lanes.room_for(index), self._lanes.room - others)
        most = min(max(1, self._lanes.capacity // sources), self._pipeline.settings.batch_max)
        # While enough lanes are ready, wait until a receive is worth its round trips. Lanes that are not ready do not
        # count: what is received may be for an idle key, which must not wait for them.
        least = most // 2 if self._lanes.ready_for(index) >= most // 2 else 1
        return max(0, min(room, most)) if room >= least else 0

    async def _is_going(self) -> bool:
        """Wait while the pipeline is paused; False once it is stopped, paused or not."""
        await self._going.wait()
        return not self._stop.is_set()

    async def _take_in(self, index: int, deliveries: Sequence[Delivery]) -> None:
        pipeline = self._pipeline
        read_batch = pipeline.reader.read(deliveries, index, pipeline.clock())
        if (redriving := self._redriving[index]) is not None:
            _take_out_last_deliveries(read_batch, redriving)
        self._lanes.add(read_batch.tickets)
        self._lanes.arrivals.notify()
        if read_batch.unread:
            await self._set_aside(index, read_batch)

    def _evict_blocked(self) -> None:
        """Release waiting changes of blocked keys, so that they do not use up the room of healthy keys."""
        for ticket in self._lanes.evict_blocked(self._pipeline.clock()):
            self._evictions[ticket.source].add([ticket])

    async def _recall(self) -> None:
        """Bring back what was released because its key was blocked, as soon as a change of the key has ended."""
        while True:
            await self._lanes.freed.wait()
            freed = self._lanes.take_freed()
            for eviction in self._evictions:
                eviction.note_freed(freed)
            await self._settlement.recall(freed)

    async def _set_aside(self, index: int, read_batch: ReadBatch) -> None:
        """Dead-letter malformed and last deliveries, and ack them and the ignored ones."""
        pipeline, settlement = self._pipeline, self._settlement
        letters = [settlement.unread_letter(bad, index) for bad in read_batch.malformed]
        letters += [settlement.letter(ticket, cause) for ticket, cause in read_batch.last]
        requests = [DeadLetterRequest(letter) for letter in letters]
        if requests:
            try:
                await pipeline.retry_until_reachable(LEDGER, DeadLetterStep(pipeline, requests))
            except UnavailableError:
                # A dead letter is stored in the ledger. Until the ledger is back, the message is redelivered.
                await settlement.release_unread(index, read_batch.dead)
                read_batch = ReadBatch(ignored=read_batch.ignored, misdirected=read_batch.misdirected)
        settlement.report_unread(read_batch)
        await settlement.ack_unread(index, read_batch)

    async def _keep_looking(self) -> None:
        """Read the operator's controls and emit the counts of the lanes, about once a second."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._refresh_controls()
            self._pipeline.report_restored()
            live, bulk, busy, held = self._lanes.counts()
            name = self._pipeline.name
            self._pipeline.emit(events.Waiting(pipeline=name, live=live, bulk=bulk, busy=busy, held=held))

    async def _refresh_controls(self) -> None:
        """Read the operator's controls, and stop or resume taking changes accordingly.

        If the controls cannot be read, the last ones stay in force. That is safe: the ledger itself refuses each
        claim of a paused key.
        """
        try:
            controls = await self._pipeline.control_store.controls()
        except UnavailableError as error:
            self._pipeline.outage.failed(str(error), at_write=False)
            if not (self._going.is_set() or self._was_paused):
                # No worker has started yet, so no other part of the consumer would report the outage.
                self._pipeline.count_unavailable(LEDGER, error, LOOK_S)
            return
        self._pipeline.outage.answered(at_write=False)
        self._pipeline.controls = controls
        if controls.is_paused and not self._stop.is_set():
            self._going.clear()
        else:
            self._going.set()
        if controls.is_paused != self._was_paused:
            self._was_paused = controls.is_paused
            kind = events.Paused if controls.is_paused else events.Resumed
            self._pipeline.emit(kind(pipeline=self._pipeline.name))

    async def _extend(self) -> None:
        """Extend the visibility timeout of all deliveries that wait or are being processed."""
        shortest_s = min(
            (s.visibility_s for _, s in self._pipeline.sources if s.visibility_s is not None), default=None
        )
        while shortest_s is not None:
            await asyncio.sleep(shortest_s / 6)
            await self._settlement.extend(self._lanes.tickets(), age=1 / 3)

    async def _drain(
        self, feeding: Sequence[asyncio.Task[None]], workers: Sequence[Worker], working: Sequence[asyncio.Task[None]]
    ) -> None:
        reporting = asyncio.create_task(self._report_draining())
        for worker in workers:
            worker.stop()
        try:
            async with asyncio.timeout(self._pipeline.settings.drain_s):
                await asyncio.gather(*feeding, *working)
                await asyncio.gather(*(one.until_idle() for one in self._evictions))
                await self._settlement.release(self._lanes.drain(), 0.0)
                await self._settlement.recall(self._lanes.take_freed())
        except TimeoutError:
            # The outcome of a change that still runs is unknown: do not release it, let its lease expire.
            self._cut_off = self._lanes.busy_keys()
            for task in (*feeding, *working):
                task.cancel()
        finally:
            reporting.cancel()

    async def _report_draining(self) -> None:
        """Emit what the drain waits for, at once and every few seconds."""
        pipeline = self._pipeline
        ends_at = pipeline.clock() + pipeline.settings.drain_s
        while True:
            keys, left_s = self._lanes.busy_keys(), max(0.0, ends_at - pipeline.clock())
            event = events.Draining(pipeline=pipeline.name, changes=len(keys), keys=keys[:KEYS_SHOWN], left_s=left_s)
            pipeline.emit(event)
            await asyncio.sleep(DRAIN_LOOK_S)

    def _start_heartbeat_thread(self) -> HeartbeatThread | None:
        if self._pipeline.connect_heartbeat is None:
            return None
        thread = HeartbeatThread(self._heartbeat, self._pipeline.connect_heartbeat)
        thread.start()
        return thread

    def _lost(self, claim: Claim) -> None:
        self._pipeline.emit(events.ClaimLost(pipeline=self._pipeline.name, key=claim.key))


def _take_out_last_deliveries(read_batch: ReadBatch, source: RedrivingSource) -> None:
    """Turn changes that their source cannot deliver again into dead letters, before anything can interrupt them."""
    causes = [(ticket, source.last_delivery(ticket.delivery)) for ticket in read_batch.tickets]
    read_batch.last = [(ticket, cause) for ticket, cause in causes if cause]
    read_batch.tickets = [ticket for ticket, cause in causes if not cause]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group: the one that stopped all other tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
