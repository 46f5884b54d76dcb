"""The operations of a ledger on a working set: entries that are read together and written back together.

Every ledger runs these steps; it differs from the others in how it loads and stores a working set.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from keywise.core import rules
from keywise.core.change import ChangeHeader, Order
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, CommitResult, Entry, LeaseTerms, LedgerPolicy, Phase, Refusal
from keywise.core.ledger import ClaimResults, Failure

EVEN_IF_REPEATED = (CommitResult.COMMITTED, CommitResult.ALREADY)
"""The results that a commit accepts if it may be a repetition because an answer was lost."""


class WorkingSet(Protocol):
    """Entries of one ledger scope, as a unit of work.

    The store locks them, or detects on writing back that another process has changed them.
    """

    @property
    def policy(self) -> LedgerPolicy: ...

    @property
    def now(self) -> float:
        """The store's clock, read not later than the moment when the entries were locked."""

    @property
    def controls(self) -> Controls: ...

    def entry(self, key: str) -> Entry | None: ...

    def set(self, key: str, entry: Entry | None) -> None: ...

    def keep(self, letter: DeadLetter) -> None:
        """Add a dead letter."""


def claim(
    working_set: WorkingSet, headers: Sequence[ChangeHeader], terms: LeaseTerms, tokens: Iterator[int]
) -> ClaimResults:
    """Grant or refuse a claim for each header. Each granted claim takes a token that was never used before.

    Keys are processed in sorted order, so that two workers cannot deadlock.
    """
    results = ClaimResults()
    for header in sorted(headers, key=lambda header: header.key):
        entry = working_set.entry(header.key)
        refusal = rules.decide_under(working_set.controls, entry, header, working_set.now, working_set.policy, terms)
        if refusal is not None:
            results.refused[header.key] = refusal
            continue
        current = rules.current(header, entry, working_set.controls)
        after, granted = rules.grant(entry, current, next(tokens), working_set.now, terms, working_set.policy)
        working_set.set(header.key, after)
        results.granted.append(granted)
    return results


def renew(
    working_set: WorkingSet, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED
) -> list[Claim]:
    """Extend the leases of claims, and note how far their holder has come; return the claims that are lost."""
    lost = []
    for one in claims:
        entry = rules.renew(working_set.entry(one.key), one, working_set.now, lease_s, phase)
        if entry is None:
            lost.append(one)
        else:
            working_set.set(one.key, entry)
    return lost


def advance(working_set: WorkingSet, advances: Sequence[Advance], *, is_repeatable: bool = True) -> list[Claim]:
    """Keep the positions of claims; return the claims that are refused."""
    refused = []
    for one in advances:
        key = one.claim.key
        entry = rules.advance(working_set.entry(key), one, working_set.now, is_repeatable=is_repeatable)
        if entry is None:
            refused.append(one.claim)
        else:
            working_set.set(key, entry)
    return refused


def commit(
    working_set: WorkingSet, commits: Sequence[Commit], allowed: tuple[CommitResult, ...] = EVEN_IF_REPEATED
) -> list[Claim]:
    """Raise the marks of claims; return the claims whose result is not among the allowed ones."""
    refused = []
    for one in commits:
        key = one.claim.key
        entry, result = rules.commit(working_set.entry(key), one, working_set.now, working_set.policy)
        working_set.set(key, entry)
        if result not in allowed:
            refused.append(one.claim)
    return refused


def fail(working_set: WorkingSet, failures: Sequence[Failure]) -> None:
    for failure in failures:
        key = failure.claim.key
        working_set.set(key, rules.fail(working_set.entry(key), failure, working_set.now, working_set.policy))


def release(working_set: WorkingSet, claims: Sequence[Claim]) -> None:
    for one in claims:
        working_set.set(one.key, rules.release(working_set.entry(one.key), one))


def dead_letter(working_set: WorkingSet, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
    """Store dead letters and end their claims; return the lost claims, whose letters are not stored."""
    lost = []
    for request in requests:
        if (one := request.claim) is not None:
            entry = working_set.entry(one.key)
            if entry is None or entry.token != one.token:
                lost.append(one)
                continue
            working_set.set(
                one.key, rules.dead_letter(entry, one, request.certainty, working_set.now, working_set.policy)
            )
        working_set.keep(request.letter)
    return lost


def finish_repair(working_set: WorkingSet, one: Claim, written: ChangeHeader | None) -> None:
    working_set.set(one.key, rules.finish_repair(working_set.entry(one.key), one, written, working_set.now))


def mark_suspect(working_set: WorkingSet, headers: Sequence[ChangeHeader]) -> None:
    for header in headers:
        entry = working_set.entry(header.key)
        current = rules.in_era(header, entry, working_set.controls)
        working_set.set(header.key, rules.mark_suspect(entry, current, working_set.now, working_set.policy))


def reset(working_set: WorkingSet, one: Claim) -> int | None:
    """Raise the era of a key and return it; None if the claim is lost."""
    entry = rules.reset(working_set.entry(one.key), one, working_set.controls)
    if entry is None:
        return None
    working_set.set(one.key, entry)
    return entry.era


# The steps below run without claims, in a transaction that locks the keys.


def refusals(
    working_set: WorkingSet, headers: Sequence[ChangeHeader], entry: Callable[[str], Entry | None]
) -> dict[str, Refusal]:
    """Return the refusal of each header that is refused. `entry` may read entries that are not in the working set."""
    refused = {}
    for header in headers:
        refusal = rules.decide_under(
            working_set.controls, entry(header.key), header, working_set.now, working_set.policy
        )
        if refusal is not None:
            refused[header.key] = refusal
    return refused


def mark(working_set: WorkingSet, headers: Sequence[ChangeHeader]) -> None:
    for header in headers:
        entry = working_set.entry(header.key)
        marked = rules.mark(entry, rules.in_era(header, entry, working_set.controls), working_set.now)
        working_set.set(header.key, rules.charged(marked, working_set.now, working_set.policy))


def fail_unclaimed(working_set: WorkingSet, headers: Sequence[ChangeHeader]) -> list[int]:
    """Count a failed attempt for each header; return the number of attempts of each."""
    counts = []
    for header in headers:
        before = working_set.entry(header.key)
        entry = rules.fail_unclaimed(before, rules.in_era(header, before, working_set.controls), working_set.now)
        working_set.set(header.key, entry)
        counts.append(entry.attempts)
    return counts


def dead_letter_unclaimed(working_set: WorkingSet, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
    for header, letter in letters:
        if header is not None:
            working_set.set(header.key, rules.dead_letter_unclaimed(working_set.entry(header.key)))
        working_set.keep(letter)


def is_plainly_newer(header: ChangeHeader, mark: Order | None, oldest: float) -> bool:
    """Whether a header on an idle key is granted for certain, so that `rules.decide` need not run."""
    order = header.order
    if header.is_row:
        return False  # The mark may be a tombstone.
    if mark is None or order is None:
        return header.sent_at >= oldest
    return order > mark and mark[2] >= 0 and order[2] >= 0
