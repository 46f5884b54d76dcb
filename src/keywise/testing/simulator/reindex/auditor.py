"""Judges every step of a simulated reindex by a book of its own, and what is left at the end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from keywise.adapters.memory.targets import Stored
from keywise.core import events
from keywise.core.change import VERSION_MIN, Change, ChangeHeader
from keywise.core.controls import PLAIN, Controls, ReindexRun, RunState
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Claim, Commit, Entry, LeaseTerms, Refusal
from keywise.core.origin import Page
from keywise.core.target import TargetNote
from keywise.reindex.shards import ROW_KEY, SHARD_KEY, ShardProgress, other_scope
from keywise.testing.run_log import RunLog
from keywise.testing.simulator.reindex.origin import RowBody
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld

LIVE = "sim"
"""The scope of the live target."""
SHARDS = "sim/reindex"


class Grant(msgspec.Struct, frozen=True):
    """What the auditor knows of one token."""

    scope: str
    key: str
    owner: str
    epoch: int
    """How often the name had moved when it was granted."""
    target: str
    """Where a holder in the scope of another target writes; empty in the live scope."""


class Seen(msgspec.Struct, frozen=True):
    """What readers of the name have seen of a key at last."""

    version: int
    deleted: bool


class ReindexAudit(RunLog):
    """Judges every step of a `ReindexWorld`."""

    def __init__(self, world: "ReindexWorld") -> None:
        super().__init__(world.now)
        self._world = world
        self._controls = PLAIN
        self._live = ""
        """The target that the name stood for when it was looked at last."""
        self._epoch = 0
        self._grants: dict[int, Grant] = {}
        self._marks: dict[tuple[str, str], Entry] = {}
        self._seen: dict[str, Seen] = {}
        self._forced: set[str] = set()
        """Keys that an operator has forced, or tries to."""
        self.removed: dict[str, int] = {}
        """By key, the version that an operator has removed."""
        self._removals: set[tuple[str, int]] = set()
        """Keys and versions that an operator has ever removed."""
        self._pages: dict[tuple[str, str, str], Page] = {}
        """By process, shard and cursor: the page that was read last."""
        self._cursors: dict[tuple[int, str], str] = {}
        """By generation and shard: the cursor that was kept last."""
        self._built_by: dict[str, TargetNote] = {}
        self._into: dict[int, str] = {}
        """By generation: the target that a run fills; empty for a run in place."""
        self._began_at: dict[int, float] = {}
        """When the run of a generation was seen first."""
        self._swap_token = 0
        self._changes = -1
        """How many changes of the database were looked at."""

    def begin(self) -> None:
        self._live = self._world.current_target()

    # The ledger.

    def granted(self, scope: str, claim: Claim, terms: LeaseTerms) -> None:
        controls = self._world.controls
        move = self._world.controls_of(scope).move
        if move is not None and terms.move_token != move.token:
            self.violate(f"{scope} {claim.key} is granted to {terms.owner} behind the barrier")
        run = controls.run
        into = run.into if run is not None and scope not in (LIVE, SHARDS) else ""
        self._grants[claim.token] = Grant(scope, claim.key, terms.owner, self._epoch, into)
        self.note(f"{terms.owner} claims {scope} {claim.key} {claim.order}{' over' if claim.took_over else ''}")

    def refused(self, scope: str, header: ChangeHeader, refusal: Refusal) -> None:
        """A change is acked because the ledger has something newer, or has refused to write it again."""
        mark = self._world.entries(scope)[header.key].mark if refusal.mark is not None else None
        if mark is not None and header.order is not None and header.order[1] > mark[1]:
            self.violate(f"{scope} {header.key} {header.order} is refused as {refusal.reason} behind {mark}")

    def marked(self, scope: str, header: ChangeHeader) -> None:
        """A transaction without a claim is committed."""
        if self._world.controls_of(scope).move is not None:
            self.violate(f"{scope} {header.key} is written behind the barrier")

    def committed(self, scope: str, commit: Commit) -> None:
        claim = commit.claim
        grant = self._grants[claim.token]
        if scope != SHARDS:
            if grant.epoch != self._epoch:
                self.violate(f"{scope} {claim.key} is committed by {grant.owner} under a token from before the swap")
            if scope == LIVE and claim.order is not None and grant.owner.startswith("operator"):
                self._operated(claim)
        elif claim.key.startswith(SHARD_KEY) and commit.note:
            self._advance(claim, commit.note)

    def advanced(self, scope: str, claim: Claim, note: bytes) -> None:
        if scope == SHARDS and claim.key.startswith(SHARD_KEY):
            self._advance(claim, note)

    def dead_lettered(self, scope: str, request: DeadLetterRequest) -> None:
        self.violate(f"{scope} {request.letter.key} is a dead letter: {request.letter.cause}")

    def _operated(self, claim: Claim) -> None:
        """An operator has removed or forced a key."""
        assert claim.order is not None, "only a change is committed"
        if claim.deleted and claim.order[1] != VERSION_MIN:
            self.removed[claim.key] = claim.order[1]
            self._removals.add((claim.key, claim.order[1]))
        elif not claim.deleted:
            self.removed.pop(claim.key, None)
        self.note(f"an operator has {'removed' if claim.deleted else 'forced'} {claim.key} at {claim.order}")

    def forcing(self, key: str) -> None:
        self._forced.add(key)

    # The scan.

    def page_read(self, process: Process, shard: str, after: str, page: Page) -> None:
        self._pages[process.name, shard, after] = page

    def _advance(self, claim: Claim, note: bytes) -> None:
        """The cursor of a shard moves: each row of the page has ended, or is left to the sweep."""
        progress = msgspec.json.decode(note, type=ShardProgress)
        assert claim.order is not None, "a shard is claimed at its generation"
        generation, place = claim.order[1], (claim.order[1], progress.shard.name)
        before = self._cursors.get(place, "")
        if progress.keys or progress.after == before:
            return
        self._cursors[place] = progress.after
        owner = self._grants[claim.token].owner.removesuffix("-reindex")
        page = self._pages.get((owner, progress.shard.name, before))
        if page is None or page.after != progress.after:
            self.violate(f"shard {progress.shard.name} moves from {before!r} to {progress.after!r}, which nobody read")
            return
        run, is_beside = self._world.controls.run, bool(self._into[generation])
        if run is None or run.generation != generation or not run.is_active:
            return  # What a cancelled run has written may be dropped by now.
        scope = other_scope(LIVE, generation) if is_beside else LIVE
        for body in page.rows:
            row = msgspec.json.decode(body, type=RowBody)
            entry = self._world.entries(scope).get(row.id)
            # A row that was refused as removed may be forced before the cursor moves, which leaves a lower generation.
            least = 0 if is_beside or row.id in self._forced else generation
            if not (_has_ended(entry, row, least) or self._is_postponed(row.id, generation)):
                self.violate(f"the cursor passes {row.id} v{row.v}, which has not ended: {entry}")

    def _is_postponed(self, key: str, generation: int) -> bool:
        for name, entry in self._world.entries(SHARDS).items():
            if name.startswith(ROW_KEY) and entry.position is not None and entry.position.note == key.encode():
                return entry.advanced is not None and entry.advanced[1] >= generation
        return False

    # The sink.

    def written(self, target: str, change: Change[Any], token: int, scope: str = "") -> None:
        """A target has accepted a write."""
        grant = self._grants.get(token)
        scope = grant.scope if grant is not None else scope
        owner = grant.owner if grant is not None else "a transaction"
        is_live = target == self._world.current_target()
        self.note(f"{target}{' (live)' if is_live else ''} takes {change.key} {change.order} deleted {change.deleted}")
        if grant is not None and grant.epoch != self._epoch:
            self.violate(f"{owner} writes {change.key} under a token from before the swap")
        if scope == LIVE and not is_live:
            self.violate(f"{owner} writes {change.key} to {target}, which is not live any more")
        if scope != LIVE and is_live:
            self.violate(f"{owner} writes {change.key} to {target}, which is live, in the scope {scope}")
        if is_live:
            self._show(change.key, Seen(change.order[1], change.deleted))

    def _show(self, key: str, now: Seen) -> None:
        """Readers of the name see another state of a key from here on."""
        before, entry = self._seen.get(key), self._world.entries(LIVE).get(key)
        is_excused = self._world.has_suspects and entry is not None and entry.suspicions > 0
        if before is not None and not is_excused:
            if now.version < before.version:
                self.violate(f"readers see {key} v{now.version} after v{before.version}")
            is_back = now.version == before.version and before.deleted and not now.deleted
            if is_back and key not in self._forced:
                self.violate(f"{key} v{now.version} is back after its deletion")
        self._seen[key] = now

    # Targets.

    def created(self, target: str, note: TargetNote, before: Mapping[str, Stored]) -> None:
        built_by = self._built_by.setdefault(target, note)
        if built_by != note or (before and target not in self._built_by):
            self.violate(f"{target} of {built_by} is adopted by {note}")
        self.note(f"{target} is created for {note}")

    def planted(self, target: str) -> None:
        """Somebody else has made a target."""
        self._built_by[target] = TargetNote("another", 0)

    def dropped(self, target: str) -> None:
        self._built_by.pop(target, None)
        self.note(f"{target} is dropped")
        if target == self._live:
            self.violate(f"{target} is dropped, and it was live")

    def saw(self, event: events.Event) -> None:
        """A worker has emitted an event."""
        if isinstance(event, events.SwapRefused | events.Alarmed | events.SweepHeld | events.Failed):
            self.note(f"event {event}")

    # After every step of a server.

    def look(self) -> None:
        """Compare with what was seen last."""
        world = self._world
        if world.database.is_dirty:
            return  # It is looked at when the transaction has ended.
        live = world.current_target()
        if live == self._live and self._changes == world.database.changes:
            return
        self._changes, controls = world.database.changes, world.controls
        before, self._controls = self._controls, controls
        if live != self._live:
            self._judge_move(before, controls, self._live, live)
            self._live = live
            self._epoch += 1
        if controls is not before and controls != before:
            self._judge_controls(before, controls)
        for scope in world.scopes():
            self._look_at_marks(scope)

    def _look_at_marks(self, scope: str) -> None:
        entries = self._world.entries(scope)
        for key, entry in entries.items():
            seen = self._marks.get((scope, key))
            if seen is entry:
                continue
            self._marks[scope, key] = entry
            if entry.mark is None:
                continue
            if seen is None or seen.mark != entry.mark or seen.deleted != entry.deleted:
                self.note(f"{scope} {key} is marked {entry.mark}{' deleted' if entry.deleted else ''}")
                if seen is not None and seen.mark is not None and entry.mark < seen.mark:
                    self.violate(f"the mark of {scope} {key} falls from {seen.mark} to {entry.mark}")
                if entry.deleted:
                    self._judge_deletion(scope, key, entry)

    def _judge_deletion(self, scope: str, key: str, entry: Entry) -> None:
        """A key whose row is there, at the version that was deleted, is not gone; only an operator removes it."""
        truth, live = self._world.origin.latest(key), self._world.entries(LIVE).get(key)
        assert entry.mark is not None, "a deletion has a mark"
        is_there = truth is not None and truth.is_there and truth.version == entry.mark[1]
        is_copy = live is not None and live.deleted and live.mark is not None and live.mark[1] == entry.mark[1]
        is_removed = (key, entry.mark[1]) in self._removals
        if is_there and not is_removed and not (scope != LIVE and is_copy):
            self.violate(f"{scope} {key} v{entry.mark[1]} is believed to be gone")

    # Runs and swaps.

    def _judge_controls(self, before: Controls, after: Controls) -> None:
        self._judge_run(before.run, after.run)
        if after.swap_token < self._swap_token:
            self.violate("a worker that another one has overtaken changes the controls")
        self._swap_token = max(self._swap_token, after.swap_token)
        moved = after.target_epoch > before.target_epoch
        if after.move != before.move:
            self.note(f"the barrier is {after.move}")
        if before.move is not None and before.move.is_called and not moved:
            if after.move is None:
                self.violate("the swap is called off after the name was called to move")
            elif not after.move.is_called or after.move.after != before.move.after:
                self.violate("the call of the name is forgotten")
        if moved and (before.move is None or after.target != before.move.after or after.target != self._live):
            self.violate(f"the swap to {after.target} ends, and the name stands for {self._live}")

    def _judge_run(self, before: ReindexRun | None, after: ReindexRun | None) -> None:
        if after is None or after == before:
            return
        is_new = before is None or (before.generation, before.is_rollback) != (after.generation, after.is_rollback)
        if is_new or before is None or before.state is not after.state:
            self.note(f"run {after.generation} is {after.state}, into {after.into!r}, rollback {after.is_rollback}")
        if is_new and not after.is_rollback:
            self._began_at.setdefault(after.generation, self._now())
            self._into.setdefault(after.generation, after.into)
        was_active = before is None or before.is_active
        if after.state is RunState.COMPLETE and was_active and not after.is_beside:
            self._world.faults.injected["run in place ended"] += 1
            if not after.is_partial:
                self._judge_complete(after)

    def _judge_complete(self, run: ReindexRun) -> None:
        """Every row that was there throughout was written at the generation, or something newer was."""
        since = self._began_at[run.generation]
        for key in self._world.origin.rows:
            row = self._world.origin.steady(key, since)
            if row is None:
                continue
            entry = self._world.entries(LIVE).get(key)
            # A row of a removed key is not written, and an operator who forces the key then does so below the run.
            least = 0 if key in self._forced else run.generation
            if not _has_ended(entry, RowBody(key, row.version), least):
                self.violate(f"run {run.generation} is complete without {key} v{row.version}: {entry}")

    def _judge_move(self, before: Controls, after: Controls, left: str, taken: str) -> None:
        """The name moves: it was called to, and both targets are equal and calm."""
        world, move = self._world, before.move
        run = before.run
        self.note(f"the name moves from {left} to {taken}")
        world.faults.injected["rollback" if run is not None and run.is_rollback else "swap"] += 1
        if move is None or (move.before, move.after) != (left, taken) or not (move.is_called or world.has_table):
            self.violate(f"the name moves from {left} to {taken}, and the barrier is {move}")
        old, new = world.content(left), world.content(taken)
        different = [key for key in sorted(old.keys() | new.keys()) if _version(old, key) != _version(new, key)]
        if different:
            key = different[0]
            self.violate(f"at the swap {key} is v{_version(old, key)} in {left} and v{_version(new, key)} in {taken}")
        scopes = (LIVE, other_scope(LIVE, run.generation)) if run is not None else (LIVE,)
        for scope in scopes:
            for key, entry in sorted(world.entries(scope).items()):
                if entry.token or entry.suspicions or entry.unknown is not None:
                    self.violate(f"at the swap {scope} {key} is not calm: {entry}")
        for key, held in new.items():
            if key not in different:
                self._show(key, Seen(held.order[1], held.deleted))

    # The end.

    def check_end(self) -> None:
        world = self._world
        controls = world.controls
        if world.queue:
            self.violate(f"not drained: {len(world.queue)} messages")
        if controls.move is not None or (controls.run is not None and controls.run.is_active):
            self.violate(f"not at rest: {controls.move}, {controls.run}")
        content = world.content(world.current_target())
        for key in (*world.keys, *world.strays.keys):
            self._check_key(key, content)

    def _check_key(self, key: str, content: Mapping[str, Stored]) -> None:
        truth = self._world.origin.latest(key)
        wanted = truth.version if truth is not None and truth.is_there else None
        if wanted is not None and self.removed.get(key, VERSION_MIN) >= wanted:
            wanted = None
        if _version(content, key) != wanted:
            self.violate(f"{key} ends at v{_version(content, key)}, the truth is v{wanted}")
        entry = self._world.entries(LIVE).get(key)
        if entry is not None and entry.suspicions:
            self.violate(f"{key} ends suspect")


def _has_ended(entry: Entry | None, row: RowBody, generation: int) -> bool:
    """Whether a row was written at a generation, or its key is at something newer, or was removed."""
    if entry is None or entry.mark is None:
        return False
    version = entry.mark[1]
    return version > row.v or (version == row.v and (entry.deleted or entry.mark[2] >= generation))


def _version(content: Mapping[str, Stored], key: str) -> int | None:
    """Return the version that a reader finds; None if the key is deleted or unknown."""
    held = content.get(key)
    return None if held is None or held.deleted else held.order[1]
