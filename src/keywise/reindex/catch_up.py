"""Catching up: one pass after another makes the other target equal to the live one, until a swap.

The ledger is the log of changes: each target has a scope, so a pass compares marks, and no live change is written
twice. The pass copies tombstones. For any other difference it reads the row from the origin, and writes it to the
target that is behind. That may be the live one, if the message of the row is on its way or was lost.
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
from keywise.reindex.gap import GapKind, order_to_write
from keywise.reindex.rows import UNVERSIONED
from keywise.reindex.shards import CatchUpProgress
from keywise.reindex.sweep import FETCH_KEYS, ORIGIN, delete_limit
from keywise.reindex.target_writer import TargetWriter


class CatchUp:
    """The passes of one worker. It remembers the keys that the origin did not have, and asks for them again."""

    def __init__(
        self,
        live: OpenPipeline,
        other: OpenPipeline,
        origin: Origin,
        writers: tuple[TargetWriter, TargetWriter],
        keep: Callable[[int], Awaitable[None]],
        is_over: Callable[[], bool],
    ) -> None:
        self._live, self._other = live, other
        self._origin = origin
        self._to_live, self._to_other = writers
        self._keep = keep
        """Called before each batch of writes, with the number of gone keys that the run has deleted when they are done.
        It raises an error if another worker has taken over."""
        self._is_over = is_over
        """Whether a pass need no longer wait for an origin that is away."""
        self._missing: dict[str, tuple[Order | None, Order | None, float]] = {}
        """Keys that the origin did not have, with the marks of the live and the other target, and since when."""
        self._lagging: dict[str, float] = {}
        """Keys of which the origin had an older row than the live target, or none, and since when."""
        self._passes = 0

    async def run(self, delete_max: int | None, deleted: int = 0, *, is_last: bool = False) -> CatchUpProgress:
        """Do one pass. The last one, behind the barrier, deletes only keys that are deleted in the live target.

        `deleted` is how many gone keys the run has deleted before, because its limit is for all passes together.
        """
        started = self._live.clock()
        state = _PassState(is_last=is_last, deleted=deleted)
        comparison = Comparison(self._live.ledger, self._other.ledger, await self._live.admin.now())
        some: list[KeyGap] = []
        async with aclosing(comparison.gaps()) as gaps:
            async for gap in gaps:
                some.append(gap)
                if len(some) == FETCH_KEYS:
                    await self._close_gaps(some, state)
                    some = []
        if some:
            await self._close_gaps(some, state)
        state.gone_max = delete_limit(delete_max, comparison.rows + deleted) - deleted
        await self._delete_gone(state)
        self._missing = {key: seen for key, seen in self._missing.items() if key in state.lagging}
        self._lagging = {key: self._lagging.get(key, started) for key in state.lagging}
        await self._end_expired(comparison, is_last=is_last)
        self._passes += 1
        return self._progress(comparison, state, started)

    def _progress(self, comparison: Comparison, state: "_PassState", started: float) -> CatchUpProgress:
        stuck_since = started - self._live.settings.horizon_s
        stuck = [key for key, since in self._lagging.items() if since <= stuck_since]
        gone = [gap.key for gap in state.gone] if state.needs_consent else []
        return CatchUpProgress(
            passes=self._passes,
            keys=comparison.rows,
            behind=state.behind,
            lagging=len(state.lagging),
            stuck=len(stuck),
            stuck_keys=tuple(stuck[:NAMED_MAX]),
            gone=len(gone),
            gone_keys=tuple(gone[:NAMED_MAX]),
            deleted=state.deleted,
            unwritten=len(state.failed),
            failed=dict(list(state.failed.items())[:NAMED_MAX]),
            unresolved=tuple(comparison.unresolved),
            seconds=self._live.clock() - started,
        )

    async def _close_gaps(self, gaps: Sequence[KeyGap], state: "_PassState") -> None:
        """Write the tombstones and rows that close these gaps; note the keys for which there is nothing to write."""
        await self._keep(state.deleted)
        state.behind += len(gaps)
        tombstones = [_tombstone(gap) for gap in gaps if gap.kind is GapKind.TOMBSTONE]
        to_live, to_other = list[Change[Any]](), [change for change in tombstones if change is not None]
        rows = {gap.key: gap for gap in gaps if gap.kind is GapKind.ROW}
        found: Mapping[str, bytes] = {}
        if rows:
            found = await self._fetch([*rows], state)
        for key, gap in rows.items():
            if (change := self._row_of(gap, found.get(key), state)) is None:
                continue
            if gap.live.mark is None or change.order[:2] > gap.live.mark[:2]:
                to_live.append(change)
            if (order := order_to_write(gap.other, change.order, deleted=change.deleted)) is not None:
                to_other.append(_at(change, order))
        state.failed |= await self._to_other.write(to_other, despite_pause=True)
        state.failed |= await self._to_live.write(to_live)

    async def _fetch(self, keys: Sequence[str], state: "_PassState") -> Mapping[str, bytes]:
        """Return the rows of some keys; raise `UnavailableError` if the origin is away, and waiting for it is over."""
        if state.is_last:
            return await self._origin.fetch(keys)  # Changes wait behind the barrier: the swap is rather called off.
        return await self._live.retry_until_reachable(ORIGIN, lambda: self._origin.fetch(keys), self._is_over)

    def _row_of(self, gap: KeyGap, row: bytes | None, state: "_PassState") -> Change[Any] | None:
        """Return the row of a key as a change; None if it must not be written yet, or cannot be, which is noted."""
        if row is None:
            self._note_missing(gap, state)
            return None
        try:
            change = self._read(gap, row)
        except MalformedError as error:
            state.failed[gap.key] = str(error)
            return None
        if gap.live.mark is not None and change.order[:2] < gap.live.mark[:2]:
            state.lagging.add(gap.key)  # The live change arrived before its row. The next pass asks again.
            return None
        return change

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

    def _note_missing(self, gap: KeyGap, state: "_PassState") -> None:
        """Note a key that the origin does not have: as gone, if it was missing a horizon ago too, at the same marks.

        Otherwise the key is lagging, because its row may be inserted again. In the last pass, and with an origin that
        does not read consistently, it is always lagging.
        """
        now, marks = self._live.clock(), (gap.live.mark, gap.other.mark)
        seen = self._missing.get(gap.key)
        if seen is None or seen[:2] != marks:
            self._missing[gap.key] = seen = (*marks, now)
        is_old = now >= seen[2] + self._live.settings.horizon_s
        if is_old and self._origin.is_consistent and not state.is_last:
            state.gone.append(gap)
        else:
            state.lagging.add(gap.key)

    async def _delete_gone(self, state: "_PassState") -> None:
        """Delete the keys that are gone from both targets, just above both marks, unless they are too many."""
        if state.needs_consent:
            state.lagging.update(gap.key for gap in state.gone)
            return
        for start in range(0, len(state.gone), FETCH_KEYS):
            some = state.gone[start : start + FETCH_KEYS]
            await self._keep(state.deleted + len(some))
            marks = [max(mark for mark in (gap.live.mark, gap.other.mark) if mark is not None) for gap in some]
            for writer in (self._to_live, self._to_other):
                deletions = [
                    Change[Any](gap.key, above(mark), deleted=True) for gap, mark in zip(some, marks, strict=True)
                ]
                state.failed |= await writer.write(deletions, despite_pause=writer is self._to_other)
            state.deleted += sum(gap.key not in state.failed for gap in some)

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


class _PassState(msgspec.Struct):
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
    def needs_consent(self) -> bool:
        """Whether more keys are gone than the pass may delete, so that it deletes none."""
        return len(self.gone) > max(0, self.gone_max)


def _tombstone(gap: KeyGap) -> Change[Any] | None:
    """Return the deletion that the other target lacks; None if it has that, or a newer version."""
    assert gap.live.mark is not None, "only a mark can be a tombstone"
    order = order_to_write(gap.other, gap.live.mark, deleted=True)
    return Change(gap.key, order, deleted=True) if order is not None else None


def _at(change: Change[Any], order: Order) -> Change[Any]:
    return msgspec.structs.replace(change, order=order)
