"""The ledger in a Redis server: the rules, applied to states that are read in one step and swapped in another.

Plain changes, which need no rules, are claimed in one step and committed in another.

Redis holds only the ledger. Effects are never part of a step of it, so there is no transaction to write them in.
"""

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from operator import attrgetter
from typing import Self, TypeVar

from keywise.adapters.redis.database import OPTIONS, RedisDatabase, database_at, in_pairs
from keywise.adapters.redis.ledger.dump import LETTER, RedisLedgerTransfer
from keywise.adapters.redis.ledger.entry_encoding import IDLE, entry_of, is_plain_claim, state_of
from keywise.adapters.redis.ledger.history import RedisHistoryStore
from keywise.adapters.redis.ledger.listing import active_entries, codes_after
from keywise.adapters.redis.ledger.plain_claims import RedisPlainClaims
from keywise.adapters.redis.ledger.progress_file import ProgressFile
from keywise.adapters.redis.ledger.scope import BUCKETS_MAX, RedisScope
from keywise.adapters.redis.ledger.scripts import COUNT, DROP, PERIODIC_LOCK, PROBE, SET_CONTROLS, WALK
from keywise.adapters.redis.ledger.working_set import (
    TRIES_MAX,
    WAIT_S,
    RedisEntries,
    RedisWorkingSet,
    stretches,
)
from keywise.core import ledger_steps, rules
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls, Pause, controls_of, text_of
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, Entry, LeaseTerms, LedgerPolicy, Phase
from keywise.core.errors import AddressError, SettingsError, UnavailableError
from keywise.core.key_encoding import decoded, encoded
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.resource import opening
from keywise.core.transaction import Transaction
from keywise.core.url import Address

T = TypeVar("T")

PRUNE_AT_ONCE = 4_096
"""Nobody has to wait for longer than such a stretch takes."""
READ_AT_ONCE = 2_000
LETTERS_AT_ONCE = 100
HELD, DONE = b"held", b"done"
DELETE_AT_ONCE = 4_096
KNOWN_MAX = 50_000
"""Of so many claims that are not plain the worker remembers what it wrote, which saves a step when they end."""


