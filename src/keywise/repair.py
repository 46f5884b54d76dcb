"""Puts suspect keys right: takes each by a claim of its own, reads the truth again and writes it."""

import asyncio
import inspect
from typing import Any

from keywise import events
from keywise.causes import cause_of_error
from keywise.change import VERSION_MIN, Change, Order, Outcome, Want
from keywise.errors import KeywiseError, UnavailableError
from keywise.heartbeat import Heartbeat
from keywise.models import encoded
from keywise.pipeline import Pipeline
from keywise.protocols import Failure, Sink
from keywise.rules import EMPTY, Certainty, Claim, Entry, Terms, in_era

KEYS_A_ROUND = 10
"""Changes go on between rounds."""

_LOWEST: Order = (0, VERSION_MIN, 0)
"""Of a key that has neither a mark nor a place in the source of truth."""


class Repair:
    """Looks for suspect keys now and then. It runs user code, so nothing else may run beside it."""

    def __init__(self, pipeline: Pipeline, heartbeat: Heartbeat) -> None:
        self._pipeline = pipeline
        self._heartbeat = heartbeat
        self.due = self._next_due()
        self._fruitless: dict[str, float] = {}
        """Keys that could not be repaired, with when to look again: they must not stand in the way of others."""

    async def suspects(self) -> list[str]:
        """Keys that can be repaired now; the next look is due later."""
        self.due = self._next_due()
        try:
            now = self._pipeline.clock()
            self._fruitless = {key: until for key, until in self._fruitless.items() if until > now}
            limit = KEYS_A_ROUND + len(self._fruitless)
            found = await self._pipeline.operator.suspects(limit, self._pipeline.settings.horizon_s)
            return [key for key in found if key not in self._fruitless][:KEYS_A_ROUND]
        except UnavailableError as error:
            await self._pipeline.pause("ledger", error, 1)
            return []

    async def run(self, keys: list[str]) -> None:
        """Repair one after another."""
        try:
            for key in keys:
                await self._repair(key)
        except UnavailableError as error:
            await self._pipeline.pause("ledger", error, 1)

    def _next_due(self) -> float:
        if self._pipeline.refetch is None:
            return float("inf")
        return self._pipeline.clock() + self._pipeline.settings.repair_s * (0.5 + self._pipeline.rng.random())

    async def _repair(self, key: str) -> None:
        pipeline = self._pipeline
        asked_at = pipeline.clock()
        terms = Terms(pipeline.owner, pipeline.settings.lease_s, alone=True)
        answers = await pipeline.ledger.claim([Want(key, None)], terms)
        self._heartbeat.hold(answers.granted, asked_at)
        for claim in answers.granted:
            self._fruitless[key] = asked_at + pipeline.settings.horizon_s
            try:
                await self._repair_under(claim)
            finally:
                self._heartbeat.drop([claim])

    async def _repair_under(self, claim: Claim) -> None:
        if claim.suspect == 0 or claim.took_over:
            # Somebody else was faster, or died at it: then its write may still land, and the horizon begins anew.
            await self._pipeline.ledger.release([claim])
        elif claim.crashes >= self._pipeline.settings.crashes_max:
            # It stays suspect, and is shown as such.
            self._tell_failure(claim, f"{claim.crashes} workers died while they repaired this key")
            await self._pipeline.ledger.release([claim])
        else:
            await self._write_truth(claim)

    async def _write_truth(self, claim: Claim) -> None:
        pipeline = self._pipeline
        entry = await pipeline.operator.inspect(claim.key)
        try:
            if not await self._heartbeat.begin(pipeline.ledger, claim):
                return
            async with asyncio.timeout(pipeline.settings.lease_s), self._heartbeat.limit([claim]):
                truth = await self._truth(claim.key, entry or EMPTY)
                if truth is None:
                    await pipeline.ledger.release([claim])
                    return
                self._heartbeat.check([claim])  # Reading may have taken long.
                sink: Sink = pipeline.sink  # type: ignore[assignment]
                [result] = await sink.apply([truth], [claim])
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # The write may have landed or not; the key stays suspect and is looked at again after the lease.
            self._tell_failure(claim, cause_of_error(error))
            await pipeline.ledger.fail([Failure(claim, Certainty.UNKNOWN, 0.0)])
            return
        if result.outcome is Outcome.BUSY:
            await pipeline.ledger.release([claim])
            return
        if result.outcome not in (Outcome.APPLIED, Outcome.SUPERSEDED):
            self._tell_failure(claim, result.cause)
            await pipeline.ledger.fail([Failure(claim, result.certainty, 0.0)])
            return
        written = truth if truth.order != _LOWEST else None
        await pipeline.insist("ledger", lambda: pipeline.operator.mend(claim, written))
        self._fruitless.pop(claim.key, None)
        pipeline.emit(events.Repaired(pipeline=pipeline.name, key=claim.key))

    async def _truth(self, key: str, entry: Entry) -> Change[Any] | None:
        """The current state as a change; None if what was read is older than what is committed or perhaps written."""
        mark = entry.mark
        assert self._pipeline.refetch is not None
        body = self._pipeline.refetch(key)
        if inspect.isawaitable(body):
            body = await body
        standing = await self._pipeline.governor.standing()
        if body is None:
            return Change(key, mark or _LOWEST, deleted=True)
        raw = encoded(body)
        change = self._pipeline.envelope.read_one(raw)
        if change.key != key:
            raise KeywiseError(
                f"refetch({key!r}) returned the body of {change.key!r}; return the body of the key asked for"
            )
        change.order = in_era(change, entry, standing).order or change.order
        unknown = entry.unknown if await self._pipeline.operator.now() < entry.unknown_until else None
        seen = [order for order in (mark, unknown) if order is not None]
        return change if all(change.order >= order for order in seen) else None

    def _tell_failure(self, claim: Claim, cause: str) -> None:
        pipeline, retry_s = self._pipeline, self._pipeline.settings.repair_s
        pipeline.emit(events.Failed(pipeline=pipeline.name, key=claim.key, cause=cause, attempts=1, retry_s=retry_s))
