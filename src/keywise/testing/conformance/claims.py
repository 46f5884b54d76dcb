"""What every ledger promises about claims: one holder per key, newest wins, nothing older after an unknown write."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, Order, order_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import (
    Certainty,
    Claim,
    Commit,
    Entry,
    LeaseTerms,
    LedgerPolicy,
    Level,
    Phase,
    Refusal,
    RefusalReason,
)
from keywise.core.ledger import Failure
from keywise.testing.conformance.promise import Promises, near, same

LEASE_S = 60.0
REDELIVERY_S = 600.0
RETENTION_S = 1000.0
CLOCK_S = 5.0
"""How far a store's own clock may advance during one check."""
PLAIN = LedgerPolicy(intents=True, redelivery_s=REDELIVERY_S)
"""For a sink that would show stale state if an older write followed a newer one."""
SAFE = LedgerPolicy(intents=False, redelivery_s=REDELIVERY_S)
"""For a sink that refuses older writes by itself, or shares the ledger's transaction."""
FORGETTING = LedgerPolicy(redelivery_s=REDELIVERY_S, retention_s=RETENTION_S)
"""For a pipeline that forgets keys."""


@dataclass(slots=True, kw_only=True)
class LedgerBench:
    """A fresh ledger of one pipeline, opened twice."""

    ledger: Any
    """A `Ledger` that is also its own `LedgerAdmin`."""
    another: Any
    """The same scope, over another connection."""
    advance: Callable[[float], None]
    """Move the clock of the store ahead by so many seconds."""

    async def ask(
        self,
        version: int | None,
        owner: str = "w1",
        *,
        key: str = "a",
        level: Level = Level.USUAL,
        deleted: bool = False,
    ) -> Claim | Refusal:
        return await self.ask_for(ChangeHeader(key, order_of(version), deleted), owner, level=level)

    async def ask_for(self, header: ChangeHeader, owner: str = "w1", *, level: Level = Level.USUAL) -> Claim | Refusal:
        """Ask for one claim; the worker w2 uses the second connection."""
        ledger = self.another if owner == "w2" else self.ledger
        results = await ledger.claim([header], LeaseTerms(owner, LEASE_S, level))
        same("the number of results for one header", len(results.granted) + len(results.refused), 1)
        return results.granted[0] if results.granted else results.refused[header.key]  # type: ignore[no-any-return]

    async def take(
        self,
        version: int | None,
        owner: str = "w1",
        *,
        key: str = "a",
        level: Level = Level.USUAL,
        deleted: bool = False,
    ) -> Claim:
        """Ask for a claim, and raise unless it is granted."""
        return granted(await self.ask(version, owner, key=key, level=level, deleted=deleted))

    async def committed(self, version: int | None, *, key: str = "a", deleted: bool = False) -> None:
        claim = await self.take(version, key=key, deleted=deleted)
        same("refused commits", await self.ledger.commit([Commit(claim)]), [])

    async def entry(self, key: str = "a") -> Entry:
        return await self.ledger.inspect(key) or Entry()

    @property
    def has_transactions(self) -> bool:
        """Whether a sink can write in a transaction of the ledger's database."""
        return getattr(self.ledger, "database", self) is not None

    def expire(self) -> None:
        """Let a lease that was just taken expire."""
        self.advance(LEASE_S + 1.0)


MakeLedger: TypeAlias = Callable[[LedgerPolicy], AbstractAsyncContextManager[LedgerBench]]

CLAIM_PROMISES: Promises[LedgerBench] = Promises()

KEYS = ["a", " ", "é", "日本語", "🦉", "'; drop table x; --", 'say "hi"', "line\nbreak", "%_\\", "k" * 512, "null", "0"]
VERSIONS = [VERSION_MIN, VERSION_MIN + 1, -1, 0, 1, 2**53, 2**53 + 1, VERSION_MAX - 1, VERSION_MAX]


def granted(answer: Claim | Refusal) -> Claim:
    if not isinstance(answer, Claim):
        raise AssertionError(f"the claim was refused: {answer}")
    return answer


def refused(
    answer: Claim | Refusal, wanted: RefusalReason, *, wait_s: float | None = None, mark: Order | None = None
) -> None:
    """Raise unless a claim was refused for this reason, with about this wait and with this mark."""
    if not isinstance(answer, Refusal):
        raise AssertionError(f"the claim was granted instead of {wanted.value}")
    same("the reason of the refusal", answer.reason, wanted)
    if wait_s is not None:
        near("the wait of the refusal", answer.wait_s, wait_s, within=CLOCK_S)
    if mark is not None:
        same("the mark of the refusal", answer.mark, mark)


