"""The operator's actions on a pipeline; each leaves a history record with who acted and why.

The record is written right after the action. If the process is killed in between, the action has no record.
"""

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from keywise.core.change import VERSION_MIN, Change, ChangeHeader
from keywise.core.controls import EVERYTHING, Controls, Pause
from keywise.core.entry import EMPTY, LedgerPolicy, Refusal
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.failures import storable
from keywise.core.history import HistoryRecord
from keywise.core.rules import suspect_since
from keywise.core.sink import Grade
from keywise.core.source import ParkingSource
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.refetch import needs_refetch
from keywise.flow.repair import Repairer
from keywise.operate.force import ForceWriter
from keywise.operate.waiting import AdminClaimer

LOOK_S = 0.2
"""How often an action that waits for a claim checks it again."""
ANNOUNCED = "announced again"
"""The detail of an action on an object, which a worker carries out."""
PAGE = 1000
SUSPECTS_PAGE = 100


class AuditNote(msgspec.Struct, frozen=True):
    """Who acts, and why; it goes into the history."""

    who: str
    why: str = ""


async def record(pipeline: OpenPipeline, audit_note: AuditNote, line: HistoryRecord) -> None:
    """Add a record to the history of a pipeline, dated now, with the reason appended to its detail."""
    detail = storable("; ".join(part for part in (line.detail, audit_note.why) if part))
    try:
        at = await pipeline.admin.now()
        await pipeline.history_store.record([replace(line, at=at, detail=detail, by=storable(audit_note.who))])
    except UnavailableError as error:
        raise AdminError(f"{line.what}: this is done, but the history could not be written: {error}") from error


