"""Writes changes to one target under claims, beside the flow: tombstones of the live target, and rows of the origin."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from keywise.core.change import Change, ChangeHeader, Outcome
from keywise.core.entry import Certainty, Claim, Commit, LeaseTerms, Level, RefusalReason
from keywise.core.errors import UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.sink import AtomicSink, Sink, is_atomic
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.transactional import write_all

LASTING_REFUSALS = (RefusalReason.MIXED, RefusalReason.FORGOTTEN, RefusalReason.PAUSED)
"""Refusals that count as failures: the next pass meets them again.

After any other, the target has the version already, or the holder of the key is about to write one.
"""


class TargetWriter:
    """Writes changes of different keys to one target. Each is tried once: the next pass finds what is still missing."""

    def __init__(self, pipeline: OpenPipeline, heartbeat: Heartbeat) -> None:
        self._pipeline = pipeline
        self._heartbeat = heartbeat

    async def write(self, changes: Sequence[Change[Any]], *, despite_pause: bool = False) -> dict[str, str]:
        """Write changes; return the keys that were not written, with the cause."""
        causes: dict[str, str] = {}
        size = self._pipeline.sink.batch_max
        for start in range(0, len(changes), size):
            some = {change.key: change for change in changes[start : start + size]}
            granted, refused = await self._claim([*some.values()], despite_pause=despite_pause)
            causes |= refused
            if granted:
                try:
                    causes |= await self._write([some[claim.key] for claim in granted], granted)
                finally:
                    self._heartbeat.drop(granted)
        return causes

    async def end_expired(self, keys: Sequence[str]) -> None:
        """Take over and release expired claims on these keys, so that a holder that wakes up later cannot commit."""
        headers = [ChangeHeader(key, None) for key in keys]
        granted, _ = await self._claim(headers, despite_pause=True)
        self._heartbeat.drop(granted)
        await self._pipeline.ledger.release(granted)

    async def _claim(
        self, headers: Sequence[ChangeHeader], *, despite_pause: bool
    ) -> tuple[list[Claim], dict[str, str]]:
        pipeline, asked_at = self._pipeline, self._pipeline.clock()
        lease_s, move_token = pipeline.settings.lease_s, pipeline.move_token
        terms = LeaseTerms(pipeline.owner, lease_s, Level.ALONE, despite_pause=despite_pause, move_token=move_token)
        results = await pipeline.ledger.claim(headers, terms)
        self._heartbeat.hold(results.granted, asked_at)
        failed = {key: one.reason for key, one in results.refused.items() if one.reason in LASTING_REFUSALS}
        return results.granted, {key: f"its claim was refused: {reason.value}" for key, reason in failed.items()}

    async def _write(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> dict[str, str]:
        sink = self._pipeline.sink
        try:
            with self._heartbeat.limit(claims):
                if is_atomic(sink):
                    return await self._transact(sink, changes, claims)
                return await self._apply(sink, changes, claims)
        except TimeoutError as error:
            return await self._fail(claims, Certainty.UNKNOWN, str(error))

    async def _transact(
        self, sink: AtomicSink, changes: Sequence[Change[Any]], claims: Sequence[Claim]
    ) -> dict[str, str]:
        """Write the effects and the marks in one transaction. If a claim is lost, all of them are rolled back."""
        ledger = self._pipeline.ledger
        try:
            async with ledger.transaction() as transaction:
                errors = await write_all(transaction, sink, changes)
                written = [claim for number, claim in enumerate(claims) if number not in errors]
                if await transaction.commit([Commit(claim) for claim in written]):
                    raise _LostError
        except _LostError:
            return await self._fail(claims, Certainty.CLEAN, "another worker has taken its key")
        except UnavailableError:
            with suppress(UnavailableError):
                await ledger.release(claims)  # If the transaction has committed, its claims have ended already.
            raise
        causes = {claims[number].key: cause_of_error(error) for number, error in errors.items()}
        await ledger.release([claims[number] for number in errors])
        return causes

    async def _apply(self, sink: Sink, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> dict[str, str]:
        ledger, causes = self._pipeline.ledger, dict[str, str]()
        commits, failures = list[Commit](), list[Failure]()
        for claim, result in zip(claims, await sink.apply(changes, claims), strict=True):
            match result.outcome:
                case Outcome.APPLIED | Outcome.SUPERSEDED:
                    commits.append(Commit(claim))
                case _:
                    causes[claim.key] = result.cause
                    failures.append(Failure(claim, result.certainty, counts_attempt=False))
        lost = await ledger.commit(commits) if commits else []
        if failures:
            await ledger.fail(failures)
        return causes | {claim.key: "another worker has taken its key" for claim in lost}

    async def _fail(self, claims: Sequence[Claim], certainty: Certainty, cause: str) -> dict[str, str]:
        failures = [Failure(claim, certainty, overdue=True, counts_attempt=False) for claim in claims]
        await self._pipeline.ledger.fail(failures)
        return {claim.key: cause for claim in claims}


class _LostError(Exception):
    """A claim is lost, and the transaction is rolled back."""