@CLAIM_PROMISES.add(PLAIN)
async def a_key_has_one_holder(bench: LedgerBench) -> None:
    """Until the lease ends, every other claim on the key is refused, even for a newer change or by the same worker."""
    claim = await bench.take(5)
    bench.advance(10.0)
    for version, owner in ((4, "w2"), (5, "w2"), (6, "w2"), (5, "w1"), (6, "w1")):
        refused(await bench.ask(version, owner), RefusalReason.BUSY, wait_s=LEASE_S - 10.0)
    refused(await bench.ask_for(ChangeHeader("a", None), "w2", level=Level.ALONE), RefusalReason.BUSY)
    same("the token of the holder", (await bench.entry()).token, claim.token)


@CLAIM_PROMISES.add(SAFE)
async def workers_that_ask_at_once_are_never_granted_the_same_key(bench: LedgerBench) -> None:
    """Deciding and claiming is one step: of two workers that ask at the same time, one gets the key."""
    for version in range(1, 21):
        headers = [ChangeHeader(f"k{number}", order_of(version)) for number in range(40)]
        mine, theirs = await asyncio.gather(
            bench.ledger.claim(headers, LeaseTerms("w1", LEASE_S)),
            bench.another.claim(headers[::-1], LeaseTerms("w2", LEASE_S)),
        )
        holders = [claim.key for claim in (*mine.granted, *theirs.granted)]
        if len(set(holders)) < len(holders):
            raise AssertionError(f"{len(holders) - len(set(holders))} keys were granted to both workers")
        same("the number of granted keys", len(holders), 40)
        await asyncio.gather(
            bench.ledger.commit([Commit(claim) for claim in mine.granted]),
            bench.another.commit([Commit(claim) for claim in theirs.granted]),
        )


@CLAIM_PROMISES.add(SAFE)
async def each_key_of_a_call_has_an_answer_of_its_own(bench: LedgerBench) -> None:
    """A refused key does not affect the other keys of the same call."""
    await bench.committed(5, key="stale")
    await bench.take(1, "w2", key="busy")
    headers = [ChangeHeader(key, order_of(3)) for key in ("free", "stale", "busy", "also free")]
    results = await bench.ledger.claim(headers, LeaseTerms("w1", LEASE_S))
    same("what was granted", sorted(claim.key for claim in results.granted), ["also free", "free"])
    seen = {key: refusal.reason for key, refusal in results.refused.items()}
    same("what was refused", seen, {"stale": RefusalReason.STALE, "busy": RefusalReason.BUSY})


@CLAIM_PROMISES.add(SAFE)
async def a_thousand_keys_fit_into_one_call(bench: LedgerBench) -> None:
    """Claims, renewals and commits take a thousand keys in one call."""
    headers = [ChangeHeader(f"k{number}", order_of(number), bool(number % 2)) for number in range(1000)]
    results = await bench.ledger.claim(headers, LeaseTerms("w1", LEASE_S))
    same("the number of granted claims", len(results.granted), 1000)
    same("the number of different tokens", len({claim.token for claim in results.granted}), 1000)
    same("lost renewals", await bench.ledger.renew(results.granted, LEASE_S), [])
    same("refused commits", await bench.ledger.commit([Commit(claim) for claim in results.granted]), [])
    counts = await bench.another.counts()
    same("keys, tombstones and claims", (counts.keys, counts.tombstones, counts.claims), (1000, 500, 0))


@CLAIM_PROMISES.add(PLAIN)
async def any_key_and_any_version_is_kept_exactly(bench: LedgerBench) -> None:
    """Keys are any text of up to 512 bytes; versions use all 64 bits."""
    for key in KEYS:
        await bench.committed(7, key=key)
        same(f"the mark of {key[:20]!r}", (await bench.entry(key)).mark, order_of(7))
    for version in VERSIONS:
        await bench.committed(version, key="versions")
        same("the mark", (await bench.entry("versions")).mark, order_of(version))
        refused(await bench.ask(version, key="versions"), RefusalReason.DUPLICATE, mark=order_of(version))


