"""Puts suspect keys right: takes each by a claim of its own, reads the truth again and writes it."""

import asyncio
from typing import Any

from keywise.core import events
from keywise.core.change import VERSION_MIN, Change, ChangeHeader, Order, Outcome
from keywise.core.entry import EMPTY, Certainty, Claim, Entry, LeaseTerms
from keywise.core.errors import UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.rules import in_era
from keywise.core.sink import Sink
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import Pipeline
from keywise.flow.refetch import is_same_version, refetched

KEYS_A_ROUND = 10
"""Changes go on between rounds."""

_LOWEST: Order = (0, VERSION_MIN, 0)
"""Of a key that has neither a mark nor a place in the source of truth."""


class Repairer:
    """Looks for suspect keys now and then. It runs user code, so nothing else may run beside it."""

    def __init__(self, pipeline: Pipeline, heartbeat: Heartbeat, *, despite_pause: bool = False) -> None:
        self._pipeline = pipeline
        self._heartbeat = heartbeat
        self._despite_pause = despite_pause
        self.due = self._next_due()
        self._retry_at: dict[str, float] = {}
        """Keys that could not be repaired, with when to look again: they must not stand in the way of others."""

    async def suspects(self) -> list[str]:
        """Keys that can be repaired now; the next look is due later."""
        self.due = self._next_due()
        try:
            now = self._pipeline.clock()
            self._retry_at = {key: until for key, until in self._retry_at.items() if until > now}
            limit = KEYS_A_ROUND + len(self._retry_at)
            found = await self._pipeline.admin.suspects(limit, self._pipeline.settings.horizon_s)
            return [key for key in found if key not in self._retry_at][:KEYS_A_ROUND]
        except UnavailableError as error:
            await self._pipeline.back_off("ledger", error, 1)
            return []

    async def run(self, keys: list[str]) -> dict[str, str]:
        """Repair one after another; return why some could not be."""
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
        if self._pipeline.refetch is None:
            return float("inf")
        return self._pipeline.clock() + self._pipeline.settings.repair_s * (0.5 + self._pipeline.rng.random())

    async def _repair(self, key: str) -> str:
        """Why it could not be repaired; empty if it was."""
        pipeline = self._pipeline
        asked_at = pipeline.clock()
        terms = LeaseTerms(pipeline.owner, pipeline.settings.lease_s, isolated=True, despite_pause=self._despite_pause)
        results = await pipeline.ledger.claim([ChangeHeader(key, None)], terms)
        self._heartbeat.hold(results.granted, asked_at)
        for claim in results.granted:
            self._retry_at[key] = asked_at + pipeline.settings.horizon_s
            try:
                return await self._repair_under(claim)
            finally:
                self._heartbeat.drop([claim])
        return f"the key is {results.refused[key].reason.value}"

    async def _repair_under(self, claim: Claim) -> str:
        if claim.suspicions == 0 or claim.took_over:
            # Somebody else was faster, or died at it: then its write may still land, and the horizon begins anew.
            await self._pipeline.ledger.release([claim])
            return "a worker died at this key, so the horizon begins anew" if claim.took_over else ""
        if claim.crashes >= self._pipeline.settings.crashes_max:
            # It stays suspect, and is shown as such.
            cause = f"{claim.crashes} workers died while they repaired this key"
            self._report_failure(claim, cause)
            await self._pipeline.ledger.release([claim])
            return cause
        return await self._write_refetched(claim)

    async def _write_refetched(self, claim: Claim) -> str:
        pipeline = self._pipeline
        entry = await pipeline.admin.inspect(claim.key)
        if not await self._is_quiet(entry or EMPTY):
            await pipeline.ledger.release([claim])
            return "it became suspect again, so the horizon begins anew"
        try:
            if not await self._heartbeat.begin(pipeline.ledger, claim):
                return "the claim was lost before the repair began"
            async with asyncio.timeout(pipeline.settings.lease_s), self._heartbeat.limit([claim]):
                truth = await self._refetched(claim.key, entry or EMPTY)
                if truth is None:
                    await pipeline.ledger.release([claim])
                    return "what refetch returns is older than what was applied, or perhaps written"
                self._heartbeat.check([claim])  # Reading may have taken long.
                sink: Sink = pipeline.sink  # type: ignore[assignment]
                [result] = await sink.apply([truth], [claim])
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return await self._give_up(claim, cause_of_error(error))
        if self._heartbeat.left_s([claim]) <= 0:
            return await self._give_up(claim, "the claim ended before the sink had answered")
        if result.outcome is Outcome.BUSY and result.certainty is Certainty.CLEAN:
            await pipeline.ledger.release([claim])
            return result.cause or "the sink is busy"
        if result.outcome not in (Outcome.APPLIED, Outcome.SUPERSEDED):
            self._report_failure(claim, result.cause)
            await pipeline.ledger.fail([Failure(claim, result.certainty, 0.0)])
            return result.cause
        written = truth if truth.order != _LOWEST else None
        await pipeline.retry_until_reachable("ledger", lambda: pipeline.admin.finish_repair(claim, written))
        self._retry_at.pop(claim.key, None)
        pipeline.emit(events.Repaired(pipeline=pipeline.name, key=claim.key))
        return ""

    async def _give_up(self, claim: Claim, cause: str) -> str:
        """The write may have landed or not: the key stays suspect, or is so again if somebody else has repaired it."""
        self._report_failure(claim, cause)
        claim.overdue = self._heartbeat.left_s([claim]) <= 0
        await self._pipeline.ledger.fail([Failure(claim, Certainty.UNKNOWN, 0.0)])
        return cause

    async def _is_quiet(self, entry: Entry) -> bool:
        """Whether nothing that was written since the suspects were looked for may still land after the truth."""
        return entry.suspected_at <= await self._pipeline.admin.now() - self._pipeline.settings.horizon_s

    async def _refetched(self, key: str, entry: Entry) -> Change[Any] | None:
        """The current state as a change; None if what was read is older than what is committed or perhaps written."""
        mark = entry.mark
        change = await refetched(self._pipeline, key)
        controls = await self._pipeline.control_store.controls()
        if change is None:
            return Change(key, mark or _LOWEST, deleted=True)
        change.order = in_era(change, entry, controls).order or change.order
        unknown = entry.unknown if await self._pipeline.admin.now() < entry.unknown_until else None
        seen = [order for order in (mark, unknown) if order is not None]
        forced = [order for order in seen if is_same_version(order, change.order)]
        if entry.deleted and mark in forced and mark > change.order:
            return Change(key, mark, deleted=True)  # An operator has removed it; only a newer version brings it back.
        change.order = max([change.order, *forced])
        return change if all(change.order >= order for order in seen) else None

    def _report_failure(self, claim: Claim, cause: str) -> None:
        pipeline, retry_s = self._pipeline, self._pipeline.settings.repair_s
        pipeline.emit(events.Failed(pipeline=pipeline.name, key=claim.key, cause=cause, attempts=1, retry_s=retry_s))
