"""The ledger in a Redis server: the rules, applied to states that are read in one step and swapped in another.

Redis holds only the ledger. Effects are never part of a step of it, so there is no transaction to write them in.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self, TypeVar

from keywise.adapters.redis.database import OPTIONS, RedisDatabase, database_at, in_pairs
from keywise.adapters.redis.ledger.controls import RedisControlStore
from keywise.adapters.redis.ledger.dump import LETTER, RedisLedgerTransfer
from keywise.adapters.redis.ledger.entry_encoding import IDLE, entry_of, state_of
from keywise.adapters.redis.ledger.history import RedisHistoryStore
from keywise.adapters.redis.ledger.listing import active_entries
from keywise.adapters.redis.ledger.scope import BUCKETS_MAX, RedisScope
from keywise.adapters.redis.ledger.scripts import COUNT, DROP, WALK
from keywise.adapters.redis.ledger.working_set import RedisWorkingSet, Snapshot, controls_of, stretches, text_of
from keywise.core import rules
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim, CommitResult, Entry, LeaseTerms, LedgerPolicy, Refusal
from keywise.core.errors import AddressError, SettingsError
from keywise.core.key_encoding import decoded
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.transaction import Transaction
from keywise.core.url import Address

T = TypeVar("T")

PRUNE_AT_ONCE = 4_096
"""Nobody has to wait for longer than such a stretch takes."""
LETTERS_AT_ONCE = 100
DELETE_AT_ONCE = 4_096
KNOWN_MAX = 50_000
"""Of so many claims the worker remembers what it wrote, which saves a step when they end."""


class RedisLedger:
    """The ledger of one pipeline in a Redis server. It is also its own operator."""

    database = None
    """No sink or source can share it."""

    def __init__(self, server: RedisDatabase, scope: str, policy: LedgerPolicy, buckets: int | None = None) -> None:
        self._server = server
        self._policy = policy
        self._scope = RedisScope(server, scope, buckets)
        self._working_set = RedisWorkingSet(self._scope, policy)
        self._known: OrderedDict[int, Entry] = OrderedDict()
        """By token, what this worker wrote when it was granted the claim."""
        self.admin = self
        self.control_store = RedisControlStore(self._scope, self._working_set)
        self.history_store = RedisHistoryStore(self._scope)
        self.transfer = RedisLedgerTransfer(self._scope, policy, self.control_store, self.history_store)
        self._scope.on_loss = self._lost

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        try:
            await self._scope.open()
        except BaseException:
            await self._server.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        by_key = {header.key: header for header in sorted(headers, key=lambda header: header.key)}
        answers: dict[str, Claim | Refusal] = {}
        after: dict[str, Entry] = {}

        def act(snapshot: Snapshot, key: str) -> Entry | None:
            header, entry = by_key[key], snapshot.entries[key]
            refusal = rules.decide_under(snapshot.controls, entry, header, snapshot.now, self._policy, terms)
            if refusal is not None:
                answers[key] = refusal
                return entry
            lifted = rules.in_era(header, entry, snapshot.controls)
            after[key], answers[key] = rules.grant(
                entry, lifted, snapshot.tokens[key], snapshot.now, terms, self._policy
            )
            return after[key]

        snapshot = await self._working_set.read(by_key, tokens=True)
        await self._working_set.work(snapshot, act, frees=False, under_controls=True)
        results = ClaimResults()
        for key in by_key:
            answer = answers[key]
            if isinstance(answer, Refusal):
                results.refused[key] = answer
            else:
                results.granted.append(answer)
                self._know(answer.token, after[key])
        return results

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            renewed = rules.renew(entry, claim, snapshot.now, lease_s)
            return (renewed, False) if renewed is not None else (entry, True)

        return await self._end(claims, one)

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        """If the answer is lost, it is repeated: what arrived is told by the mark."""

        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            after, result = rules.commit(entry, claim, snapshot.now, self._policy)
            return after, result is CommitResult.REFUSED

        # A mark alone gets its time where it is written; whatever else needs the clock is read first.
        quick = self._known_snapshot(claims, lambda entry, claim: rules.commit(entry, claim, 0.0, self._policy)[0])
        return await self._end(claims, one, quick)

    async def fail(self, failures: Sequence[Failure]) -> None:
        by_claim = {id(failure.claim): failure for failure in failures}

        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            sure, retry_s = by_claim[id(claim)].certainty, by_claim[id(claim)].retry_s
            return rules.fail(entry, claim, sure, retry_s, snapshot.now, self._policy), False

        await self._end([failure.claim for failure in failures], one)

    async def release(self, claims: Sequence[Claim]) -> None:
        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            return rules.release(entry, claim), False

        await self._end(claims, one, self._known_snapshot(claims))

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        parts = stretches(requests, lambda request: request.letter)
        return [claim for some in parts for claim in await self._dead_letter(some)]

    async def _dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        by_claim = {id(request.claim): request for request in requests if request.claim is not None}

        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            if entry is None or entry.token != claim.token:
                return entry, True
            request = by_claim[id(claim)]
            snapshot.letters.setdefault(claim.key, []).append(request.letter)
            return rules.dead_letter(entry, claim, request.certainty, snapshot.now, self._policy), False

        lost = await self._end([request.claim for request in requests if request.claim is not None], one, frees=False)
        unread = [request.letter for request in requests if request.claim is None]
        if unread:
            await self._working_set.keep(unread)
        return lost

    async def prune(self, retention_s: float) -> int:
        total, bucket, cursor = 0, 0, b"0"
        oldest = math.ceil(await self._server.now() - retention_s - self._policy.redelivery_s)
        while bucket < self._scope.buckets_all:
            where = (bucket, cursor, self._scope.buckets_all, PRUNE_AT_ONCE, oldest)
            bucket, cursor, found = await self._scope.call(WALK, *where)
            total += await self._prune(zip(found[::2], found[1::2], strict=True), retention_s)
        going_on = [(code, state_of(entry)) async for code, entry in active_entries(self._scope)]
        for start in range(0, len(going_on), PRUNE_AT_ONCE):
            total += await self._prune(going_on[start : start + PRUNE_AT_ONCE], retention_s)
        return total

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        raise SettingsError(
            f"{self._server.name} holds only the ledger, so nothing can be written in a transaction of it; use a "
            "handler without a transaction, or a ledger in the database of the sink"
        )

    async def inspect(self, key: str) -> Entry | None:
        return (await self._working_set.read([key])).entries[key]

    async def counts(self) -> LedgerCounts:
        return LedgerCounts(*await self._scope.call(COUNT))

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = await self._server.now() - quiet_s
        which = (self._scope.key("suspect"), "-inf", repr(since), "LIMIT", 0, limit)
        return [decoded(code) for code in await self._server.run("ZRANGEBYSCORE", *which)]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        def one(entry: Entry | None, claim: Claim, snapshot: Snapshot) -> tuple[Entry | None, bool]:
            return rules.finish_repair(entry, claim, written, snapshot.now), False

        await self._end([claim], one)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        by_key = {header.key: header for header in headers}

        def act(snapshot: Snapshot, key: str) -> Entry | None:
            lifted = rules.in_era(by_key[key], snapshot.entries[key], snapshot.controls)
            return rules.mark_suspect(snapshot.entries[key], lifted, snapshot.now, self._policy)

        if by_key:
            await self._working_set.work(await self._working_set.read(by_key), act, under_controls=True)
        if resync_due is not None:
            await self.control_store.note_resync(resync_due)

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        found: list[tuple[int, float, DeadLetter]] = []
        start = 0
        until = f"({matching.until!r}" if math.isfinite(matching.until) else "+inf"
        since = repr(matching.since) if math.isfinite(matching.since) else "-inf"
        while len(found) < limit:
            stretch = (self._scope.key("buried"), until, since, "WITHSCORES", "LIMIT", start, LETTERS_AT_ONCE)
            listed = await self._server.run("ZREVRANGEBYSCORE", *stretch)
            numbers = [(int(member), float(at)) for member, at in in_pairs(listed)]
            if not numbers:
                break
            packed = await self._server.run("HMGET", self._scope.key("letters"), *(number for number, _ in numbers))
            letters = [(*one, LETTER(text)) for one, text in zip(numbers, packed, strict=True) if text is not None]
            found += (one for one in letters if matching.cause in one[2].cause)
            start += len(numbers)
        return found[:limit]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        total = 0
        for start in range(0, len(numbers), DELETE_AT_ONCE):
            [gone] = await self._scope.call(DROP, *numbers[start : start + DELETE_AT_ONCE])
            total += int(gone)
        return total

    async def now(self) -> float:
        return await self._server.now()

    @property
    def losses(self) -> int:
        """How often this opening has found that the server has lost something."""
        return self._scope.losses

    def _lost(self, controls: bytes, now: float) -> bytes:
        """Nobody knows which marks are gone, so everything has to be sent again."""
        self._known.clear()
        return text_of(controls_of(controls).with_resync(True, now))

    async def _end(
        self,
        claims: Sequence[Claim],
        one: Callable[[Entry | None, Claim, Snapshot], tuple[Entry | None, bool]],
        quick: Snapshot | None = None,
        *,
        frees: bool = True,
    ) -> list[Claim]:
        """Do something under claims, in one step per key; return those it was refused for."""
        if not claims:
            return []
        by_key: dict[str, list[Claim]] = {}
        for claim in claims:
            by_key.setdefault(claim.key, []).append(claim)
        refused: dict[int, bool] = {}

        def act(snapshot: Snapshot, key: str) -> Entry | None:
            entry = snapshot.entries[key]
            for claim in by_key[key]:
                entry, refused[id(claim)] = one(entry, claim, snapshot)
            return entry

        await self._working_set.work(quick or await self._working_set.read(by_key), act, frees=frees)
        return [claim for claim in claims if refused[id(claim)]]

    def _know(self, token: int, entry: Entry) -> None:
        self._known[token] = entry
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _known_snapshot(
        self, claims: Sequence[Claim], ends: Callable[[Entry, Claim], Entry | None] | None = None
    ) -> Snapshot | None:
        """The entries of claims as this worker wrote them; None if it must look.

        With `ends`, all of them have to end as marks alone, whose time is known where they are written.
        """
        snapshot = Snapshot(is_timed_there=ends is not None)
        for claim in claims:
            entry = self._known.pop(claim.token, None)
            if entry is None or claim.key in snapshot.entries:
                return None
            if ends is not None and state_of(ends(entry, claim))[:1] != IDLE:
                return None
            snapshot.entries[claim.key], snapshot.states[claim.key] = entry, state_of(entry)
        return snapshot

    async def _prune(self, found: Iterable[tuple[bytes, bytes]], retention_s: float) -> int:
        """Forget those of some keys that may be; return how many."""
        now = await self._server.now()
        snapshot = Snapshot(now=now, read_at=now)
        for code, state in found:
            key = decoded(code)
            snapshot.states[key], snapshot.entries[key] = state, entry_of(state)
        gone: set[str] = set()

        def act(snapshot: Snapshot, key: str) -> Entry | None:
            gone.discard(key)
            entry = snapshot.entries[key]
            if entry is None or not rules.is_prunable(entry, snapshot.now, retention_s, self._policy):
                return entry
            gone.add(key)
            return None

        await self._working_set.work(snapshot, act)
        return len(gone)


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`redis://host:6379/0`, or `rediss://` if it is encrypted; the scope is the pipeline's name."""
    options = address.take("buckets", *OPTIONS)
    buckets = options.pop("buckets", None)
    if buckets is not None and not (buckets.isdecimal() and 1 <= int(buckets) <= BUCKETS_MAX):
        raise AddressError(f"buckets={buckets} is no number from 1 to {BUCKETS_MAX}")
    server = database_at(address, options)
    return RedisLedger(server, address.name, policy, int(buckets) if buckets is not None else None)
