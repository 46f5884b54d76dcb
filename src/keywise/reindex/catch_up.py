"""Catching up: one pass after another brings the other target to where the live one is, until a swap.

The ledger is the log of changes: each target has a scope, so a pass compares marks, and nothing is written twice while
live changes flow. Tombstones are copied. Whatever else differs is read from the origin, and written to the target that
is behind, which may be the live one: its message is on its way, or was lost.
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
        is_mine: Callable[[], Awaitable[None]],
    ) -> None:
        self._live, self._other = live, other
        self._origin = origin
        self._to_live, self._to_other = writers
        self._is_mine = is_mine
        """Raises an error if another worker has taken over."""
        self._missing: dict[str, tuple[Order | None, Order | None, float]] = {}
        """Keys that the origin did not have, with both marks, and when it was asked first."""
        self._lagging: dict[str, float] = {}
        """Keys for whose row a pass waits, and since when."""
        self._passes = 0

    async def run(self, delete_max: int | None, *, is_last: bool = False) -> CatchUpProgress:
        """Do one pass. The last one, during a swap, deletes nothing that is not deleted in the live target."""
        started = self._live.clock()
        one = _Pass(is_last=is_last)
        comparison = Comparison(self._live.ledger, self._other.ledger, await self._live.admin.now())
        some: list[KeyGap] = []
        async with aclosing(comparison.gaps()) as gaps:
            async for gap in gaps:
                some.append(gap)
                if len(some) == FETCH_KEYS:
                    await self._close(some, one)
                    some = []
        if some:
            await self._close(some, one)
        one.gone_max = delete_limit(delete_max, comparison.rows)
        await self._delete_gone(one)
        self._missing = {key: seen for key, seen in self._missing.items() if key in one.lagging}
        self._lagging = {key: self._lagging.get(key, started) for key in one.lagging}
        await self._end_expired(comparison, is_last=is_last)
        self._passes += 1
        stuck_since = started - self._live.settings.horizon_s
        stuck = [key for key, since in self._lagging.items() if since <= stuck_since]
        gone = [gap.key for gap in one.gone] if len(one.gone) > one.gone_max else []
        return CatchUpProgress(
            passes=self._passes,
            keys=comparison.rows,
            behind=one.behind,
            lagging=len(one.lagging),
            stuck=len(stuck),
            stuck_keys=tuple(stuck[:NAMED_MAX]),
            gone=len(gone),
            gone_keys=tuple(gone[:NAMED_MAX]),
            unwritten=len(one.failed),
            failed=dict(list(one.failed.items())[:NAMED_MAX]),
            restless=tuple(comparison.restless),
            seconds=self._live.clock() - started,
        )

    async def _close(self, gaps: Sequence[KeyGap], one: "_Pass") -> None:
        """Write what closes these gaps."""
        await self._is_mine()
        one.behind += len(gaps)
        tombstones = [_tombstone(gap) for gap in gaps if gap.gap is Gap.TOMBSTONE]
        to_live, to_other = list[Change[Any]](), [change for change in tombstones if change is not None]
        rows = {gap.key: gap for gap in gaps if gap.gap is Gap.ROW}
        found: Mapping[str, bytes] = {}
        if rows:
            found = await self._live.retry_until_reachable(ORIGIN, lambda: self._origin.fetch([*rows]))
        for key, gap in rows.items():
            if key not in found:
                self._note_missing(gap, one)
                continue
            try:
                change = self._read(gap, found[key])
            except MalformedError as error:
                one.failed[key] = str(error)
                continue
            if gap.live.mark is not None and change.order[:2] < gap.live.mark[:2]:
                one.lagging.add(key)  # The live change came by a faster way than the row. The next pass asks again.
                continue
            if gap.live.mark is None or change.order[:2] > gap.live.mark[:2]:
                to_live.append(change)
            if (order := order_in(gap.other, change.order, deleted=change.deleted)) is not None:
                to_other.append(_at(change, order))
        one.failed |= await self._to_other.write(to_other, despite_pause=True)
        one.failed |= await self._to_live.write(to_live)

    def _read(self, gap: KeyGap, row: bytes) -> Change[Any]:
        """Read a row as a change, in the era of its key."""
        change = self._live.reader.read_one(row)
        if change.key != gap.key:
            raise MalformedError(f"the origin has returned the row of {change.key!r} for it")
        if change.version is None:
            raise MalformedError(UNVERSIONED)
        era = max(mark[0] for mark in (gap.live.mark, gap.other.mark) if mark is not None)
        return _at(change, (era, change.version, 0))

    # Gone keys.

    def _note_missing(self, gap: KeyGap, one: "_Pass") -> None:
        """Note a key that the origin does not have. It is gone if that is so a horizon later, and no mark has moved.

        A replica may lag, and a row may be inserted again. In the last pass there is no time to ask twice.
        """
        now, marks = self._live.clock(), (gap.live.mark, gap.other.mark)
        seen = self._missing.get(gap.key)
        if seen is None or seen[:2] != marks:
            self._missing[gap.key] = seen = (*marks, now)
        is_old = now >= seen[2] + self._live.settings.horizon_s
        if is_old and self._origin.is_consistent and not one.is_last:
            one.gone.append(gap)
        else:
            one.lagging.add(gap.key)

    async def _delete_gone(self, one: "_Pass") -> None:
        """Delete keys that are gone in both targets, just above both marks, unless they are too many."""
        if len(one.gone) > one.gone_max:
            one.lagging.update(gap.key for gap in one.gone)
            return
        for start in range(0, len(one.gone), FETCH_KEYS):
            some = one.gone[start : start + FETCH_KEYS]
            await self._is_mine()
            marks = [max(mark for mark in (gap.live.mark, gap.other.mark) if mark is not None) for gap in some]
            for writer in (self._to_live, self._to_other):
                deletions = [
                    Change[Any](gap.key, above(mark), deleted=True) for gap, mark in zip(some, marks, strict=True)
                ]
                one.failed |= await writer.write(deletions, despite_pause=writer is self._to_other)

    async def _end_expired(self, comparison: Comparison, *, is_last: bool) -> None:
        """End claims of dead workers: always in the other target, and during a swap also in the live one.

        Between swaps the workers themselves take over what is dead in the live target.
        """
        ends = [(self._to_other, comparison.expired_other)]
        if is_last:
            ends.append((self._to_live, comparison.expired_live))
        for writer, keys in ends:
            for start in range(0, len(keys), FETCH_KEYS):
                await writer.end_expired(keys[start : start + FETCH_KEYS])


class _Pass(msgspec.Struct):
    """What one pass has met so far."""

    is_last: bool
    behind: int = 0
    lagging: set[str] = set()
    gone: list[KeyGap] = []
    gone_max: int = 0
    failed: dict[str, str] = {}


def _tombstone(gap: KeyGap) -> Change[Any] | None:
    assert gap.live.mark is not None, "only a mark can be a tombstone"
    order = order_in(gap.other, gap.live.mark, deleted=True)
    return Change(gap.key, order, deleted=True) if order is not None else None


def _at(change: Change[Any], order: Order) -> Change[Any]:
    return msgspec.structs.replace(change, order=order)
