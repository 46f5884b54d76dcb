"""The worker of a reindex: it claims shards, reads their rows page by page, and hands them to the pipeline.

It runs beside the consumer of a pipeline, in every process that runs the pipeline. Rows have a consumer of their own,
so live changes do not wait behind them in a lane.
"""

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import msgspec

from keywise.core import events
from keywise.core.change import Delivery
from keywise.core.controls import ReindexRun, RunState
from keywise.core.entry import Certainty, Claim, Refusal
from keywise.core.errors import AdminError, DatabaseError, ThrottledError, UnavailableError
from keywise.core.ledger import Failure
from keywise.core.origin import Origin, Page
from keywise.flow.availability import Availability
from keywise.flow.consumer import Consumer
from keywise.flow.handover import HandoverQueue
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.reindex.attempts import report_failure
from keywise.reindex.catch_up_stage import CatchUpStage, call_off_swap
from keywise.reindex.notice import is_notice_due, send_notice
from keywise.reindex.plan import check_page
from keywise.reindex.row_events import RowObserver
from keywise.reindex.row_governor import RowGovernor
from keywise.reindex.rows import RowReader, row_deliveries
from keywise.reindex.run_state import move_run
from keywise.reindex.shards import READ, ShardLedger, ShardProgress, is_finished, shard_key
from keywise.reindex.swap import SINK
from keywise.reindex.sweep import ORIGIN, Sweep

CANCEL_S = 2.0
"""How long a worker that is cancelled may take to end."""
CONSENT_LOOK_S = 600.0
"""How often a worker repeats a sweep that waits for the operator."""
LOST_LOOK_S = 30.0
"""How often a worker tries to open a target that cannot be used."""
LOOK_S = 1.0
"""How often a worker looks for a run, and for shards that another worker has let go."""
SHARDS_AT_ONCE = 2
"""How many shards one worker reads side by side: one is read while the rows of the other are written."""
PAGE_ROWS, PAGE_ROWS_MIN, PAGE_ROWS_STEP = 500, 10, 50
"""The most and the fewest rows of a page. Throttling by the origin halves the size, and each page without it adds a
step. If a worker is killed, the pages that it was writing, one for each of its shards, are read again."""
SETTLE_S = 60.0
"""How long a page waits for its first row to end. After that the worker releases the shard, to read the page again."""
QUIET_S = 5.0
"""How long a page waits for the next row to end. After that the rest of its rows are postponed to the sweep."""