class RedisLedger:
    """The ledger of one pipeline in a Redis server. It is also its own operator and control store."""

    database = None
    """No sink or source can share it."""

    def __init__(
        self,
        server: RedisDatabase,
        scope: str,
        policy: LedgerPolicy,
        buckets: int | None = None,
        witness: str | None = None,
    ) -> None:
        self._server = server
        server.limit_commands(policy.command_s)
        self._policy = policy
        progress_file = ProgressFile(witness, server.name, scope) if witness is not None else None
        self._scope = RedisScope(server, scope, buckets, progress_file)
        self._entries = RedisEntries(self._scope, policy)
        self._plain_claims = RedisPlainClaims(self._scope, policy)
        self._known: OrderedDict[int, Entry] = OrderedDict()
        """By token, what this worker wrote when it was granted a claim that is not plain."""
        self.admin = self.control_store = self
        self.history_store = RedisHistoryStore(self._scope)
        self.transfer = RedisLedgerTransfer(self._scope, policy, self.set_controls, self.history_store)
        self._scope.on_loss = self._lost

    async def __aenter__(self) -> Self:
        async with opening(self._server):
            await self._scope.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._scope.close()
        await self._server.__aexit__()

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        """Claim what is idle and plainly newer in one step; the rules decide the rest."""
        if not self._plain_claims.is_worth_trying or not _names_each_once([header.key for header in headers]):
            return await self._claim(headers, terms)
        granted = await self._plain_claims.claim(headers, terms)
        if len(granted) == len(headers):
            return ClaimResults(granted)
        keys = {claim.key for claim in granted}
        results = await self._claim([header for header in headers if header.key not in keys], terms)
        return ClaimResults([*granted, *results.granted], results.refused)

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        def step(working_set: RedisWorkingSet, some: list[Claim]) -> list[Claim]:
            return ledger_steps.renew(working_set, some, lease_s, phase)

        return _flat(await self._entries.run(_by_key(claims), step))

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        def step(working_set: RedisWorkingSet, some: list[Advance]) -> tuple[list[Claim], Entry | None]:
            return ledger_steps.advance(working_set, some), working_set.entry(some[0].claim.key)

        by_key, refused = _by_key(advances, _claim_key), list[Claim]()
        results = await self._entries.run(by_key, step, frees=False)
        for some, (lost, entry) in zip(by_key.values(), results, strict=True):
            refused += lost
            for one in some:
                self._known.pop(one.claim.token, None)
                if entry is not None and entry.token == one.claim.token:
                    self._know(one.claim.token, entry)
        return refused

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """If the answer is lost, the call is repeated: the mark shows what has arrived."""
        # Of two with the same key, the second depends on what becomes of the first.
        if _names_each_once([commit.claim.key for commit in commits]):
            # A plain claim ends as a mark alone, without an extent.
            known, plain = self._known, [commit.claim for commit in commits if commit.is_plain]
            committed = await self._plain_claims.commit([claim for claim in plain if claim.token not in known])
            commits = [commit for commit in commits if commit.claim.token not in committed]
        return await self._commit(commits) if commits else []

    async def fail(self, failures: Sequence[Failure]) -> None:
        await self._entries.run(_by_key(failures, _claim_key), ledger_steps.fail)

    async def release(self, claims: Sequence[Claim]) -> None:
        await self._entries.run(_by_key(claims), ledger_steps.release, self._known_entries(claims))

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        lost: list[Claim] = []
        for some in stretches(requests, lambda request: request.letter):
            by_key = _by_key([request for request in some if request.claim is not None], _claim_key)
            lost += _flat(await self._entries.run(by_key, ledger_steps.dead_letter, frees=False))
            if unread := [(None, request.letter) for request in some if request.claim is None]:
                await self._entries.keep(unread)
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
        return (await self._entries.read([key])).entries[key]

    async def counts(self) -> LedgerCounts:
        return LedgerCounts(*await self._scope.call(COUNT))

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        since = await self._server.now() - quiet_s
        which = (self._scope.key("suspect"), "-inf", repr(since), "LIMIT", 0, limit)
        return [decoded(code) for code in await self._server.run("ZRANGEBYSCORE", *which)]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        def step(working_set: RedisWorkingSet, claim: Claim) -> None:
            ledger_steps.finish_repair(working_set, claim, written)

        await self._entries.run({claim.key: claim}, step)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        await self._entries.run(_by_key(headers), ledger_steps.mark_suspect, under_controls=True)
        if resync_due is not None:
            now = await self._server.now()
            await self._change(lambda controls, _: controls.with_resync(resync_due, now))

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

    # What an operator sets, and what the workers agree on.

    async def controls(self) -> Controls:
        return controls_of(await self._text())

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls, _: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls, _: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        [era] = await self._entries.run({claim.key: claim}, ledger_steps.reset, under_controls=True)
        return era

    async def raise_era(self) -> int | None:
        before, after = await self._change(Controls.with_era_above, unless_held=True)
        return after.era if after != before else None

    async def fix_scale(self, scale: str) -> str:
        _, after = await self._change(lambda controls, _: controls.with_scale(scale))
        return after.scale

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        found, _ = await self._change(lambda controls, _: after if controls == before else controls)
        return found == before

    async def highest_generation(self) -> int:
        highest, codes = 0, [b""]
        going_on = [code async for code, _ in active_entries(self._scope)]
        while codes := await codes_after(self._scope, codes[-1], READ_AT_ONCE, going_on):
            entries = (await self._entries.read(map(decoded, codes))).entries.values()
            highest = max([highest, *(entry.mark[2] for entry in entries if entry is not None and entry.mark)])
        return highest

    async def keys(self, after: str, limit: int) -> list[str]:
        """In the order of their buckets, which never changes."""
        going_on = [code async for code, entry in active_entries(self._scope) if rules.is_known(entry)]
        return [decoded(code) for code in await codes_after(self._scope, encoded(after), limit, going_on)]

    async def held(self, after: str, limit: int) -> list[str]:
        now = await self._server.now()
        codes = await self._server.run("ZRANGEBYSCORE", self._scope.key("held"), f"({now!r}", "+inf")
        return sorted(key for key in map(decoded, codes) if key > after)[:limit]

    async def acquire(self, task: str, every_s: float) -> bool:
        # What has an interval may free memory; what has none finds out whether there is any.
        [done] = await self._scope.call(PERIODIC_LOCK if every_s else PROBE, task, repr(every_s))
        return bool(done)

    async def set_controls(self, controls: Controls) -> None:
        """Replace what holds for all keys."""
        await self._change(lambda *_: controls)

    @property
    def losses(self) -> int:
        """How often this opening has found that the server has lost something."""
        return self._scope.losses

    def _lost(self, controls: bytes, now: float) -> bytes:
        """Nobody knows which marks are gone, so everything has to be sent again."""
        self._known.clear()
        return text_of(controls_of(controls).with_resync(True, now)).encode()

    async def _text(self) -> bytes:
        text: bytes = await self._server.run("GET", self._scope.key("controls")) or b"{}"
        return text

    async def _change(
        self, change: Callable[[Controls, int], Controls], *, unless_held: bool = False
    ) -> tuple[Controls, Controls]:
        """What is set before and after; no claim that was decided before is granted after it.

        The change is given the highest era of any key. If it may not be made while a key is held, both are the same.
        """
        text = await self._text()
        era = await self._server.run("HGET", self._scope.key("meta"), "era") or b"0"
        for attempt in range(TRIES_MAX):
            before = controls_of(text)
            after = change(before, int(era))
            answer = await self._scope.call(SET_CONTROLS, text, text_of(after), era if unless_held else b"")
            if answer[0] == HELD:
                return before, before
            if answer[0] == DONE:
                self._scope.saw(answer[1], answer[1])
                return before, after
            _, text, era = answer
            await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._server.name}: others keep changing what is set")

    async def _claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        """Claim what the rules grant."""

        def step(working_set: RedisWorkingSet, header: ChangeHeader) -> tuple[ClaimResults, Entry | None]:
            tokens = iter([working_set.tokens[header.key]])
            return ledger_steps.claim(working_set, [header], terms, tokens), working_set.entry(header.key)

        by_key = {header.key: header for header in sorted(headers, key=_key)}
        read = await self._entries.read(by_key, tokens=True)
        self._plain_claims.saw(read.controls)
        results = ClaimResults()
        for result, entry in await self._entries.run(by_key, step, read, frees=False, under_controls=True):
            results.refused |= result.refused
            for claim in result.granted:
                assert entry is not None, "a key that is claimed has an entry"
                results.granted.append(claim)
                self._know(claim.token, entry)
        return results

    async def _commit(self, commits: Sequence[Commit]) -> list[Claim]:
        """Commit what the rules accept."""
        by_token = {commit.claim.token: commit for commit in commits}

        def ends(entry: Entry, claim: Claim) -> Entry | None:
            return rules.commit(entry, by_token[claim.token], 0.0, self._policy)[0]

        # A mark alone gets its time where it is written. For every other entry the clock is read first.
        known = self._known_entries([commit.claim for commit in commits], ends)
        return _flat(await self._entries.run(_by_key(commits, _claim_key), ledger_steps.commit, known))

    def _know(self, token: int, entry: Entry) -> None:
        if is_plain_claim(state_of(entry)):
            return
        self._known[token] = entry
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _known_entries(
        self, claims: Sequence[Claim], ends: Callable[[Entry, Claim], Entry | None] | None = None
    ) -> RedisWorkingSet | None:
        """The entries of claims as this worker wrote them; None if it must look.

        With `ends`, all of them have to end as marks alone, whose time is known where they are written.
        """
        known = RedisWorkingSet(self._policy, is_timed_there=ends is not None)
        for claim in claims:
            entry = self._known.pop(claim.token, None)
            if entry is None or claim.key in known.entries:
                return None
            if ends is not None and state_of(ends(entry, claim))[:1] != IDLE:
                return None
            known.entries[claim.key], known.states[claim.key] = entry, state_of(entry)
        return known

    async def _prune(self, found: Iterable[tuple[bytes, bytes]], retention_s: float) -> int:
        """Forget those of some keys that may be; return how many."""

        def step(working_set: RedisWorkingSet, key: str) -> bool:
            entry = working_set.entry(key)
            if entry is None or not rules.is_prunable(entry, working_set.now, retention_s, self._policy):
                return False
            working_set.set(key, None)
            return True

        now = await self._server.now()
        states = {decoded(code): state for code, state in found}
        entries = {key: entry_of(state) for key, state in states.items()}
        working_set = RedisWorkingSet(self._policy, states, entries, now=now, read_at=now)
        return sum(await self._entries.run({key: key for key in states}, step, working_set))


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`redis://host:6379/0`, or `rediss://` if it is encrypted; the scope is the pipeline's name."""
    options = address.take("buckets", "witness", *OPTIONS)
    buckets = options.pop("buckets", None)
    if buckets is not None and not (buckets.isdecimal() and 1 <= int(buckets) <= BUCKETS_MAX):
        raise AddressError(f"buckets={buckets} is no number from 1 to {BUCKETS_MAX}")
    witness = options.pop("witness", None)
    if witness == "":
        raise AddressError("witness= names no folder; write for example witness=/var/lib/shop")
    server = database_at(address, options)
    return RedisLedger(server, address.name, policy, int(buckets) if buckets is not None else None, witness)


_key, _claim_key = attrgetter("key"), attrgetter("claim.key")


def _by_key(items: Iterable[T], key: Callable[[T], str] = _key) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _names_each_once(keys: list[str]) -> bool:
    return len(set(keys)) == len(keys)


def _flat(lists: Iterable[list[Claim]]) -> list[Claim]:
    return [claim for some in lists for claim in some]
