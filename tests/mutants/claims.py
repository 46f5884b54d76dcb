"""Variants that grant what they should refuse, or forget what a claim has to remember."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from keywise.adapters.memory.database import TOKEN_NONCE_BITS, MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core import rules
from keywise.core.change import ChangeHeader
from keywise.core.entry import Claim, Entry, LeaseTerms, LedgerPolicy, Level, Phase, Refusal, RefusalReason
from keywise.core.ledger import ClaimResults
from keywise.core.sink import Grade
from mutants.mutant import Mutant

_decide, _grant = rules.decide, rules.grant


async def _look_then_take(self: MemoryLedger, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
    seen = {header.key: self.working_set.entry(header.key) for header in headers}
    await asyncio.sleep(0.01)
    results = ClaimResults()
    for header in headers:
        refusal = rules.decide(seen[header.key], header, self.working_set.now, self.working_set.policy, terms)
        if refusal is not None:
            results.refused[header.key] = refusal
            continue
        token = self.database.token()
        entry, claim = rules.grant(
            self.working_set.entry(header.key), header, token, self.working_set.now, terms, self.working_set.policy
        )
        self.working_set.set(header.key, entry)
        results.granted.append(claim)
    return results


def _ignore_mark(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _decide(replace(entry, mark=None) if entry else None, header, now, policy, terms)


def _without(reason: RefusalReason, refusal: Refusal | None) -> Refusal | None:
    return None if refusal is not None and refusal.reason is reason else refusal


def _allow_equal(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _without(RefusalReason.DUPLICATE, _decide(entry, header, now, policy, terms))


def _never_defer(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _without(RefusalReason.DEFERRED, _decide(entry, header, now, policy, terms))


def _never_on_probation(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _without(RefusalReason.PROBATION, _decide(entry, header, now, policy, terms))


def _judge_by_a_fast_clock(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _decide(entry, header, now + 5.0, policy, terms)


def _wait_for_ever(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _decide(entry, header, now, replace(policy, redelivery_s=1e9), terms)


def _never_late(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _decide(entry, ChangeHeader(header.key, header.order, header.deleted), now, policy, terms)


def _mixed(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    return _without(RefusalReason.MIXED, _decide(entry, header, now, policy, terms))


def _keep_deadline(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    took_over = entry is not None and entry.token != 0
    return (replace(after, lease_until=entry.lease_until) if entry and took_over else after), claim


def _forget_unknown(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    return replace(after, unknown=None), claim


def _never_suspect(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    return replace(after, suspicions=entry.suspicions if entry else 0), claim


def _no_intent(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    return replace(after, intent=None), claim


def _claims_cost_attempts(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    return replace(after, attempts=after.attempts + 1), claim


def _every_death_counts(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    return _grant(
        replace(entry, deaths=Level.ALONE, phase=Phase.BEGUN) if entry else None, header, token, now, terms, policy
    )


def _no_death_counts(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    return _grant(replace(entry, phase=Phase.CLAIMED) if entry else None, header, token, now, terms, policy)


def _same_token(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    return _grant(entry, header, entry.token if entry and entry.token else token, now, terms, policy)


def _no_nonce(self: MemoryDatabase) -> int:
    self.tokens += 1
    return self.tokens << TOKEN_NONCE_BITS


CLAIMS = (
    Mutant("looks first and takes later", 1, MemoryLedger, "claim", _look_then_take),
    Mutant("a claim ignores the mark", 12, rules, "decide", _ignore_mark),
    Mutant("a transaction ignores the mark", 12, rules, "decide", _ignore_mark, Grade.ATOMIC),
    Mutant("an equal order is granted again", 12, rules, "decide", _allow_equal, Grade.ATOMIC),
    Mutant("older changes do not wait for an unknown write", 6, rules, "decide", _never_defer),
    Mutant("a lease is judged by a fast clock", 8, rules, "decide", _judge_by_a_fast_clock),
    Mutant("an unknown write is waited for for ever", 19, rules, "decide", _wait_for_ever),
    Mutant("a late delivery of a forgotten key is applied", 14, rules, "decide", _never_late, Grade.ATOMIC),
    Mutant("a dead worker's batch runs together again", 18, rules, "decide", _never_on_probation),
    Mutant("versioned and unversioned changes mix", 21, rules, "decide", _mixed),
    Mutant("a takeover keeps the old deadline", 8, rules, "grant", _keep_deadline),
    Mutant("a takeover keeps the old token", 9, rules, "grant", _same_token, Grade.CONDITIONAL),
    Mutant("a takeover forgets the unknown write", 6, rules, "grant", _forget_unknown),
    Mutant("a takeover is not suspect", 6, rules, "grant", _never_suspect),
    Mutant("claims without intent", 19, rules, "grant", _no_intent),
    Mutant("a claim costs an attempt", 10, rules, "grant", _claims_cost_attempts),
    Mutant("every death counts, alone or not", 18, rules, "grant", _every_death_counts),
    Mutant("no death counts", 18, rules, "grant", _no_death_counts, Grade.ATOMIC),
    Mutant("tokens without nonce", 9, MemoryDatabase, "token", _no_nonce, Grade.CONDITIONAL),
)