class ReindexWorker:
    """Takes part in the runs of one pipeline until it is stopped."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        assert pipeline.origin is not None and pipeline.shard_ledger is not None, "only a pipeline with an origin"
        self._pipeline = pipeline
        self._origin: Origin = pipeline.origin
        self._owner = f"{pipeline.owner}-reindex"
        self._shards = ShardLedger(pipeline.shard_ledger, self._owner, pipeline.settings, pipeline.clock)
        self._stop = asyncio.Event()
        self._page_rows = PAGE_ROWS
        self._row_observers = pipeline.observers
        """The observers of rows: those of the pipeline without the governor, which observes live changes only."""
        self._governor = RowGovernor(pipeline.wall, pipeline.debounce.quiet_s if pipeline.debounce else 0.0)
        pipeline.observers = (*pipeline.observers, self._governor)
        self._readings = itertools.count()
        self._seen: tuple[int, str] | None = None
        """The generation and the stage of the run that was last reported."""
        self._awaited: tuple[ReindexRun, float] | None = None
        """A run whose sweep waits for the operator's consent, and when this worker repeats the sweep without it."""
        self._lost_target = ""
        """The last alarm about another target that cannot be used; empty if there was none."""

    def stop(self) -> None:
        """Read no more pages, and give the shards to other workers where they are."""
        self._stop.set()

    async def run(self) -> None:
        """Take part in runs until `stop`; then end what has begun, but not longer than a drain may take."""
        working = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([working], timeout=self._pipeline.settings.drain_s)
        finally:
            stopping.cancel()
            # A worker that is cancelled behind a barrier lifts it, for which it needs the ledger; cancelled once more,
            # it leaves that to another worker.
            while not working.done():
                working.cancel()
                await asyncio.wait([working], timeout=CANCEL_S)
        with suppress(asyncio.CancelledError):
            await working

    async def _work(self) -> None:
        while not self._stop.is_set():
            controls = self._pipeline.controls
            run = controls.run
            if run is not None:
                self._report_stage(run)
                # A barrier has to be lifted even if its worker has died and the run was cancelled.
                if controls.move is not None or (_is_at_work(run) and not self._awaits_consent(run)):
                    await self._take_part(run)
                elif is_notice_due(run):
                    await self._send_notice(run)
            await self._rest(LOOK_S)

    def _report_stage(self, run: ReindexRun) -> None:
        """Emit that the run is in another stage. A run that ended before this worker started is not reported."""
        seen = (run.generation, "paused" if run.is_paused else run.state.value)
        if seen == self._seen or run.state is RunState.STARTING:
            return
        is_new = self._seen is None or self._seen[0] != run.generation
        self._seen = seen
        if run.is_active or not is_new:
            generation, stage = seen
            self._pipeline.emit(
                events.ReindexMoved(pipeline=self._pipeline.name, generation=generation, stage=stage, shards=run.shards)
            )

    def _awaits_consent(self, run: ReindexRun) -> bool:
        """Whether the sweep waits for the operator's consent. After a while it is repeated: the rows may be back."""
        if self._awaited is None:
            return False
        awaited, until = self._awaited
        return awaited == run and self._pipeline.clock() < until

    async def _take_part(self, run: ReindexRun) -> None:
        """Work on a run until it ends, is paused, or this worker stops."""
        try:
            if not run.is_beside:
                await self._write_rows(run, self._pipeline)
                return
            async with AsyncExitStack() as stack:
                if (other := await self._open_target(run, stack)) is None:
                    return
                if run.state in (RunState.SCANNING, RunState.SWEEPING):
                    await self._write_rows(run, other)
                else:
                    await self._catch_up(run, other)
        except UnavailableError as error:
            await self._pipeline.back_off(LEDGER, error, 1)

    async def _open_target(self, run: ReindexRun, stack: AsyncExitStack) -> OpenPipeline | None:
        """Open the other target of a run; None if that is not possible now, which is reported."""
        assert self._pipeline.open_target is not None, "a run beside starts only if its sink has targets"
        try:
            return await stack.enter_async_context(self._pipeline.open_target(run.into, run.generation))
        except UnavailableError as error:
            await self._pipeline.back_off(SINK, error, 1, self._stop.is_set)
        except (DatabaseError, AdminError) as error:
            await self._report_lost_target(run, error)
        return None

    async def _report_lost_target(self, run: ReindexRun, error: DatabaseError | AdminError) -> None:
        """Emit an alarm, once, that the other target cannot be used: it was dropped or changed by other means.

        A swap to it is called off, because changes wait behind its barrier.
        """
        cause = f"{run.into}: {error}"
        if cause != self._lost_target:
            self._lost_target = cause
            advice = f"end the run with keywise reindex cancel {self._pipeline.name}, and build the target again"
            self._pipeline.emit(events.Alarmed(pipeline=self._pipeline.name, cause=cause, advice=advice))
        if self._pipeline.controls.move is not None:
            await call_off_swap(self._pipeline, self._shards, run)
        await self._rest(LOST_LOOK_S)

    async def _send_notice(self, run: ReindexRun) -> None:
        try:
            await send_notice(self._pipeline, self._shards, run)
        except UnavailableError as error:
            await self._pipeline.back_off(LEDGER, error, 1)

    async def _write_rows(self, run: ReindexRun, target: OpenPipeline) -> None:
        """Read shards, or sweep, and write the rows through the pipeline of a target."""
        async with self._rows(run, target) as queue:
            if run.state is RunState.SCANNING:
                await self._scan(run, queue)
                return
            sweep = Sweep(self._pipeline, self._origin, self._shards, queue, run, self._governor)
            await sweep.run(lambda: self._is_over(run))
            if sweep.has_ended:
                self._seen = (run.generation, RunState.COMPLETE.value)  # `ReindexEnded` says more.
            if sweep.needs_consent:
                self._awaited = (run, self._pipeline.clock() + CONSENT_LOOK_S)

    async def _catch_up(self, run: ReindexRun, other: OpenPipeline) -> None:
        work = CatchUpStage(self._pipeline, other, self._origin, self._shards, run)
        beating = asyncio.create_task(self._shards.renew_claims())
        try:
            await work.run(lambda: self._has_left(run))
        finally:
            beating.cancel()

    @asynccontextmanager
    async def _rows(self, run: ReindexRun, target: OpenPipeline) -> AsyncIterator[HandoverQueue]:
        """Run a consumer of rows, and the heartbeat of shards, as long as the block lasts."""
        queue = HandoverQueue(self._pipeline.clock)
        consumer = Consumer(row_pipeline(target, self._row_observers, queue, run, self._owner))
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._shards.renew_claims())
                group.create_task(consumer.run())
                try:
                    with self._governor.writing():
                        yield queue
                finally:
                    consumer.stop()
                    beating.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    # Scanning.

    async def _scan(self, run: ReindexRun, queue: HandoverQueue) -> None:
        while not self._is_over(run):
            left = await self._unread_shards(run)
            if not left:
                await self._end_scan(run)
                return
            # Workers begin at different shards, so that they seldom ask for the same one.
            self._pipeline.rng.shuffle(left)
            todo = deque(left)
            async with asyncio.TaskGroup() as group:
                for _ in range(SHARDS_AT_ONCE):
                    group.create_task(self._read_shards(run, queue, todo))
            if not self._is_over(run):
                # Other workers hold the rest, or it waits for a retry.
                await self._rest(LOOK_S)

    async def _unread_shards(self, run: ReindexRun) -> list[str]:
        read = {key async for key, entry in self._shards.entries() if is_finished(entry, run.generation)}
        return [key for key in map(shard_key, range(run.shards)) if key not in read]

    async def _end_scan(self, run: ReindexRun) -> None:
        """Move the run on to the sweep: all shards are read. One of the workers that try succeeds."""
        await move_run(self._pipeline, run, RunState.SWEEPING)

    async def _read_shards(self, run: ReindexRun, queue: HandoverQueue, todo: deque[str]) -> None:
        while todo and not self._is_over(run):
            ask = partial(self._shards.claim, todo.popleft(), run.generation)
            claim = await self._pipeline.retry_until_reachable(LEDGER, ask)
            if isinstance(claim, Refusal):
                continue
            try:
                await self._read_shard(run, queue, claim)
            finally:
                self._shards.stop_renewing(claim)

    async def _read_shard(self, run: ReindexRun, queue: HandoverQueue, claim: Claim) -> None:
        assert claim.position is not None, "a shard is written before it is claimed"
        progress = msgspec.json.decode(claim.position.note, type=ShardProgress)
        ledger, held = self._shards, claim
        try:
            while not progress.is_last:
                if self._is_over(run):
                    await ledger.release(held)
                    return
                began = self._pipeline.clock()
                with self._governor.page():
                    try:
                        page = await self._read_page(progress)
                    except UnavailableError as error:
                        await self._leave_shard(held, error, lambda: self._is_over(run))
                        return
                    ended = await self._write_page(run, queue, progress, page)
                if ended is None:
                    # The sink, or the ledger scope of the rows, is away, or another worker holds what this one has to
                    # store: no attempt counts.
                    await ledger.fail(Failure(held, Certainty.CLEAN, LOOK_S, counts_attempt=False))
                    return
                after = await ledger.advance(held, ended.position)
                if after is None:
                    return  # Another worker has taken the shard over; it repeats this page.
                held, progress = after, ended
                self._emit_progress(held.key, run, progress, len(page.rows))
                if rest_s := self._governor.rest_s(self._pipeline.clock() - began):
                    await self._rest(rest_s)
            await ledger.commit(held, msgspec.json.encode(progress))
        except UnavailableError as error:
            # The ledger is away; if it is not back yet, the claim expires.
            with suppress(UnavailableError):
                await ledger.release(held)
            await self._pipeline.back_off(LEDGER, error, 1, lambda: self._is_over(run))
        except Exception as error:
            # The origin runs user code, or its table has changed. The shard is tried again later, here or elsewhere.
            await ledger.fail(report_failure(self._pipeline, held, error))

    async def _leave_shard(self, claim: Claim, error: UnavailableError, is_over: Callable[[], bool]) -> None:
        """Give a shard back that the origin does not let go on, and wait.

        An origin that throttles goes on in a moment. One that is away is shown by the attempts that fail: otherwise a
        shard that is claimed again and again would look like one that moves.
        """
        failure = Failure(claim, Certainty.CLEAN, 0.0, counts_attempt=not isinstance(error, ThrottledError))
        with suppress(UnavailableError):
            await self._shards.fail(failure)
        await self._pipeline.back_off(ORIGIN, error, 1, is_over)

    async def _read_page(self, progress: ShardProgress) -> Page:
        try:
            if progress.keys:
                rows = await self._origin.fetch(progress.keys)
                self._pipeline.report_answer(ORIGIN)
                return Page([*rows.values()], after="end", is_last=True)
            page_rows = max(PAGE_ROWS_MIN, int(self._page_rows * self._governor.share))
            page = await self._origin.scan(progress.shard, progress.after, progress.rows_left(page_rows))
        except ThrottledError:
            self._page_rows = max(PAGE_ROWS_MIN, self._page_rows // 2)
            raise
        self._pipeline.report_answer(ORIGIN)
        self._page_rows = min(PAGE_ROWS, self._page_rows + PAGE_ROWS_STEP)
        check_page(page, progress.after)
        return page

    async def _write_page(
        self, run: ReindexRun, queue: HandoverQueue, progress: ShardProgress, page: Page
    ) -> ShardProgress | None:
        """Hand the rows of a page to the pipeline, and wait for them.

        Returns None if the page has to be read again: none of them has ended, and they are not paused, or some of them
        could not be postponed.
        """
        # A page that is read again may have other rows, and rows of the first reading may still wait in a lane.
        name = f"{run.generation}/{progress.shard.name}/{progress.pages}/{next(self._readings)}"
        handover = queue.put(row_deliveries(name, page.rows, self._pipeline.wall()))
        try:
            are_paused = self._are_paused(run, list(handover.waiting.values()))
            await handover.settle(QUIET_S if are_paused else SETTLE_S, QUIET_S)
        finally:
            # A row that ends from now on is not counted, because it is among those that are postponed.
            queue.forget(handover)
        left = handover.left
        if left and not handover.outcomes and not are_paused:
            return None
        if not await self._postpone(run, left):
            return None
        return progress.past(page, handover.outcomes, len(left), self._governor.pace)

    def _are_paused(self, run: ReindexRun, rows: Sequence[Delivery]) -> bool:
        """Whether an operator has paused the keys of all these rows, so that none will end soon.

        A pause of the whole pipeline does not count, because the sweep would get every row of the origin; nor does one
        while a run fills another target, which has no pauses.
        """
        controls = self._pipeline.controls
        if run.is_beside or controls.is_paused or not controls.pauses:
            return False
        tickets = self._pipeline.reader.read(rows, 0, self._pipeline.clock()).tickets
        return all(controls.pauses_key(ticket.change.key) for ticket in tickets)

    async def _postpone(self, run: ReindexRun, rows: Sequence[Delivery]) -> bool:
        """Leave rows that have not ended to the sweep, so that the next page does not wait; return whether it could."""
        if not rows:
            return True
        tickets = self._pipeline.reader.read(rows, 0, self._pipeline.clock()).tickets
        if len(tickets) < len(rows):
            return False  # A row that cannot be read has no key, and its dead letter is not stored yet.
        return await self._shards.postpone([ticket.change.key for ticket in tickets], run.generation)

    # Helpers.

    def _is_over(self, run: ReindexRun) -> bool:
        return self._stop.is_set() or self._pipeline.controls.run != run

    def _has_left(self, run: ReindexRun) -> bool:
        """Whether the run no longer catches up, or is paused. A request for a swap changes nothing of that."""
        now = self._pipeline.controls.run
        has_moved = now is None or (now.identity, now.state) != (run.identity, run.state)
        return self._stop.is_set() or has_moved or now.is_paused  # type: ignore[union-attr]

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _emit_progress(self, key: str, run: ReindexRun, progress: ShardProgress, page_rows: int) -> None:
        self._pipeline.emit(
            events.ShardAdvanced(
                pipeline=self._pipeline.name,
                shard=key,
                generation=run.generation,
                rows=progress.counts.get(READ, 0),
                page_rows=page_rows,
            )
        )


def row_pipeline(
    pipeline: OpenPipeline, observers: Sequence[events.Observer], queue: HandoverQueue, run: ReindexRun, owner: str
) -> OpenPipeline:
    """Return the pipeline for rows: it reads them from their own queue, at the generation of the run."""
    return dataclasses.replace(
        pipeline,
        sources=[("reindex", queue)],
        reader=RowReader(pipeline.reader, run),
        owner=owner,
        observers=(RowObserver(observers, pipeline.reporters),),
        reporters=(),
        bulk=frozenset(),
        debounce=None,
        journal_store=None,
        availability=Availability(),
    )


def _is_at_work(run: ReindexRun) -> bool:
    at_work = (RunState.SCANNING, RunState.SWEEPING, RunState.CATCHING_UP)
    return run.state in at_work and not run.is_paused


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that stopped the other tasks; groups may be nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
