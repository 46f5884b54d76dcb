"""Variants that break the rules on reindexes and swaps: rows, gone keys, both targets, and the name that moves."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from keywise.adapters.memory.sink import MemorySink
from keywise.adapters.memory.targets import MemoryStore, MemoryTables, MemoryTarget
from keywise.core import rules
from keywise.core.controls import Controls, ReindexRun
from keywise.core.entry import Entry
from keywise.core.origin import Page
from keywise.core.sink import Grade
from keywise.core.target import TargetNote
from keywise.flow.handover import HandoverQueue
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.repair import Repairer
from keywise.reindex import comparison
from keywise.reindex.barrier import Barrier
from keywise.reindex.catch_up import CatchUp
from keywise.reindex.comparison import Comparison
from keywise.reindex.gap import GapKind, KeyState, gap_kind, state_of
from keywise.reindex.rows import gone_delivery, row_deliveries
from keywise.reindex.shards import ShardProgress
from keywise.reindex.swap import Swap
from keywise.reindex.sweep import Sweep
from keywise.reindex.worker import ReindexWorker
from mutants.moves import passed_by
from mutants.mutant import Mutant
from mutants.rows import by_generation

_move = MemoryStore.move
_state = Comparison._state
_call = Swap._call


def _claims_survive(of_live: bool) -> Callable[..., KeyState]:
    """A comparison that does not see the claims in one of the scopes, so that the swap does not end them."""

    def state(self: Comparison, key: str, entry: Entry | None, expired: list[str]) -> KeyState:
        is_live = expired is self.expired_live
        if entry is not None and is_live is of_live:
            return state_of(replace(entry, token=0))
        return _state(self, key, entry, expired)

    return state


def _late_call_counts(self: MemoryStore, before: str, after: str, epoch: int) -> None:
    if self.current == before and after in self.targets:
        self.targets[after].guards.discard(epoch)
        self.targets[before].guards.add(epoch + 1)
        self.current = after
    else:
        _move(self, before, after, epoch)


async def _called_off(self: Swap, controls: Controls) -> None:
    await self._barrier.change_live(lambda controls: replace(controls, move=None))


async def _change_of_anyone(self: Barrier, pipeline: OpenPipeline, change: Callable[[Controls], Controls]) -> Controls:
    store = pipeline.control_store
    while True:
        before = await pipeline.retry_until_reachable(LEDGER, store.controls)
        after = replace(change(before), swap_token=self._token)
        if after == before or await pipeline.retry_until_reachable(
            LEDGER,
            lambda before=before, after=after: store.replace_controls(before, after),  # type: ignore[misc]
        ):
            pipeline.controls = after
            return after


async def _at_the_present_epoch(self: Swap, controls: Controls, began: float) -> None:
    """A worker that was stopped after it had noted the call sends it as if it belonged to a later swap."""
    now = await self._live.retry_until_reachable(LEDGER, self._live.control_store.controls)
    await _call(self, replace(controls, target_epoch=now.target_epoch), began)


def _calm_though_suspect(entry: Entry) -> KeyState:
    return replace(state_of(entry), is_resolved=entry.token == 0 and entry.unknown is None)


async def _no_last_pass(self: Swap, run: ReindexRun) -> str:
    await self._wait_for_claims()
    return ""


def _gone_at_once(self: CatchUp, gap: Any, state: Any) -> None:
    state.gone.append(gap)


async def _never_asked_again(self: Sweep, claim: Any) -> bool:
    return not await self._hand_over([gone_delivery(key, mark, 0.0) for key, mark in self._missing.items()])


def _repaired_as_gone(self: Repairer, key: str, entry: Entry) -> bool:
    return True


def _tombstone_fetched(live: KeyState, other: KeyState) -> GapKind:
    gap = gap_kind(live, other)
    return GapKind.ROW if gap is GapKind.TOMBSTONE else gap


async def _not_waited_for(
    self: ReindexWorker, run: ReindexRun, queue: HandoverQueue, progress: ShardProgress, page: Page
) -> ShardProgress:
    name = f"{run.generation}/{progress.shard.name}/{progress.pages}/{next(self._readings)}"
    queue.put(row_deliveries(name, page.rows, self._pipeline.wall()))
    return progress.past(page, {}, 0)


def _adopted(self: MemoryStore, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
    found = self.targets.setdefault(target, MemoryTarget())
    found.note = note
    found.guards.add(epoch)


def _table_adopted(self: MemoryTables, target: str, note: TargetNote, definition: bytes | None) -> None:
    self._database.table(target)
    self._set_note(target, note)


def _as_it_was_opened(self: MemorySink) -> MemoryTarget:
    """A sink that finds the target by the name once, and writes there for ever."""
    if self._target:
        return self.store.found(self._target)
    opened = self.__dict__.setdefault("opened", self.store.current)
    return self.store.found(opened)


REINDEX_MUTANTS: tuple[Mutant, ...] = (
    Mutant("an expired token survives the swap", 25, Comparison, "_state", _claims_survive(of_live=True)),
    Mutant(
        "claims of the other scope survive the swap",
        25,
        Comparison,
        "_state",
        _claims_survive(of_live=False),
        Grade.ATOMIC,
    ),
    Mutant(
        "a forced write passes the barrier",
        25,
        rules,
        "decide_under",
        passed_by(lambda terms: terms is not None and terms.despite_pause and not terms.move_token),
    ),
    Mutant("generation hides a newer version", 16, rules, "_against_mark", by_generation),
    Mutant("a late call moves the name", 27, MemoryStore, "move", _late_call_counts, Grade.CONDITIONAL),
    Mutant("a swap is called off after its call", 27, Swap, "finish", _called_off, Grade.CONDITIONAL),
    Mutant("a call moves the name in a later epoch", 27, Swap, "_call", _at_the_present_epoch, Grade.CONDITIONAL),
    Mutant("two workers swap at once", 27, Barrier, "_change", _change_of_anyone),
    Mutant("suspects after the gate do not count", 27, comparison, "state_of", _calm_though_suspect),
    Mutant("the name moves before the last pass", 27, Swap, "_equalise", _no_last_pass, Grade.ATOMIC),
    Mutant("a half-built target is adopted", 27, MemoryStore, "create", _adopted, Grade.CONDITIONAL),
    Mutant("a half-built table is adopted", 27, MemoryTables, "create", _table_adopted, Grade.ATOMIC),
    Mutant("a worker goes on with the old target", 27, MemorySink, "_place", _as_it_was_opened, Grade.CONDITIONAL),
    Mutant("a pass believes gone once", 26, CatchUp, "_note_missing", _gone_at_once),
    Mutant("a sweep believes gone once", 26, Sweep, "_delete_gone", _never_asked_again, Grade.ATOMIC),
    Mutant("a repair believes gone once", 26, Repairer, "_is_gone", _repaired_as_gone),
    Mutant("tombstones are fetched", 26, comparison, "gap_kind", _tombstone_fetched),
    Mutant("a cursor moves before its rows end", 26, ReindexWorker, "_write_page", _not_waited_for),
)
