"""A dry run: reads all rows and asks the rules what the ledger would answer, and writes nothing."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec

from keywise.core.change import Change, is_unversioned
from keywise.core.controls import Controls, ReindexRun
from keywise.core.entry import LedgerPolicy, RefusalReason
from keywise.core.errors import ThrottledError
from keywise.core.failures import cause_of_refusal
from keywise.core.origin import Origin
from keywise.core.rules import decide_under
from keywise.flow.handover import IGNORED
from keywise.flow.lanes import Ticket
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.admin import next_generation, require_origin
from keywise.reindex.plan import RunPlan, check_page
from keywise.reindex.rows import RowReader, row_deliveries
from keywise.reindex.shards import READ, ShardProgress, entries_of, rows_expected
from keywise.reindex.sweep import FETCH_KEYS, ORIGIN, delete_limit
from keywise.reindex.version_check import check_rows, check_versions

T = TypeVar("T")

PAGE_ROWS = 500
INSPECTED_AT_ONCE = 16
"""How many keys are looked up in the ledger at the same time."""
APPLY, MALFORMED = "apply", "malformed"
"""What is counted besides refusals: rows that would be written, and rows that would become dead letters."""
MALFORMED_SHOWN = 5
"""How many of those a report names."""
_REFUSALS = {
    RefusalReason.STALE: "stale",
    RefusalReason.DUPLICATE: "duplicate",
    RefusalReason.REMOVED: "removed",
    RefusalReason.MIXED: MALFORMED,
}
"""How a refused row would end. After any other refusal, a row would wait, and then be written: it counts as applied."""


class DryRunReport(msgspec.Struct, frozen=True):
    """What a run would do, if it started now and nothing else happened."""

    generation: int
    counts: Mapping[str, int]
    """How many rows were read, and how many of them would be applied, refused, ignored, or are no messages."""
    gone: int
    """How many keys of the ledger the origin does not have; 0 for a partial run, which deletes nothing."""
    delete_max: int
    """How many of them a run deletes without the operator's consent."""
    malformed: Sequence[tuple[str, str]] = ()
    """Some rows that would become dead letters: the key, empty if it cannot be read, and the cause."""


class DryRun:
    """Reads the rows of a plan in this process, without workers. Another run may go on meanwhile."""

    def __init__(self, pipeline: OpenPipeline, plan: RunPlan) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self._origin: Origin
        self._origin, _ = require_origin(pipeline)
        self._policy = LedgerPolicy(redelivery_s=pipeline.settings.redelivery_s)
        self._counts: Counter[str] = Counter()
        self._keys = 0
        """How many keys with a row the ledger has."""
        self._malformed: list[tuple[str, str]] = []

    async def run(self, show: Callable[[str, int, int | None], None] = lambda *facts: None) -> DryRunReport:
        """Read everything; `show` gets the stage, how much of it is done, and about how much there is in all."""
        pipeline, plan = self._pipeline, self._plan
        controls = await pipeline.control_store.controls()
        generation = await next_generation(pipeline, plan)
        shards = await plan.shards(self._origin)
        if plan.is_checked:
            await check_rows(pipeline, self._origin, shards[0])
            await check_versions(pipeline, self._origin)
        reader = RowReader(pipeline.reader, ReindexRun(generation, also_removed=plan.also_removed))
        expected = rows_expected(shards)
        for shard in shards:
            async with aclosing(self._pages(shard)) as pages:
                async for rows in pages:
                    await self._count(reader, rows, controls)
                    show("reading rows", self._counts[READ], expected)
        gone = 0 if plan.is_partial else await self._count_gone(show)
        delete_max = delete_limit(plan.delete_max, self._keys)
        return DryRunReport(generation, dict(+self._counts), gone, delete_max, self._malformed[:MALFORMED_SHOWN])

    async def _pages(self, progress: ShardProgress) -> AsyncGenerator[Sequence[bytes], None]:
        if progress.keys:
            yield [*(await self._ask(partial(self._origin.fetch, progress.keys))).values()]
            return
        while not progress.is_last:
            rows_left = progress.rows_left(PAGE_ROWS)
            page = await self._ask(partial(self._origin.scan, progress.shard, progress.after, rows_left))
            check_page(page, progress.after)
            yield page.rows
            progress = progress.past(page, {}, 0)

    async def _count(self, reader: RowReader, rows: Sequence[bytes], controls: Controls) -> None:
        now = await self._pipeline.admin.now()
        read_batch = reader.read(row_deliveries("dry run", rows, now), 0, self._pipeline.clock())
        self._counts.update({READ: len(rows), MALFORMED: len(read_batch.malformed), IGNORED: len(read_batch.ignored)})
        self._malformed += [(bad.key, bad.cause) for bad in read_batch.malformed[:MALFORMED_SHOWN]]
        tickets = read_batch.tickets
        for start in range(0, len(tickets), INSPECTED_AT_ONCE):
            some = tickets[start : start + INSPECTED_AT_ONCE]
            self._counts.update(await asyncio.gather(*(self._outcome(one, controls, now) for one in some)))

    async def _outcome(self, ticket: Ticket, controls: Controls, now: float) -> str:
        change: Change[object] = ticket.change
        refusal = decide_under(controls, await self._pipeline.admin.inspect(change.key), change, now, self._policy)
        if refusal is not None and refusal.reason is RefusalReason.MIXED:
            self._malformed.append((change.key, cause_of_refusal(refusal)))
        return APPLY if refusal is None else _REFUSALS.get(refusal.reason, APPLY)

    async def _count_gone(self, show: Callable[[str, int, int | None], None]) -> int:
        """Look up every key of the ledger that has a row, and count those that the origin does not have."""
        total = (await self._pipeline.admin.counts()).keys
        gone, seen, keys = 0, 0, list[str]()
        async with aclosing(entries_of(self._pipeline.ledger)) as entries:
            async for key, entry in entries:
                seen += 1
                if entry.mark is not None and not entry.deleted and not is_unversioned(entry.mark):
                    self._keys += 1
                    keys.append(key)
                if len(keys) == FETCH_KEYS:
                    gone += await self._missing(keys)
                    keys = []
                    show("looking up keys", seen, total)
        return gone + await self._missing(keys)

    async def _missing(self, keys: Sequence[str]) -> int:
        """Return how many of these keys the origin does not have."""
        return len(keys) - len(await self._ask(partial(self._origin.fetch, keys))) if keys else 0

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the origin, and again after a while as long as it throttles."""
        attempts = 0
        while True:
            try:
                return await call()
            except ThrottledError as error:
                attempts += 1
                await self._pipeline.back_off(ORIGIN, error, attempts)
