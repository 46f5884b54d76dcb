"""Catching up: one pass after another brings the other target to where the live one is, until a swap.

The ledger is the log of changes: each target has a scope, so a pass compares marks, and no live change is written
twice. Tombstones are copied. All else that differs is read from the origin, and written to the target that is behind.
This may be the live one, if the message of a row is on its way or was lost.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from keywise.core.change import Change, Order, above
from keywise.core.errors import MalformedError
from keywise.core.origin import Origin
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.comparison import NAMED_MAX, Comparison, KeyGap
from keywise.reindex.gap import Gap, order_in
from keywise.reindex.rows import UNVERSIONED
from keywise.reindex.shards import CatchUpProgress
from keywise.reindex.sweep import FETCH_KEYS, ORIGIN, delete_limit
from keywise.reindex.target_writer import TargetWriter


class CatchUp:
    """The passes of one worker. It remembers which keys the origin did not have, so that it can ask again."""

    def __init__(
        self,
        live: OpenPipeline,
        other: OpenPipeline,
        origin: Origin,
        writers: tuple[TargetWriter, TargetWriter],
        keep: Callable[[int], Awaitable[None]],
    ) -> None:
        self._live, self._other = live, other
        self._origin = origin
        self._to_live, self._to_other = writers
        self._keep = keep
        """Called before each batch of writes, with the number of gone keys that the run has deleted when they are done.
        It raises an error if another worker has taken over."""
        self._missing: dict[str, tuple[Order | None, Order | None, float]] = {}
        """Keys that the origin did not have, with the marks of the live and the other target, and since when."""
        self._lagging: dict[str, float] = {}
        """Keys that lag, and since when."""
        self._passes = 0

    async def run(self, delete_max: int | None, deleted: int = 0, *, is_last: bool = False) -> CatchUpProgress:
        """Do one pass. The last one, behind the barrier, deletes only keys that are deleted in the live target.

        `deleted` is how many gone keys the run has deleted before, because its limit is for all passes together.
        """
        started = self._live.clock()
        this = _Pass(is_last=is_last, deleted=deleted)
        comparison = Comparison(self._live.ledger, self._other.ledger, await self._live.admin.now())
        some: list[KeyGap] = []
        async with aclosing(comparison.gaps()) as gaps:
            async for gap in gaps:
                some.append(gap)
                if len(some) == FETCH_KEYS:
                    await self._close(some, this)
                    some = []
        if some:
            await self._close(some, this)
        this.gone_max = delete_limit(delete_max, comparison.rows + deleted) - deleted
        await self._delete_gone(this)
        self._missing = {key: seen for key, seen in self._missing.items() if key in this.lagging}
        self._lagging = {key: self._lagging.get(key, started) for key in this.lagging}
        await self._end_expired(comparison, is_last=is_last)
        self._passes += 1
        stuck_since = started - self._live.settings.horizon_s
        stuck = [key for key, since in self._lagging.items() if since <= stuck_since]
        gone = [gap.key for gap in this.gone] if this.is_held else []
        return CatchUpProgress(
            passes=self._passes,
            keys=comparison.rows,
            behind=this.behind,
            lagging=len(this.lagging),
            stuck=len(stuck),
            stuck_keys=tuple(stuck[:NAMED_MAX]),
            gone=len(gone),
            gone_keys=tuple(gone[:NAMED_MAX]),
            deleted=this.deleted,
            unwritten=len(this.failed),
            failed=dict(list(this.failed.items())[:NAMED_MAX]),
            restless=tuple(comparison.restless),
            seconds=self._live.clock() - started,
        )

    async def _close(self, gaps: Sequence[KeyGap], this: "_Pass") -> None:
        """Write the tombstones and rows that close these gaps; note the keys for which there is nothing to write."""
        await self._keep(this.deleted)
        this.behind += len(gaps)
        tombstones = [_tombstone(gap) for gap in gaps if gap.gap is Gap.TOMBSTONE]
        to_live, to_other = list[Change[Any]](), [change for change in tombstones if change is not None]
        rows = {gap.key: gap for gap in gaps if gap.gap is Gap.ROW}
        found: Mapping[str, bytes] = {}
        if rows:
            found = await self._live.retry_until_reachable(ORIGIN, lambda: self._origin.fetch([*rows]))
        for key, gap in rows.items():
            if key not in found:
                self._note_missing(gap, this)
                continue
            try:
                change = self._read(gap, found[key])
            except MalformedError as error:
                this.failed[key] = str(error)
                continue
            if gap.live.mark is not None and change.order[:2] < gap.live.mark[:2]:
                this.lagging.add(key)  # The live change came by a faster way than the row. The next pass asks again.
                continue
            if gap.live.mark is None or change.order[:2] > gap.live.mark[:2]:
                to_live.append(change)
            if (order := order_in(gap.other, change.order, deleted=change.deleted)) is not None:
                to_other.append(_at(change, order))
        this.failed |= await self._to_other.write(to_other, despite_pause=True)
        this.failed |= await self._to_live.write(to_live)

    def _read(self, gap: KeyGap, row: bytes) -> Change[Any]:
        """Read a row as a change in the era of its key; raise `MalformedError` if it cannot be written."""
        change = self._live.reader.read_one(row)
        if change.key != gap.key:
            raise MalformedError(f"the origin has returned the row of {change.key!r} for it")
        if change.version is None:
            raise MalformedError(UNVERSIONED)
        era = max(mark[0] for mark in (gap.live.mark, gap.other.mark) if mark is not None)
        return _at(change, (era, change.version, 0))

    # Gone keys.

    def _note_missing(self, gap: KeyGap, this: "_Pass") -> None:
        """Note a key that the origin does not have: as gone, if that was so a horizon ago at the same marks.

        Until then it is lagging: the row may be inserted again. So it is if the origin does not read consistently, and
        in the last pass, in which there is no time to ask twice.
        """
        now, marks = self._live.clock(), (gap.live.mark, gap.other.mark)
        seen = self._missing.get(gap.key)
        if seen is None or seen[:2] != marks:
            self._missing[gap.key] = seen = (*marks, now)
        is_old = now >= seen[2] + self._live.settings.horizon_s
        if is_old and self._origin.is_consistent and not this.is_last:
            this.gone.append(gap)
        else:
            this.lagging.add(gap.key)

    async def _delete_gone(self, this: "_Pass") -> None:
        """Delete the keys that are gone from both targets, just above both marks, unless they are too many."""
        if this.is_held:
            this.lagging.update(gap.key for gap in this.gone)
            return
        for start in range(0, len(this.gone), FETCH_KEYS):
            some = this.gone[start : start + FETCH_KEYS]
            await self._keep(this.deleted + len(some))
            marks = [max(mark for mark in (gap.live.mark, gap.other.mark) if mark is not None) for gap in some]
            for writer in (self._to_live, self._to_other):
                deletions = [
                    Change[Any](gap.key, above(mark), deleted=True) for gap, mark in zip(some, marks, strict=True)
                ]
                this.failed |= await writer.write(deletions, despite_pause=writer is self._to_other)
            this.deleted += sum(gap.key not in this.failed for gap in some)

    async def _end_expired(self, comparison: Comparison, *, is_last: bool) -> None:
        """End expired claims: in the other target after each pass, in the live one only behind the barrier.

        At other times the workers of the pipeline take over expired claims of the live target by themselves.
        """
        ends = [(self._to_other, comparison.expired_other)]
        if is_last:
            ends.append((self._to_live, comparison.expired_live))
        for writer, keys in ends:
            for start in range(0, len(keys), FETCH_KEYS):
                await writer.end_expired(keys[start : start + FETCH_KEYS])


class _Pass(msgspec.Struct):
    """What one pass has found so far."""

    is_last: bool
    deleted: int
    """How many gone keys the run has deleted, in this pass and before."""
    behind: int = 0
    lagging: set[str] = set()
    gone: list[KeyGap] = []
    gone_max: int = 0
    """How many keys this pass may delete."""
    failed: dict[str, str] = {}

    @property
    def is_held(self) -> bool:
        """Whether more keys are gone than the pass may delete, so that it deletes none."""
        return len(self.gone) > max(0, self.gone_max)


def _tombstone(gap: KeyGap) -> Change[Any] | None:
    """Return the deletion that the other target lacks; None if it has that, or a newer version."""
    assert gap.live.mark is not None, "only a mark can be a tombstone"
    order = order_in(gap.other, gap.live.mark, deleted=True)
    return Change(gap.key, order, deleted=True) if order is not None else None


def _at(change: Change[Any], order: Order) -> Change[Any]:
    return msgspec.structs.replace(change, order=order)