@CLAIM_PROMISES.add(PLAIN)
async def an_order_is_era_then_version_then_generation(bench: LedgerBench) -> None:
    """A reindex of an older version never wins over a newer version; a new era wins over any version."""
    orders: list[Order] = [(1, 5, 0), (1, 5, 3), (1, 6, 0), (2, VERSION_MIN, 0), (2, VERSION_MIN, 1)]
    for index, order in enumerate(orders):
        claim = granted(await bench.ask_for(ChangeHeader("a", order)))
        same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
        same("the mark", (await bench.entry()).mark, order)
        for older in orders[:index]:
            refused(await bench.ask_for(ChangeHeader("a", older)), RefusalReason.STALE, mark=order)


@CLAIM_PROMISES.add(SAFE)
async def what_is_not_newer_is_refused_for_ever(bench: LedgerBench) -> None:
    """A change below the mark is stale and one at the mark is a duplicate, even while another worker holds the key."""
    await bench.committed(5)
    refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
    refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
    await bench.take(7, "w2")
    refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
    refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))


@CLAIM_PROMISES.add(SAFE)
async def a_deletion_of_an_unknown_key_leaves_a_tombstone(bench: LedgerBench) -> None:
    """A key that was deleted before its first change arrived stays deleted."""
    await bench.committed(5, deleted=True)
    entry = await bench.entry()
    same("mark and deletion", (entry.mark, entry.deleted), (order_of(5), True))
    refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
    await bench.committed(6)
    same("deletion after a newer put", (await bench.entry()).deleted, False)


@CLAIM_PROMISES.add(PLAIN)
async def a_row_does_not_restore_what_is_deleted_at_its_version(bench: LedgerBench) -> None:
    """A row of a reindex is refused as removed if its key is deleted at its version, even while the key is held."""
    await bench.committed(5)
    await bench.ledger.commit([Commit(granted(await bench.ask_for(ChangeHeader("a", (0, 5, 1), deleted=True))))])
    for generation in (2, 3, 2**31 - 1):
        row = ChangeHeader("a", (0, 5, generation), is_row=True)
        refused(await bench.ask_for(row), RefusalReason.REMOVED, wait_s=0.0, mark=(0, 5, 1))
    refused(await bench.ask_for(ChangeHeader("a", (0, 5, 1), is_row=True)), RefusalReason.DUPLICATE)
    refused(await bench.ask_for(ChangeHeader("a", (0, 4, 9), is_row=True)), RefusalReason.STALE)
    for header in (ChangeHeader("a", (0, 5, 2)), ChangeHeader("a", (0, 6, 2), is_row=True)):
        await bench.ledger.release([granted(await bench.ask_for(header))])
    await bench.committed(5, key="b")
    granted(await bench.ask_for(ChangeHeader("b", (0, 5, 2), is_row=True)))
    held = await bench.take(6)
    refused(await bench.ask_for(ChangeHeader("a", (0, 5, 2), is_row=True), "w2"), RefusalReason.REMOVED)
    same("refused commits", await bench.ledger.commit([Commit(held)]), [])


@CLAIM_PROMISES.add(SAFE)
async def changes_without_a_version_are_applied_once(bench: LedgerBench) -> None:
    """A change without a version is applied once per key, and cannot be mixed with versioned changes."""
    await bench.committed(None)
    refused(await bench.ask(None), RefusalReason.DUPLICATE)
    refused(await bench.ask(3), RefusalReason.MIXED)
    await bench.committed(3, key="versioned")
    refused(await bench.ask(None, key="versioned"), RefusalReason.MIXED)


@CLAIM_PROMISES.add(FORGETTING)
async def a_late_change_needs_a_key_that_is_remembered(bench: LedgerBench) -> None:
    """A change older than the retention is refused as forgotten if its key is unknown; otherwise the mark decides."""
    early = await bench.ledger.now() - RETENTION_S - CLOCK_S
    refused(await bench.ask_for(ChangeHeader("a", order_of(5), sent_at=early)), RefusalReason.FORGOTTEN)
    await bench.committed(5)
    refused(await bench.ask_for(ChangeHeader("a", order_of(4), sent_at=early)), RefusalReason.STALE)
    granted(await bench.ask_for(ChangeHeader("a", order_of(6), sent_at=early)))
    granted(await bench.ask_for(ChangeHeader("b", order_of(5), sent_at=early + 2 * CLOCK_S)))


