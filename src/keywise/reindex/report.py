"""The report of a run: how far it has come, how its rows ended, and why it does not go on."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from keywise.core.change import Outcome
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
    is_finished,
    order_at,
    progress_of,
    rows_expected,
    shard_number,
)

STALLED_S = 120.0
"""A shard that a worker has begun is stalled if nothing has happened to it for so long."""
UNATTENDED_S = 10.0
"""A run is unattended if no worker has done anything on it for so long."""
FAILED_MIN = 3
"""A shard is also stalled if so many attempts have failed since its last page."""
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
    is_held: bool = False
    """Whether an operator has paused the whole pipeline, so that rows in place wait."""

    @property
    def rows_read(self) -> int:
        return self.counts.get(READ, 0)

    @property
    def dead(self) -> int:
        """How many rows are dead letters."""
        return self.counts.get(Outcome.DEAD, 0) + self.swept.get(Outcome.DEAD, 0)

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
    now = await pipeline.admin.now()
    found = _RunEntries(run, now, moved_at=run.started_at)
    async for key, entry in shards.entries():
        found.add(key, entry)
    return RunReport(
        run=run,
        shards_read=found.read,
        shards_begun=found.begun,
        counts=dict(+found.counts),
        rows_expected=rows_expected(found.progresses),
        seconds=max(0.0, (run.ended_at or now) - run.started_at),
        gone=_needing_consent(run, found.last_stage),
        deleted=found.last_stage.deleted,
        # A worker that was stopped may postpone rows of its last page after another worker has read that page again,
        # and the sweep has ended. Nothing is left to do for these rows.
        postponed=0 if found.is_swept else found.postponed,
        swept=found.sweep.counts,
        quiet_s=max(0.0, now - found.moved_at),
        holders=found.holders,
        pace=min((one.pace for one in found.working if one.pace is not None), key=lambda one: one.share, default=None),
        working=tuple(found.working[:SHOWN_MAX]),
        stalled=tuple(found.stalled[:SHOWN_MAX]),
        catch_up=found.catch_up,
        target=controls.target,
        spare=controls.spare,
        is_moving=controls.move is not None,
        is_held=controls.is_paused and run.is_active and not run.is_beside,
    )


async def report_active_run(pipeline: OpenPipeline) -> RunReport | None:
    """Report the run that is going on; None if there is none, which takes no look at the shards."""
    run = (await pipeline.control_store.controls()).run
    if run is None or not run.is_active or pipeline.shard_ledger is None:
        return None
    shards = ShardLedger(pipeline.shard_ledger, pipeline.owner, pipeline.settings, pipeline.clock)
    return await report_run(pipeline, shards)


class _RunEntries(msgspec.Struct):
    """What the entries in the scope of the shards say of one run."""

    run: ReindexRun
    now: float
    moved_at: float
    """When something has happened to the run last."""
    read: int = 0
    begun: int = 0
    postponed: int = 0
    holders: int = 0
    is_swept: bool = False
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    progresses: list[ShardProgress] = []
    working: list[ShardReport] = []
    sweep: SweepProgress = SweepProgress()
    catch_up: CatchUpProgress = CatchUpProgress()

    @property
    def stalled(self) -> list[ShardReport]:
        if not self.run.is_active or self.run.is_paused:
            return []
        return [one for one in self.working if one.quiet_s >= STALLED_S or one.attempts >= FAILED_MIN]

    @property
    def last_stage(self) -> SweepProgress | CatchUpProgress:
        """The stage that deletes gone keys."""
        return self.catch_up if self.run.is_beside else self.sweep

    def add(self, key: str, entry: Entry) -> None:
        number, generation = shard_number(key), self.run.generation
        if key in (SWEEP, CATCH_UP) or number is not None:
            self.holders += _is_held(entry, self.now)
            self.moved_at = max(self.moved_at, entry.updated_at)
        if key == SWEEP:
            self.sweep, self.is_swept = _sweep_of(entry, self.run), is_finished(entry, generation)
            self._add_stage("sweep", RunState.SWEEPING, entry)
        elif key == CATCH_UP:
            self.catch_up = _catch_up_of(entry, self.run)
            self._add_stage("catching up", RunState.CATCHING_UP, entry)
        elif number is None:
            self.postponed += entry.advanced == order_at(generation) and not is_finished(entry, generation)
        elif number < self.run.shards and (progress := progress_of(entry, generation)) is not None:
            self._add_shard(entry, progress)

    def _add_stage(self, name: str, state: RunState, entry: Entry) -> None:
        """List a stage after the scan beside the shards, if an attempt at it has failed."""
        if entry.attempts and self.run.state is state:
            self.working.append(_shard_report(name, 0, entry, self.now))

    def _add_shard(self, entry: Entry, progress: ShardProgress) -> None:
        self.counts.update(progress.counts)
        self.progresses.append(progress)
        if is_finished(entry, self.run.generation):
            self.read += 1
        elif progress.pages or entry.token or entry.attempts:
            self.begun += 1
            name, rows = f"shard {progress.shard.name}", progress.counts.get(READ, 0)
            self.working.append(_shard_report(name, rows, entry, self.now, progress.pace))


def _is_held(entry: Entry, now: float) -> bool:
    return entry.token != 0 and now < entry.lease_until


def _needing_consent(run: ReindexRun, progress: SweepProgress | CatchUpProgress) -> int:
    """Return how many keys are gone if the operator has to consent to their deletion; else 0."""
    is_allowed = run.delete_max is not None and progress.deleted + progress.gone <= run.delete_max
    return progress.gone if run.is_active and not is_allowed else 0


def _sweep_of(entry: Entry, run: ReindexRun) -> SweepProgress:
    if is_finished(entry, run.generation) and entry.note:
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
