"""The sweep: the stage after the scan, in which one worker writes postponed rows and looks up what the scan has missed.

In place, the worker looks up every key that the run has not written. It writes the rows that it finds, for example one
that was inserted behind the cursor of the scan. It deletes a key if the origin does not have it, twice in a row, and
nothing has happened to the key in between.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

import msgspec

from keywise.core import events
from keywise.core.change import Delivery, Order, is_unversioned
from keywise.core.controls import ReindexRun, RunState
from keywise.core.entry import Claim, Entry, Refusal
from keywise.core.errors import UnavailableError
from keywise.core.origin import Origin
from keywise.flow.handover import HandoverQueue
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.reindex.attempts import report_failure
from keywise.reindex.report import report_run
from keywise.reindex.row_governor import RowGovernor
from keywise.reindex.rows import GoneKey, gone_delivery, row_deliveries
from keywise.reindex.run_state import move_run
from keywise.reindex.shards import (
    FOUND,
    GONE,
    LAGGING,
    ROW_KEY,
    SWEEP,
    ShardLedger,
    SweepProgress,
    entries_of,
    is_finished,
)

FETCH_KEYS = 100
"""How many keys are looked up in the origin with one call."""
SETTLE_S = 60.0
"""How long the sweep waits for the first row of a page to end: its handler may be slow."""
QUIET_S = 5.0
"""How long it waits for the next row to end, whose key may be paused, and for the first row after a page of which none
has ended. After that it goes on with the next page."""
REPEAT_S, REPEAT_MAX_S = 1.0, 30.0
"""How much longer the sweep rests after each attempt before it is repeated, and the longest rest."""
LOOK_S = 1.0
ORIGIN = "origin"
"""The name of the origin in `Unavailable` events."""
DELETE_SHARE, DELETE_MAX = 0.01, 1_000
"""A run that would delete more than this share of the keys, or more than so many, waits for the operator's consent."""


