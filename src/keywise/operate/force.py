"""Forced writes: an operator writes the current state of one key, or deletes the key, under a claim.

The order of such a write is above the mark and below the next version from upstream. So the mark never falls, and
the next real change wins.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from keywise.core.change import (
    UNVERSIONED_GENERATION,
    VERSION_MIN,
    Change,
    Order,
    Outcome,
    above,
    is_same_version,
    is_unversioned,
)
from keywise.core.controls import Controls
from keywise.core.entry import EMPTY, Certainty, Claim, Commit, Entry, Refusal, RefusalReason
from keywise.core.errors import AdminError, KeywiseError, MalformedError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.rules import era_of, in_era
from keywise.core.sink import AtomicSink, Sink, SinkResult, is_atomic
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.refetch import needs_refetch, refetched
from keywise.flow.transactional import write_all
from keywise.operate.waiting import AdminClaimer

OVERTAKEN_S = 0.05
"""How long to wait before planning again, after the key changed between plan and claim."""
KEYS_LOOKED_AT = 20
"""How many keys are inspected to find out whether the pipeline has versions."""


class ForceWriter:
    """Writes single keys through the sink of a pipeline, each under a claim."""

    def __init__(self, pipeline: OpenPipeline, claimer: AdminClaimer) -> None:
        self._pipeline = pipeline
        self._claimer = claimer

    async def rewrite(self, key: str, *, older: bool = False) -> Change[Any]:
        """Read the key from the source of truth and write it; return what was written.

        A state that is older than the mark is refused unless `older` is set.
        """
        if self._pipeline.objects is not None:
            return await self._announce(key, removed=False)
        needs_refetch(self._pipeline)
        return await self._write(lambda: self._refetched(key, older))

    async def delete(self, key: str) -> Change[Any]:
        """Delete a key from the sink, even if it exists in the source of truth; return what was written."""
        if self._pipeline.objects is not None:
            return await self._announce(key, removed=True)
        return await self._write(lambda: self._deletion(key))

    async def _announce(self, key: str, *, removed: bool) -> Change[Any]:
        """Let a worker read an object again, or delete its records; return the change that it will process."""
        assert self._pipeline.objects is not None, "only objects are announced"
        return self._pipeline.reader.read_one(
            await self._pipeline.objects.announce(self._pipeline, key, removed=removed)
        )

    async def _refetched(self, key: str, older: bool) -> Change[Any]:
        entry, controls = await self._look(key)
        change = await self._read(key)
        if change is None:
            return await self._deletion(key)
        change.order = in_era(change, entry, controls).order or change.order
        mark = entry.mark
        if mark is None or change.order > mark:
            return change
        if not is_same_version(change.order, mark) and not older:
            raise AdminError(
                f"refetch({key!r}) returned {_version(change.order)}, which is older than the mark at "
                f"{_version(mark)}; nothing was written; use --older to write it all the same"
            )
        change.order = above(mark)
        return change

    async def _read(self, key: str) -> Change[Any] | None:
        try:
            return await refetched(self._pipeline, key)
        except MalformedError as error:
            raise AdminError(f"what refetch({key!r}) returned cannot be read: {error}; nothing was written") from error
        except KeywiseError:
            raise
        except Exception as error:
            raise AdminError(f"refetch({key!r}) failed: {cause_of_error(error)}; nothing was written") from error

    async def _deletion(self, key: str) -> Change[Any]:
        entry, controls = await self._look(key)
        era, now = era_of(entry, controls), await self._pipeline.admin.now()
        seen = [order for order in (entry.mark, unsettled(entry, now)) if order is not None and order[0] == era]
        order = above(max(seen)) if seen else await self._lowest(era)
        return Change(key, order, deleted=True)

    async def _look(self, key: str) -> tuple[Entry, Controls]:
        pipeline = self._pipeline
        return await pipeline.admin.inspect(key) or EMPTY, await pipeline.control_store.controls()

    async def _lowest(self, era: int) -> Order:
        """Return an order below all that upstream can send.

        The marks of other keys show whether the pipeline has versions.
        """
        for key in await self._pipeline.control_store.keys("", KEYS_LOOKED_AT):
            entry = await self._pipeline.admin.inspect(key)
            if entry is not None and entry.mark is not None:
                return (era, VERSION_MIN, UNVERSIONED_GENERATION if is_unversioned(entry.mark) else 0)
        return (era, VERSION_MIN, 0)

    async def _write(self, plan: Callable[[], Awaitable[Change[Any]]]) -> Change[Any]:
        """Plan the change, claim the key and write; if the key has changed between plan and claim, plan again."""
        self._claimer.wait_budget.renew()
        while True:
            change = await plan()
            async with self._claimer.taken(change) as claim:
                if not isinstance(claim, Refusal) and claim.order == change.order:
                    await self._write_under(claim, change)
                    return change
                if not isinstance(claim, Refusal):
                    await self._pipeline.ledger.release([claim])
                elif claim.reason is RefusalReason.DEFERRED:
                    # `taken` has waited already. A removal is now planned above the write that is not settled.
                    continue
                elif claim.reason is RefusalReason.MIXED:
                    raise AdminError(
                        f"some changes of {change.key!r} have a version and some have none, so they have no common "
                        f"order; nothing was written; after keywise reset, the next change wins"
                    )
            await self._claimer.wait_budget.wait(f"{change.key!r} changes all the time", OVERTAKEN_S)

    async def _write_under(self, claim: Claim, change: Change[Any]) -> None:
        pipeline = self._pipeline
        if claim.crashes >= pipeline.settings.crashes_max:
            await pipeline.ledger.release([claim])
            raise AdminError(f"{claim.crashes} processes died while they wrote {change.key!r}; nothing was written")
        if not await self._claimer.heartbeat.begin(pipeline.ledger, claim):
            raise AdminError(f"the claim on {change.key!r} was lost before the write began; nothing was written")
        sink = pipeline.sink
        if is_atomic(sink):
            await self._transact(sink, claim, change)
        else:
            result = await self._apply(sink, claim, change)
            await self._end(claim, result, overdue=self._claimer.heartbeat.has_ended(claim))

    async def _transact(self, sink: AtomicSink, claim: Claim, change: Change[Any]) -> None:
        """Write the effect and the mark in one transaction; an error rolls both back."""
        ledger = self._pipeline.ledger
        try:
            with self._claimer.heartbeat.limit([claim]):
                async with ledger.transaction() as transaction:
                    for error in (await write_all(transaction, sink, [change])).values():
                        raise error
                    if await transaction.commit([Commit(claim)]):
                        raise AdminError("another worker has taken the key")
        except Exception as error:
            # Safe even if only the answer to the commit was lost: the commit has ended the claim.
            with suppress(UnavailableError):
                await ledger.release([claim])
            if isinstance(error, UnavailableError):
                raise  # The transaction may have committed. Repeating the command does no harm: it finds the new mark.
            raise AdminError(f"{change.key!r}: {_describe_error(error)}; nothing was written") from error

    async def _apply(self, sink: Sink, claim: Claim, change: Change[Any]) -> SinkResult:
        try:
            with self._claimer.heartbeat.limit([claim]):
                [result] = await sink.apply([change], [claim])
        except Exception as error:
            return SinkResult(Outcome.FAILED, _describe_error(error), certainty=Certainty.UNKNOWN)
        return result

    async def _end(self, claim: Claim, result: SinkResult, *, overdue: bool) -> None:
        pipeline, key = self._pipeline, claim.key
        if result.outcome is Outcome.APPLIED:
            commit = Commit(claim, overdue)
            if await pipeline.retry_until_reachable("ledger", lambda: pipeline.ledger.commit([commit])):
                raise AdminError(
                    f"{key!r} was written, but another worker had taken the key by then; {self._consequence()} "
                    f"(see keywise why)"
                )
            return
        cause = result.cause or result.outcome.value
        if result.certainty is not Certainty.CLEAN:
            failure = Failure(claim, result.certainty, overdue=overdue)
            await pipeline.retry_until_reachable("ledger", lambda: pipeline.ledger.fail([failure]))
            if result.certainty is Certainty.UNKNOWN:
                raise AdminError(
                    f"{key!r}: {cause}; it may or may not have been written, so the claim stays until its lease of "
                    f"{pipeline.settings.lease_s:g} s expires, and {self._consequence()}"
                )
            raise AdminError(f"{key!r}: {cause}; it may have been written in part; {self._consequence()}")
        await pipeline.retry_until_reachable("ledger", lambda: pipeline.ledger.release([claim]))
        if result.outcome is Outcome.SUPERSEDED:
            cause = "the sink holds something newer"
        raise AdminError(f"{key!r}: {cause}; nothing was written")

    def _consequence(self) -> str:
        """Describe what a write of unknown outcome means for the key."""
        if self._pipeline.has_suspects:
            return "the key then counts as suspect, unless a newer change settles it: keywise repair repairs it"
        return "the sink itself refuses versions that are older than the one it holds"


def unsettled(entry: Entry, now: float) -> Order | None:
    """Return the order of a write that may be in the sink without a commit and that no worker is processing any more.

    A removal has to be newer than that write too; otherwise the write would count as newer.
    """
    if entry.token and (entry.abandoned or now >= entry.lease_until) and entry.intent is not None:
        return max(entry.intent, entry.unknown or entry.intent)
    return entry.unknown


def _version(order: Order) -> str:
    return "a state without a version" if is_unversioned(order) else f"version {order[1]}"


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the claim ended before the sink answered"
    return str(error) if isinstance(error, AdminError) else cause_of_error(error)