@CLAIM_PROMISES.add(SAFE)
async def nothing_is_late_if_nothing_is_forgotten(bench: LedgerBench) -> None:
    """Without a retention, a message may have any age."""
    granted(await bench.ask_for(ChangeHeader("a", order_of(5), sent_at=0.0)))


@CLAIM_PROMISES.add(PLAIN)
async def tokens_are_never_used_again(bench: LedgerBench) -> None:
    """Each claim has a token of its own, even after its key was forgotten."""
    tokens = []
    for version in range(1, 30):
        claim = await bench.take(version)
        tokens.append(claim.token)
        await (bench.ledger.release([claim]) if version % 2 else bench.ledger.commit([Commit(claim)]))
        bench.advance(REDELIVERY_S + 100.0)
        await bench.ledger.prune(50.0)
    same("the number of different tokens", len(set(tokens)), len(tokens))
    if min(tokens) <= 0:
        raise AssertionError(f"a token was {min(tokens)}; 0 means that the key is free")


@CLAIM_PROMISES.add(SAFE)
async def tokens_stay_different_however_many_there_are(bench: LedgerBench) -> None:
    """Thousands of tokens are all different: that does not depend on chance."""
    headers, tokens = [ChangeHeader(f"k{number}", order_of(1)) for number in range(1000)], set[int]()
    for rounds in range(1, 17):
        results = await bench.ledger.claim(headers, LeaseTerms("w1", LEASE_S))
        tokens |= {claim.token for claim in results.granted}
        same("the number of different tokens", len(tokens), rounds * len(headers))
        await bench.ledger.release(results.granted)


@CLAIM_PROMISES.add(PLAIN)
async def an_old_token_opens_nothing(bench: LedgerBench) -> None:
    """After a takeover, the previous holder can no longer renew, commit, fail, release or dead-letter."""
    old = await bench.take(5)
    bench.expire()
    new = await bench.take(5, "w2", level=Level.ALONE)
    before = await bench.entry()
    same("lost renewals", await bench.ledger.renew([old], LEASE_S), [old])
    await bench.ledger.release([old])
    await bench.ledger.fail([Failure(old, Certainty.CLEAN, 1.0)])
    same("the entry after calls with an old token", await bench.entry(), before)
    same("refused commits", await bench.ledger.commit([Commit(old)]), [old])
    after = await bench.entry()
    same("token and mark after a refused commit", (after.token, after.mark), (new.token, None))
    same("the suspicions after a refused commit", after.suspicions, before.suspicions + 1)
    same("refused commits of the new holder", await bench.another.commit([Commit(new)]), [])


@CLAIM_PROMISES.add(PLAIN)
async def a_takeover_begins_a_lease_of_its_own(bench: LedgerBench) -> None:
    """A takeover starts a full lease, and makes the key suspect if the sink is plain."""
    await bench.take(5)
    bench.expire()
    claim = await bench.take(5, "w2", level=Level.ALONE)
    same("whether the claim is a takeover", claim.took_over, True)
    same("the suspicions", (await bench.entry()).suspicions, 1)
    bench.advance(LEASE_S - CLOCK_S * 2)
    refused(await bench.ask(5, "w3", level=Level.ALONE), RefusalReason.BUSY)


@CLAIM_PROMISES.add(SAFE)
async def a_takeover_on_a_safe_sink_is_no_suspicion(bench: LedgerBench) -> None:
    """If the sink itself refuses older writes, a takeover makes no key suspect, and older changes do not wait."""
    await bench.take(7)
    bench.expire()
    claim = await bench.take(7, "w2", level=Level.ALONE)
    await bench.another.release([claim])
    same("the suspicions", (await bench.entry()).suspicions, 0)
    await bench.take(6, level=Level.PROBATION)


@CLAIM_PROMISES.add(SAFE)
async def an_older_change_waits_for_one_that_workers_died_with_on_probation(bench: LedgerBench) -> None:
    """Otherwise the commit of the older change would end the level of the newer one, which may kill its workers."""
    claim = await bench.take(7)
    for owner in ("w2", "w3"):
        await bench.another.renew([claim], LEASE_S, Phase.BEGUN)
        bench.expire()
        claim = await bench.take(7, owner, level=Level.ALONE)
    same("the level", claim.level, Level.SOLE)
    await bench.another.release([claim])
    refused(await bench.ask(6, level=Level.ALONE), RefusalReason.DEFERRED, wait_s=REDELIVERY_S)
    await bench.take(8, level=Level.SOLE)