class PipelineAdmin:
    """The operator's actions on one pipeline."""

    def __init__(self, pipeline: OpenPipeline, audit_note: AuditNote, claimer: AdminClaimer) -> None:
        self.pipeline = pipeline
        self._audit_note = AuditNote(storable(audit_note.who), storable(audit_note.why))
        self._claimer = claimer
        self._force_writer = ForceWriter(pipeline, claimer)

    async def record(self, what: str, key: str = "", version: int | None = None, detail: str = "") -> None:
        """Add a record to the history."""
        await record(self.pipeline, self._audit_note, HistoryRecord(0.0, what, key, version, detail))

    # Pauses.

    async def pause(self, keys: str, *, is_pattern: bool) -> Pause | None:
        """Pause a key or a pattern; return the pause that it replaces, if there was one."""
        keys = keys if is_pattern else await self.pipeline.key_of(keys)
        control_store, audit_note = self.pipeline.control_store, self._audit_note
        controls = await control_store.controls()
        before = next((one for one in controls.pauses if (one.keys, one.is_pattern) == (keys, is_pattern)), None)
        at = await self.pipeline.admin.now()
        await control_store.pause(Pause(keys, is_pattern, at, audit_note.who, audit_note.why))
        await self._record_pause("paused", keys, is_pattern)
        return before

    async def resume(self, keys: str, *, is_pattern: bool) -> bool:
        """End a pause, given exactly as it was set; return False if there is none."""
        await self._check_move()
        keys = keys if is_pattern else await self.pipeline.key_of(keys)
        if not await self.pipeline.control_store.resume(keys, is_pattern):
            return False
        await self._record_pause("resumed", keys, is_pattern)
        await self._recall()
        return True

    async def _recall(self) -> None:
        """Make the parked messages visible again, so that resumed keys do not wait for the delay of their messages.

        If a source cannot be reached, its messages come back after their delay.
        """
        for _, source in self.pipeline.sources:
            if isinstance(source, ParkingSource):
                with suppress(UnavailableError):
                    await source.recall(None)

    async def _record_pause(self, what: str, keys: str, is_pattern: bool) -> None:
        if not is_pattern:
            await self.record(what, keys)
        else:
            await self.record(what, detail="every key" if keys == EVERYTHING else f"keys like {keys!r}")

    async def until_free(self, keys: str, *, is_pattern: bool) -> None:
        """Wait until no claim on these keys is held."""
        pause = Pause(keys if is_pattern else await self.pipeline.key_of(keys), is_pattern)
        while held := [key async for key in self._held() if pause.covers(key)]:
            await self._wait_for(held)

    async def _wait_for(self, held: Sequence[str]) -> None:
        entry = await self.pipeline.admin.inspect(held[0]) or EMPTY
        others = f", and {len(held) - 1:,} more" if len(held) > 1 else ""
        await self._claimer.wait_budget.wait(f"{held[0]!r} is held by {entry.owner}{others}", LOOK_S)

    async def _held(self) -> AsyncIterator[str]:
        """Yield the keys with a held claim. Workers hold a limited number of claims, so there are few pages."""
        after = ""
        while page := await self.pipeline.control_store.held(after, PAGE):
            for key in page:
                yield key
            after = page[-1]

    # Eras.

    async def reset(self, key: str) -> int:
        """Raise the era of one key: its mark stays, and the next change wins."""
        self._check_era()
        await self._check_move()
        key = await self.pipeline.key_of(key)
        if await self.pipeline.admin.inspect(key) is None:
            raise AdminError(f"nothing is known of {key!r}, so the next change wins anyway; nothing was reset")
        async with self._claimer.taken(ChangeHeader(key, None)) as claim:
            assert not isinstance(claim, Refusal), "an exclusion is never stale"
            era = await self.pipeline.control_store.reset(claim)
        if era is None:
            raise AdminError(f"the claim on {key!r} was lost; nothing was reset, try again")
        await self.record("reset", key, detail=f"era {era}")
        return era

    async def raise_era(self) -> int:
        """Raise the era of a pipeline, which must be paused as a whole; waits until no claim is held."""
        control_store = self.pipeline.control_store
        while True:
            await self.check_pause()
            era = await control_store.raise_era()
            if era is not None:
                break
            if held := await control_store.held("", PAGE):
                await self._wait_for(held)
        await self.record("era raised", detail=f"era {era}")
        return era

    async def check_pause(self) -> None:
        """Raise `AdminError` unless the pipeline is paused, its sink can have eras, and no other target is built."""
        self._check_era()
        controls = await self._check_move()
        if (run := controls.run_beside) is not None:
            raise AdminError(
                f"reindex {run.generation} of pipeline {self.pipeline.name!r} fills {run.into!r} in the current era; "
                f"{self._end_run}"
            )
        if not controls.is_paused:
            raise AdminError(
                f"pipeline {self.pipeline.name!r} is not paused, so a worker could mix both numberings; "
                "first keywise pause --all --wait"
            )

    def _check_era(self) -> None:
        if self.pipeline.grade is Grade.CONDITIONAL:
            raise AdminError(
                f"the sink of pipeline {self.pipeline.name!r} compares versions itself, and one 64-bit version has no "
                "room for an era: the sink would refuse the next change; send the new numbering to a fresh target, as "
                "a pipeline of its own"
            )

    # Runs beside.

    async def _check_move(self) -> Controls:
        """Return the controls; raise `AdminError` while the name of the sink moves, because nothing else may act then.

        The ledger refuses claims by itself; this check explains it before anything is waited for.
        """
        controls = await self.pipeline.control_store.controls()
        if (move := controls.move) is not None:
            raise AdminError(
                f"pipeline {self.pipeline.name!r} moves to target {move.after!r} now, which takes some seconds; "
                "try again"
            )
        return controls

    @property
    def _end_run(self) -> str:
        name = shlex.quote(self.pipeline.name)
        return f"wait for the swap (keywise reindex status {name}), or end it with keywise reindex cancel {name}"

    # Writes.

    async def force(self, key: str, *, older: bool = False) -> Change[Any]:
        """Write the current state of a key from the source of truth; of an object, let a worker read it again."""
        await self._check_move()
        change = await self._force_writer.rewrite(key, older=older)
        detail = "a deletion" if change.deleted else ANNOUNCED if self.pipeline.objects is not None else ""
        await self.record("forced", change.key, change.version, detail)
        return change

    async def remove(self, key: str) -> Change[Any]:
        """Delete a key; the next real change to it wins. Of an object, let a worker delete its records."""
        await self._check_move()
        change = await self._force_writer.delete(key)
        # A removal of a key that the ledger does not know has the lowest version, which is not a real one.
        version = change.version if change.version != VERSION_MIN else None
        await self.record("removed", change.key, version, ANNOUNCED if self.pipeline.objects is not None else "")
        return change

    # Maintenance.

    async def prune(self) -> int:
        """Forget keys that no delivery can reach any more; return how many."""
        retention_s = self.pipeline.settings.retention_s
        if retention_s is None:
            raise AdminError(
                f"pipeline {self.pipeline.name!r} declares no retention, so nothing is ever forgotten; say how long "
                f'keys are kept at least: app.pipeline({self.pipeline.name!r}, retention="30d", ...)'
            )
        if (run := (await self._check_move()).run_beside) is not None:
            raise AdminError(
                f"reindex {run.generation} of pipeline {self.pipeline.name!r} compares the keys of {run.into!r} with "
                f"those of the live target, so none may be forgotten; {self._end_run}"
            )
        keys = await self.pipeline.ledger.prune(retention_s)
        await self.record("pruned", detail=f"{keys:,} keys")
        return keys

    async def resynced(self) -> bool:
        """Record that everything was written again, so that no full resync is due; False if none was due."""
        if not (await self.pipeline.control_store.controls()).resync_at:
            return False
        await self.pipeline.admin.mark_suspect([], False)
        await self.record("resynced")
        return True

    async def repairs(self, keys: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
        """Repair these keys, or all suspect keys if `keys` is empty.

        Yields each key with the cause if it was not repaired; the cause is empty for a repaired key. A suspect object
        is announced again, and the worker that has read it ends the suspicion.
        """
        await self._check_move()
        if self.pipeline.objects is None:
            needs_refetch(self.pipeline)
        repairer = Repairer(self.pipeline, self._claimer.heartbeat, despite_pause=True)
        if keys:
            for key in dict.fromkeys([await self.pipeline.key_of(key) for key in keys]):
                yield key, await self._repair(repairer, key)
            return
        seen: set[str] = set()
        admin = self.pipeline.admin
        while fresh := [key for key in await admin.suspects(SUSPECTS_PAGE + len(seen), 0.0) if key not in seen]:
            seen.update(fresh)
            for key in fresh:
                yield key, await self._repair(repairer, key)

    async def _repair(self, repairer: Repairer, key: str) -> str:
        cause = await self._not_yet(key) or (await repairer.run([key])).get(key, "")
        if not cause and self.pipeline.objects is not None:
            await self.record("announced again", key, detail="for its repair")
        elif not cause:
            await self.record("repaired", key)
        return cause

    async def _not_yet(self, key: str) -> str:
        """Return why a key cannot be repaired now; empty if it can."""
        settings, admin = self.pipeline.settings, self.pipeline.admin
        entry = await admin.inspect(key) or EMPTY
        since = suspect_since(entry, LedgerPolicy(redelivery_s=settings.redelivery_s))
        if since is None:
            return "it is not suspect"
        wait_s = since + settings.horizon_s - await admin.now()
        if wait_s > 0:
            return f"a write of an earlier holder may still land; repair it in {wait_s:.0f} s"
        return ""


async def keys_like(pipeline: OpenPipeline, pattern: str) -> int | None:
    """Return how many keys the ledger knows if the pattern covers all of them; None if it does not."""
    pause, after, count = Pause(pattern, is_pattern=True), "", 0
    while page := await pipeline.control_store.keys(after, PAGE):
        if not all(pause.covers(key) for key in page):
            return None
        after, count = page[-1], count + len(page)
    return count