class Sweep:
    """One attempt of a worker at the sweep. It works under a claim, so one worker sweeps at a time."""

    def __init__(
        self,
        pipeline: OpenPipeline,
        origin: Origin,
        shards: ShardLedger,
        queue: HandoverQueue,
        run: ReindexRun,
        governor: RowGovernor,
    ) -> None:
        self._pipeline = pipeline
        self._origin = origin
        self._shards = shards
        self._queue = queue
        self._run = run
        self._governor = governor
        self._is_over: Callable[[], bool] = lambda: False
        self._counts: Counter[str] = Counter()
        self._keys = 0
        """How many keys with a row the ledger has."""
        self._steps = 0
        self._pages = itertools.count()
        self._first_s = SETTLE_S
        """How long the next page waits for its first row to end."""
        self._deleted = 0
        """How many gone keys the run has deleted so far: its limit is for all attempts together."""
        self._missing: dict[str, Order] = {}
        """Keys that the origin did not have at the first request, with their marks; empty if they are too many."""
        self._missing_count = 0
        self.has_ended = False
        """Whether this attempt has ended the run."""
        self.needs_consent = False
        """Whether this attempt has found more gone keys than it may delete, so that the run waits for the operator."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Sweep until the run ends, is paused, or needs an answer from the operator."""
        self._is_over = is_over
        claim = await self._shards.claim(SWEEP, self._run.generation)
        if isinstance(claim, Refusal):
            if claim.mark is not None:
                await self._end()
            return
        if claim.position is not None:
            self._steps = claim.position.place
            self._deleted = msgspec.json.decode(claim.position.note, type=SweepProgress).deleted
        try:
            if await self._sweep(claim):
                progress = SweepProgress(self._steps, dict(+self._counts), deleted=self._deleted)
                if await self._shards.commit(claim, msgspec.json.encode(progress)):
                    await self._end()
            else:
                self._steps += 1
                if await self._advance(claim) and not self.needs_consent:
                    # With the claim, or another worker would repeat the sweep at once.
                    await self._rest(min(REPEAT_MAX_S, REPEAT_S * self._steps))
                await self._shards.release(claim)
        except UnavailableError:
            if not self._is_over():
                raise
            with suppress(UnavailableError):
                await self._shards.release(claim)
        except Exception as error:
            # The origin runs user code, or its table has changed. Some worker tries again later.
            await self._shards.fail(report_failure(self._pipeline, claim, error))
        finally:
            self._shards.stop_renewing(claim)

    async def _sweep(self, claim: Claim) -> bool:
        """Look up postponed rows, then every key that the run has not written, then the missing keys a second time.

        Return False if the sweep has to be repeated: the run has ended or is paused, another worker has taken the sweep
        over, a row has not ended, or the operator has to consent.
        """
        is_whole = True
        async with aclosing(self._postponed()) as pages_of_postponed:
            async for postponed in pages_of_postponed:
                if not await self._goes_on(claim):
                    return False
                if await self._look_up(dict.fromkeys(postponed.values())):
                    await self._end_postponed(postponed)
                else:
                    is_whole = False
        if self._run.is_partial or self._run.is_beside:
            # A partial run knows nothing about the keys that it was not to read. For a run beside, the passes that
            # follow look up the other keys.
            return is_whole
        async with aclosing(self._unwritten()) as pages:
            async for page in pages:
                if not await self._goes_on(claim):
                    return False
                is_whole &= await self._look_up(page)
        return is_whole and await self._may_delete(claim) and await self._delete_gone(claim)

    async def _goes_on(self, claim: Claim) -> bool:
        """Whether the run goes on, and this worker still holds the claim. It is asked before each page."""
        return not self._is_over() and await self._advance(claim)

    async def _advance(self, claim: Claim) -> bool:
        """Store the progress; return False if the claim is lost.

        The place stays the same: an attempt that fails begins again at the beginning, so its pages are no progress, and
        the ledger goes on counting the attempts.
        """
        gone = self._missing_count if self.needs_consent else 0
        progress = SweepProgress(self._steps, dict(+self._counts), gone, self._deleted)
        return await self._shards.advance(claim, progress.position) is not None

    async def _postponed(self) -> AsyncGenerator[dict[str, str], None]:
        """Yield pages of keys whose rows the run has postponed, by the keys of their entries."""
        page: dict[str, str] = {}
        async with aclosing(self._shards.entries()) as entries:
            async for key, entry in entries:
                is_ended = is_finished(entry, self._run.generation)
                if key.startswith(ROW_KEY) and entry.position is not None and not is_ended:
                    page[key] = entry.position.note.decode()
                if len(page) == FETCH_KEYS:
                    yield page
                    page = {}
        if page:
            yield page

    async def _unwritten(self) -> AsyncGenerator[dict[str, Order | None], None]:
        """Yield pages of keys that have a row, by the ledger, and that this run has not written, with their marks."""
        page: dict[str, Order | None] = {}
        async with aclosing(entries_of(self._pipeline.ledger)) as entries:
            async for key, entry in entries:
                self._keys += entry.mark is not None and not entry.deleted
                if _is_unwritten(entry, self._run.generation):
                    page[key] = entry.mark
                if len(page) == FETCH_KEYS:
                    yield page
                    page = {}
        if page:
            yield page

    async def _look_up(self, keys: Mapping[str, Order | None]) -> bool:
        """Write the rows that the origin has of these keys, and remember the keys that it does not have.

        A key without a mark is not remembered. Returns False if some rows have not ended.
        """
        found = await self._fetch(list(keys))
        self._counts[FOUND] += len(found)
        self._note_missing({key: mark for key, mark in keys.items() if mark is not None and key not in found})
        return not await self._hand_over(row_deliveries(self._page_name(), found.values(), self._pipeline.wall()))

    def _note_missing(self, keys: Mapping[str, Order]) -> None:
        """Remember missing keys; only count them once they are more than the run may delete in any case."""
        self._missing_count += len(keys)
        self._missing |= keys
        if self._missing_count > (DELETE_MAX if self._run.delete_max is None else self._run.delete_max):
            self._missing.clear()

    async def _fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return the rows of some keys; raise `UnavailableError` if the origin is away, and the sweep is over."""
        return await self._pipeline.retry_until_reachable(ORIGIN, lambda: self._origin.fetch(keys), self._is_over)

    async def _hand_over(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Hand rows to the pipeline, and wait for them; return those that have not ended. Dead letters have."""
        began = self._pipeline.clock()
        with self._governor.page():
            handover = self._queue.put(deliveries)
            try:
                await handover.settle(self._first_s, QUIET_S)
                left = handover.left
                self._first_s = SETTLE_S if handover.outcomes or not left else QUIET_S
            finally:
                self._queue.forget(handover)
        self._counts.update(handover.outcomes)
        await self._rest(self._governor.rest_s(self._pipeline.clock() - began))
        return left

    async def _rest(self, seconds: float) -> None:
        until = self._pipeline.clock() + seconds
        while (left_s := until - self._pipeline.clock()) > 0:
            if self._is_over():
                return
            await asyncio.sleep(min(LOOK_S, left_s))

    def _page_name(self) -> str:
        # Rows of an earlier page may still wait in a lane, which takes a row with a known id for a redelivery.
        return f"{self._run.generation}/sweep/{next(self._pages)}"

    # Gone keys.

    async def _may_delete(self, claim: Claim) -> bool:
        """Whether the keys that seem to be gone may be deleted; if not, note how many they are for the operator."""
        limit = max(0, delete_limit(self._run.delete_max, self._keys + self._deleted) - self._deleted)
        if self._missing_count <= limit:
            return True
        self.needs_consent = True
        await self._advance(claim)
        self._pipeline.emit(
            events.SweepHeld(
                pipeline=self._pipeline.name,
                generation=self._run.generation,
                keys=self._missing_count,
                delete_max=limit,
            )
        )
        return False

    async def _delete_gone(self, claim: Claim) -> bool:
        """Ask for the missing keys again, and delete those that are still missing; return False if that has to wait.

        One answer proves nothing, because the row may be inserted again. After a horizon, no write of an earlier holder
        of the key can be under way any more. The deletion is just above the mark that the key had at the first request,
        so the deletion is stale if the key has got a newer version since then.
        """
        if not self._missing:
            return True
        if not self._origin.is_consistent:
            self._counts[LAGGING] += self._missing_count
            return True
        ask_at = self._pipeline.clock() + self._pipeline.settings.horizon_s
        while self._pipeline.clock() < ask_at:
            if not await self._goes_on(claim):
                return False
            await asyncio.sleep(min(LOOK_S, max(0.0, ask_at - self._pipeline.clock())))
        missing, left = list(self._missing), list[Delivery]()
        for start in range(0, len(missing), FETCH_KEYS):
            if self._is_over():
                break
            deliveries = await self._ask_again(missing[start : start + FETCH_KEYS])
            # It is stored before the deletions, so that those of a worker that dies among them count.
            self._deleted += sum(isinstance(one, GoneKey) for one in deliveries)
            if not await self._advance(claim):
                return False
            left += await self._hand_over(deliveries)
        self._deleted -= sum(isinstance(one, GoneKey) for one in left)
        return await self._goes_on(claim) and not left

    async def _ask_again(self, keys: Sequence[str]) -> list[Delivery]:
        """Return the rows of missing keys that the origin has now, and the deletions of the others."""
        found, now = await self._fetch(keys), self._pipeline.wall()
        gone = [key for key in keys if key not in found]
        self._counts[GONE] += len(gone)
        rows = row_deliveries(self._page_name(), found.values(), now)
        return [*rows, *(gone_delivery(key, self._missing[key], now) for key in gone)]

    async def _end_postponed(self, keys: Iterable[str]) -> None:
        for key in keys:
            claim = await self._shards.claim(key, self._run.generation)
            if not isinstance(claim, Refusal):
                await self._shards.commit(claim)
                self._shards.stop_renewing(claim)

    async def _end(self) -> None:
        """End the run in place; let a run beside catch up."""
        pipeline = self._pipeline
        if self._run.is_beside:
            await move_run(pipeline, self._run, RunState.CATCHING_UP)
            return
        if not await move_run(pipeline, self._run, RunState.COMPLETE):
            return
        self.has_ended = True
        if not self._run.is_partial:
            await self._end_resync()
        report = await pipeline.retry_until_reachable(LEDGER, lambda: report_run(pipeline, self._shards))
        if report is not None and report.run.generation == self._run.generation:
            pipeline.emit(
                events.ReindexEnded(
                    pipeline=pipeline.name,
                    generation=self._run.generation,
                    seconds=report.seconds,
                    counts=report.counts,
                    gone=report.swept.get(GONE, 0),
                )
            )

    async def _end_resync(self) -> None:
        """Record that no full resync is due any more, because a complete run over all rows replaces one.

        A resync that fell due after the run began stays due: the run may have read rows before the ledger lost their
        marks.
        """
        pipeline = self._pipeline
        controls = await pipeline.retry_until_reachable(LEDGER, pipeline.control_store.controls)
        if 0 < controls.resync_at <= self._run.started_at:
            await pipeline.retry_until_reachable(LEDGER, lambda: pipeline.admin.mark_suspect([], False))


def delete_limit(delete_max: int | None, keys: int) -> int:
    """Return how many gone keys a run may delete, of `keys` with a row; `delete_max` is the operator's limit."""
    return min(DELETE_MAX, int(keys * DELETE_SHARE)) if delete_max is None else delete_max


def _is_unwritten(entry: Entry, generation: int) -> bool:
    """Whether the mark of a key is a put below the generation of the run, so that the run has not written the key."""
    mark = entry.mark
    return mark is not None and not entry.deleted and not is_unversioned(mark) and mark[2] < generation