@CLAIM_PROMISES.add(PLAIN)
async def a_renewal_moves_the_deadline(bench: LedgerBench) -> None:
    """A renewed claim lasts for a whole lease from the renewal."""
    claim = await bench.take(5)
    for _ in range(3):
        bench.advance(LEASE_S / 2)
        same("lost renewals", await bench.another.renew([claim], LEASE_S), [])
    refused(await bench.ask(6, "w2"), RefusalReason.BUSY, wait_s=LEASE_S)


@CLAIM_PROMISES.add(SAFE)
async def an_exclusive_claim_keeps_all_others_out(bench: LedgerBench) -> None:
    """A claim without an order is granted at any mark, keeps all other claims out, and leaves the mark alone."""
    await bench.committed(5)
    claim = granted(await bench.ask_for(ChangeHeader("a", None)))
    refused(await bench.ask(6, "w2"), RefusalReason.BUSY)
    await bench.ledger.release([claim])
    same("the mark", (await bench.entry()).mark, order_of(5))
    await bench.take(6)


@CLAIM_PROMISES.add(PLAIN)
async def a_change_whose_worker_died_gets_less_company(bench: LedgerBench) -> None:
    """Each death at work raises the level at which a key is granted; at the highest, each is a crash."""
    claim = await bench.take(5, "dead 0")
    for number, (level, crashes) in enumerate([(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)], start=1):
        same("lost renewals", await bench.ledger.renew([claim], LEASE_S, Phase.BEGUN), [])
        bench.expire()
        refused(await bench.ask(5, f"w{number}", level=Level(level - 1)), RefusalReason.PROBATION)
        claim = await bench.take(5, f"dead {number}", level=Level(level))
        same("the level and the counted crashes", (claim.level, claim.crashes), (level, crashes))
    bench.expire()
    claim = await bench.take(5, "dead before it began", level=Level.ALONE)
    same("the counted crashes of a worker that had not begun", claim.crashes, 2)
    await bench.ledger.release([claim])
    refused(await bench.ask(5, "w8"), RefusalReason.PROBATION)
    claim = await bench.take(6, "w9", level=Level.ALONE)
    same("the level and the crashes of a newer change", (claim.level, claim.crashes), (3, 0))
    await bench.ledger.commit([Commit(claim)])
    same("the level after a commit", (await bench.take(7, "w9")).level, 0)


@CLAIM_PROMISES.add(PLAIN)
async def a_death_beside_others_is_no_crash(bench: LedgerBench) -> None:
    """A death at the highest level, after other changes run beside it again, is counted apart."""
    claim = await bench.take(5, "dead 0")
    for number in range(1, 4):
        await bench.ledger.renew([claim], LEASE_S, Phase.BEGUN)
        bench.expire()
        claim = await bench.take(5, f"dead {number}", level=Level.ALONE)
    await bench.ledger.renew([claim], LEASE_S, Phase.ACCOMPANIED)
    await bench.ledger.renew([claim], LEASE_S)
    bench.expire()
    claim = await bench.take(5, "w9", level=Level.ALONE)
    same("crashes and late deaths", (claim.crashes, claim.late_deaths), (0, 1))


@CLAIM_PROMISES.add(PLAIN)
async def an_older_change_waits_behind_one_that_killed_its_worker(bench: LedgerBench) -> None:
    """Two changes that crash their worker do not alternate: each switch would reset the crash counter."""
    await bench.take(5, "dead", level=Level.ALONE)
    bench.expire()
    refused(await bench.ask(4, "w2", level=Level.ALONE), RefusalReason.DEFERRED, wait_s=REDELIVERY_S - 1.0)
    refused(await bench.ask_for(ChangeHeader("a", None), "w2", level=Level.ALONE), RefusalReason.DEFERRED)


@CLAIM_PROMISES.add(PLAIN)
async def a_holder_that_asks_again_is_not_dead(bench: LedgerBench) -> None:
    """A worker that lost the answer to its claim gets the key again after the lease, without isolation."""
    await bench.take(5)
    bench.expire()
    claim = await bench.take(5)
    same("attempts and crashes", (claim.attempts, claim.crashes), (0, 0))


def letters_of(found: Sequence[tuple[int, float, DeadLetter]]) -> list[DeadLetter]:
    return [letter for _, _, letter in found]
