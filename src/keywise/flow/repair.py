"""Repair of suspect keys: claim the key, read its current state from the source of truth, and write it."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from keywise.core import events
from keywise.core.change import VERSION_MIN, Change, ChangeHeader, Order, Outcome, is_same_version
from keywise.core.entry import EMPTY, Certainty, Claim, Entry, LeaseTerms, Level, Refusal
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.rules import in_era
from keywise.core.sink import Sink
from keywise.core.tracebacks import traceback_of
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.refetch import refetched

KEYS_A_ROUND = 10
"""How many keys are repaired in one round. Changes are processed between rounds."""

KEYS_MAX = 1000
"""How many suspect keys are looked at. If so many cannot be repaired, younger ones wait for them."""

OLDER = "refetch returned an older version than the one that was, or may have been, written"
MISSING = "the origin does not have this key, which may only be late; its repair asks again after the horizon"

_LOWEST: Order = (0, VERSION_MIN, 0)
"""The order of the deletion of a key that has no mark and does not exist in the source of truth."""


class Repairer:
    """Finds suspect keys and repairs them. A repair runs user code, in the company that its level allows."""

    def __init__(self, pipeline: OpenPipeline, heartbeat: Heartbeat, *, despite_pause: bool = False) -> None:
        self._pipeline = pipeline
        self._heartbeat = heartbeat
        self._despite_pause = despite_pause
        self.due = self._next_due()
        self.keys: set[str] = set()
        """The keys that are being repaired, or claimed for that."""
        self._retry_at: dict[str, float] = {}
        """Suspect keys whose repair was tried, or refused, with the time of the next attempt."""
        self._missing: dict[str, tuple[Order, float]] = {}
        """Suspect keys that the origin did not have, with their mark then, and since when."""

    async def suspects(self) -> list[str]:
        """Return the keys that can be repaired now, and set when the next search is due."""
        self.due = self._next_due()
        try:
            now = self._pipeline.clock()
            # The oldest come first, so a round finds others only if it asks for more than were tried before.
            limit = KEYS_A_ROUND + len(self._retry_at)
            found = await self._pipeline.admin.suspects(min(limit, KEYS_MAX), self._pipeline.settings.horizon_s)
            self._retry_at = {key: self._retry_at[key] for key in found if key in self._retry_at}
            self._missing = {key: self._missing[key] for key in found if key in self._missing}
            due = [key for key in found if self._retry_at.get(key, now) <= now]
            # Keys that were not tried go first, then those that have waited longest.
            return sorted(due, key=lambda key: self._retry_at.get(key, -math.inf))[:KEYS_A_ROUND]
        except UnavailableError as error:
            await self._pipeline.back_off("ledger", error, 1)
            return []

    async def run(self, keys: list[str]) -> dict[str, str]:
        """Repair keys one after another, with nothing beside them; return the cause for each that was not repaired."""
        causes: dict[str, str] = {}
        for place, key in enumerate(keys):
            try:
                if cause := await self._repair(key):
                    causes[key] = cause
            except UnavailableError as error:
                await self._pipeline.back_off("ledger", error, 1)
                return causes | dict.fromkeys(keys[place:], str(error))
        return causes

    def _next_due(self) -> float:
        if self._pipeline.refetch is None and self._pipeline.objects is None:
            return float("inf")
        return self._pipeline.clock() + self._pipeline.settings.repair_s * (0.5 + self._pipeline.rng.random())

    async def _repair(self, key: str) -> str:
        """Repair one key; return why it was not repaired, or an empty text."""
        answer = await self.claim(key, Level.ALONE)
        return await self.run_under(answer) if isinstance(answer, Claim) else f"the key is {answer.reason.value}"

    async def claim(self, key: str, level: Level) -> Claim | Refusal:
        """Claim a key for its repair. The caller has to call `run_under` or `release` with the claim."""
        pipeline, asked_at = self._pipeline, self._pipeline.clock()
        terms = LeaseTerms(
            pipeline.owner, pipeline.settings.lease_s, level, self._despite_pause, move_token=pipeline.move_token
        )
        self.keys.add(key)
        try:
            results = await pipeline.ledger.claim([ChangeHeader(key, None)], terms)
        except UnavailableError:
            self.keys.discard(key)
            raise
        self._heartbeat.hold(results.granted, asked_at)
        # A key that is refused, because it is paused for example, rests too: others have their turn before it.
        self._retry_at[key] = asked_at + pipeline.settings.horizon_s
        for claim in results.granted:
            return claim
        self.keys.discard(key)
        return results.refused[key]

    async def release(self, claim: Claim) -> None:
        """End a claim whose repair has not begun."""
        self._end(claim)
        await self._pipeline.ledger.release([claim])

    async def run_under(self, claim: Claim, begins: Callable[[], None] = lambda: None) -> str:
        """Repair a claimed key, and end the claim; return why it was not repaired, or an empty text.

        `begins` is called right before user code runs, if any runs.
        """
        try:
            return await self._repair_under(claim, begins)
        finally:
            self._end(claim)

    def _end(self, claim: Claim) -> None:
        self._heartbeat.drop([claim])
        self.keys.discard(claim.key)

    def would_run(self, claim: Claim) -> bool:
        """Whether `run_under` would run user code; otherwise it ends the claim at once."""
        is_due = claim.suspicions > 0 and not claim.took_over
        return is_due and claim.crashes < self._pipeline.settings.crashes_max

    async def _repair_under(self, claim: Claim, begins: Callable[[], None]) -> str:
        if self.would_run(claim):
            return await self._write_refetched(claim, begins)
        if claim.suspicions == 0 or claim.took_over:
            # Another worker has repaired the key, or has died holding it. In the second case its write may still
            # land after ours, so the key has to wait for the whole horizon again.
            await self._pipeline.ledger.release([claim])
            return "a worker died holding this key; its repair waits for the horizon again" if claim.took_over else ""
        # Repairing it again would crash the next worker. The key stays suspect, and `keywise why` shows it.
        cause = f"{claim.crashes} workers died while they repaired this key"
        self._report_failure(claim, cause)
        await self._pipeline.ledger.release([claim])
        return cause

    async def _write_refetched(self, claim: Claim, begins: Callable[[], None]) -> str:
        pipeline = self._pipeline
        entry = await pipeline.admin.inspect(claim.key)
        if not await self._is_quiet(entry or EMPTY):
            await pipeline.ledger.release([claim])
            return "the key became suspect again; its repair waits for the horizon again"
        if pipeline.objects is not None:
            # The object is read again as a change of its own, in parts. Its commit ends the suspicion.
            await pipeline.ledger.release([claim])
            if await self._is_under_way(entry or EMPTY):
                return "a change of this key is under way; its repair waits for that"
            try:
                await pipeline.objects.announce(pipeline, claim.key)
            except AdminError as error:
                self._report_failure(claim, str(error))
                return str(error)
            return ""
        try:
            if not await self._heartbeat.begin(pipeline.ledger, claim):
                return "the claim was lost before the repair began"
            begins()
            async with asyncio.timeout(pipeline.settings.lease_s):
                with self._heartbeat.limit([claim]):
                    current = await self._refetched(claim.key, entry or EMPTY)
                    if isinstance(current, str):
                        await pipeline.ledger.release([claim])
                        return current
                    self._heartbeat.check([claim])  # Reading may have taken long.
                    sink: Sink = pipeline.sink  # type: ignore[assignment]
                    [result] = await sink.apply([current], [claim])
                    if result.outcome is Outcome.SUPERSEDED and current.deleted:
                        # The key is gone, and the sink holds a write of it that was never committed, above the mark.
                        removal: Change[Any] = Change(claim.key, _LOWEST, deleted=True)
                        [result] = await sink.apply([removal], [claim])
        except (Exception, asyncio.CancelledError) as error:
            # A CancelledError may come from user code; only one that cancels this task is passed on.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return await self._give_up(claim, cause_of_error(error), traceback_of(error))
        if self._heartbeat.has_ended(claim):
            return await self._give_up(claim, "the claim ended before the sink had answered")
        if result.outcome is Outcome.BUSY and result.certainty is Certainty.CLEAN:
            await pipeline.ledger.release([claim])
            return result.cause or "the sink is busy"
        if result.outcome not in (Outcome.APPLIED, Outcome.SUPERSEDED):
            self._report_failure(claim, result.cause, result.traceback)
            await pipeline.ledger.fail([Failure(claim, result.certainty)])
            return result.cause
        self._missing.pop(claim.key, None)
        written = current if current.order != _LOWEST else None
        await pipeline.retry_until_reachable("ledger", lambda: pipeline.admin.finish_repair(claim, written))
        self._retry_at.pop(claim.key, None)
        pipeline.emit(events.Repaired(pipeline=pipeline.name, key=claim.key))
        return ""

    async def _give_up(self, claim: Claim, cause: str, traceback: str = "") -> str:
        """End a repair whose outcome is unknown: the key stays suspect.

        If the claim has ended and another worker has repaired the key meanwhile, it becomes suspect again.
        """
        self._report_failure(claim, cause, traceback)
        overdue = self._heartbeat.has_ended(claim)
        await self._pipeline.ledger.fail([Failure(claim, Certainty.UNKNOWN, overdue=overdue)])
        return cause

    async def _is_quiet(self, entry: Entry) -> bool:
        """Whether the last suspicious write is older than the horizon, so that it cannot land after the repair."""
        return entry.suspected_at <= await self._pipeline.admin.now() - self._pipeline.settings.horizon_s

    async def _is_under_way(self, entry: Entry) -> bool:
        """Whether the message of a change that was tried can still arrive.

        An object may take longer than the horizon. If it was announced again meanwhile, it would start again at the
        beginning, and its repair would never end.
        """
        return entry.tried is not None and await self._pipeline.admin.now() < (
            entry.tried_at + self._pipeline.settings.redelivery_s
        )

    async def _refetched(self, key: str, entry: Entry) -> Change[Any] | str:
        """Return the current state as a change; or why it cannot be written, if the sink may have a newer state."""
        mark = entry.mark
        change = await refetched(self._pipeline, key)
        controls = await self._pipeline.control_store.controls()
        if change is None:
            return Change(key, mark or _LOWEST, deleted=True) if self._is_gone(key, entry) else MISSING
        self._missing.pop(key, None)
        change.order = in_era(change, entry, controls).order or change.order
        unknown = entry.unknown if await self._pipeline.admin.now() < entry.unknown_until else None
        seen = [order for order in (mark, unknown) if order is not None]
        forced = [order for order in seen if is_same_version(order, change.order)]
        if entry.deleted and mark in forced and mark > change.order:
            return Change(key, mark, deleted=True)  # An operator removed this version; only a newer one replaces it.
        change.order = max([change.order, *forced])
        return change if all(change.order >= order for order in seen) else OLDER

    def _is_gone(self, key: str, entry: Entry) -> bool:
        """Whether a key that the source of truth does not have is gone.

        From an origin it has to be missing twice, a horizon apart, at the same mark: a change may be announced before
        its row can be read.
        """
        origin, now = self._pipeline.origin, self._pipeline.clock()
        if origin is None or entry.mark is None or entry.deleted:
            return True
        mark, since = self._missing.get(key, (entry.mark, now))
        if mark != entry.mark:
            since = now
        self._missing[key] = (entry.mark, since)
        return origin.is_consistent and now >= since + self._pipeline.settings.horizon_s

    def _report_failure(self, claim: Claim, cause: str, traceback: str = "") -> None:
        name, retry_s = self._pipeline.name, self._pipeline.settings.repair_s
        self._pipeline.emit(
            events.Failed(pipeline=name, key=claim.key, cause=cause, attempts=1, retry_s=retry_s, traceback=traceback)
        )
