"""The report of a run: how far it has come, what became of its rows, and why it does not go on."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from keywise.core.controls import ReindexRun, RunState
from keywise.core.entry import Entry
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.row_governor import Pace
from keywise.reindex.shards import (
    CATCH_UP,
    READ,
    SWEEP,
    CatchUpProgress,
    ShardLedger,
    ShardProgress,
    SweepProgress,
    is_read,
    number_of,
    order_at,
    progress_of,
    rows_expected,
)

STALLED_S = 120.0
"""A shard that was begun is stalled if its last page has ended so long ago."""
UNATTENDED_S = 10.0
"""A run is unattended if no worker has done anything on it for so long."""
FAILED_MIN = 3
"""A shard is stalled too if so many attempts have failed since its last page."""
SHOWN_MAX = 10
"""How many shards a report lists."""


class ShardReport(msgspec.Struct, frozen=True):
    """How far one shard, or the sweep, has come."""

    name: str
    rows: int
    """How many rows were read."""
    owner: str = ""
    """The worker that reads it now."""
    quiet_s: float = 0.0
    """For how long nothing has happened to it."""
    attempts: int = 0
    """How many attempts have failed since its last page."""
    pace: Pace | None = None
    """How slowly its worker goes on, to give way to live changes; None: at full speed, or there is no worker."""


class RunReport(msgspec.Struct, frozen=True):
    """How far a run has come."""

    run: ReindexRun
    shards_read: int
    shards_begun: int
    """Shards that a worker has begun to read, and that have not ended."""
    counts: Mapping[str, int]
    """How many rows were read, and how they ended."""
    rows_expected: int | None
    """About how many rows the run has to read; None if the origin does not say."""
    seconds: float
    """How long the run has taken so far."""
    gone: int = 0
    """How many keys the run wants to delete, if it needs the operator's consent."""
    deleted: int = 0
    """How many gone keys it has deleted so far."""
    postponed: int = 0
    """How many rows are left to the sweep."""
    swept: Mapping[str, int] = {}
    """What the sweep has counted so far: rows that it has found, keys that are gone or lag, and how they ended."""
    quiet_s: float = 0.0
    """For how long nothing has happened to the run."""
    holders: int = 0
    """How many claims workers hold now, on shards, the sweep or the catch-up."""
    pace: Pace | None = None
    """The slowest pace of a worker; None: all go at full speed."""
    working: tuple[ShardReport, ...] = ()
    stalled: tuple[ShardReport, ...] = ()
    catch_up: CatchUpProgress = CatchUpProgress()
    """How far the other target of a run beside has come."""
    target: str = ""
    """The target that is live since the last swap; empty before the first."""
    spare: str = ""
    """The target that was live before the last swap, and can be again."""
    is_moving: bool = False
    """Whether the barrier of a swap is up, so that changes wait."""

    @property
    def rows_read(self) -> int:
        return self.counts.get(READ, 0)

    @property
    def rows_per_s(self) -> float:
        return self.rows_read / self.seconds if self.seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """About how many seconds are left; None if that is not known."""
        if self.rows_expected is None or not self.rows_read or self.run.state is not RunState.SCANNING:
            return None
        return max(0, self.rows_expected - self.rows_read) / self.rows_per_s

    @property
    def is_unattended(self) -> bool:
        """Whether the run could go on, and no worker takes part in it."""
        is_waiting = self.run.is_active and not self.run.is_paused and not self.gone
        return is_waiting and not self.holders and not self.stalled and self.quiet_s >= UNATTENDED_S

    @property
    def reconciles(self) -> bool:
        """Whether the counts add up: every row that was read has ended in one way, or is postponed."""
        return self.rows_read == sum(count for name, count in self.counts.items() if name != READ)


async def report_run(pipeline: OpenPipeline, shards: ShardLedger) -> RunReport | None:
    """Report the last run of a pipeline; None if there was none."""
    controls = await pipeline.control_store.controls()
    if (run := controls.run) is None:
        return None
    now, counts = await pipeline.admin.now(), Counter[str]()
    read = begun = postponed = holders = 0
    sweep, catch_up, moved_at, is_swept = SweepProgress(), CatchUpProgress(), run.started_at, False
    working, progresses = list[ShardReport](), list[ShardProgress]()
    async for key, entry in shards.entries():
        number = number_of(key)
        if key in (SWEEP, CATCH_UP) or number is not None:
            holders += _is_held(entry, now)
            moved_at = max(moved_at, entry.updated_at)
        if key == SWEEP:
            sweep, is_swept = _sweep_of(entry, run), is_read(entry, run.generation)
            if entry.attempts and run.state is RunState.SWEEPING:
                working.append(_shard_report("sweep", 0, entry, now))
        elif key == CATCH_UP:
            catch_up = _catch_up_of(entry, run)
            if entry.attempts and run.state is RunState.CATCHING_UP:
                working.append(_shard_report("catching up", 0, entry, now))
        elif number is None:
            postponed += entry.advanced == order_at(run.generation) and not is_read(entry, run.generation)
        elif number < run.shards and (progress := progress_of(entry, run.generation)) is not None:
            counts.update(progress.counts)
            progresses.append(progress)
            if is_read(entry, run.generation):
                read += 1
            elif progress.pages or entry.token or entry.attempts:
                begun += 1
                rows = progress.counts.get(READ, 0)
                working.append(_shard_report(f"shard {progress.shard.name}", rows, entry, now, progress.pace))
    ended_at = run.ended_at or now
    stalled = [one for one in working if one.quiet_s >= STALLED_S or one.attempts >= FAILED_MIN]
    if not run.is_active or run.is_paused:
        stalled = []
    return RunReport(
        run=run,
        shards_read=read,
        shards_begun=begun,
        counts=dict(+counts),
        rows_expected=rows_expected(progresses),
        seconds=max(0.0, ended_at - run.started_at),
        gone=_needing_consent(run, catch_up if run.is_beside else sweep),
        deleted=catch_up.deleted if run.is_beside else sweep.deleted,
        # A worker that was stopped may postpone rows of its last page when another one has read them, and the sweep
        # has ended: nothing is left to do for them.
        postponed=0 if is_swept else postponed,
        swept=sweep.counts,
        quiet_s=max(0.0, now - moved_at),
        holders=holders,
        pace=min((one.pace for one in working if one.pace is not None), key=lambda pace: pace.share, default=None),
        working=tuple(working[:SHOWN_MAX]),
        stalled=tuple(stalled[:SHOWN_MAX]),
        catch_up=catch_up,
        target=controls.target,
        spare=controls.spare,
        is_moving=controls.move is not None,
    )


async def report_active_run(pipeline: OpenPipeline) -> RunReport | None:
    """Report the run that is going on; None if there is none, which is found without a look at the shards."""
    run = (await pipeline.control_store.controls()).run
    if run is None or not run.is_active or pipeline.shard_ledger is None:
        return None
    shards = ShardLedger(pipeline.shard_ledger, pipeline.owner, pipeline.settings, pipeline.clock)
    return await report_run(pipeline, shards)


def _is_held(entry: Entry, now: float) -> bool:
    return entry.token != 0 and now < entry.lease_until


def _needing_consent(run: ReindexRun, progress: SweepProgress | CatchUpProgress) -> int:
    """Return how many keys are gone if the operator has to consent to their deletion; else 0."""
    is_allowed = run.delete_max is not None and progress.deleted + progress.gone <= run.delete_max
    return progress.gone if run.is_active and not is_allowed else 0


def _sweep_of(entry: Entry, run: ReindexRun) -> SweepProgress:
    if is_read(entry, run.generation) and entry.note:
        return msgspec.json.decode(entry.note, type=SweepProgress)
    if entry.position is not None and entry.advanced == order_at(run.generation):
        return msgspec.json.decode(entry.position.note, type=SweepProgress)
    return SweepProgress()


def _catch_up_of(entry: Entry, run: ReindexRun) -> CatchUpProgress:
    if entry.position is None or entry.advanced != order_at(run.generation):
        return CatchUpProgress()
    progress = msgspec.json.decode(entry.position.note, type=CatchUpProgress)
    return progress if progress.run_started_at == run.started_at else CatchUpProgress()


def _shard_report(name: str, rows: int, entry: Entry, now: float, pace: Pace | None = None) -> ShardReport:
    owner = entry.owner if _is_held(entry, now) else ""
    quiet_s = max(0.0, now - entry.updated_at)
    return ShardReport(name, rows, owner, quiet_s, entry.attempts, pace if owner else None)
