"""What a ledger does with a book: the entries of some keys, read together and written back together.

The ledger in memory does without, so that it can show whether these steps are right.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from keywise.core import rules
from keywise.core.change import ChangeHeader, Order
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Claim, CommitResult, Entry, LeaseTerms, Policy, Refusal
from keywise.core.ledger import ClaimResults, Failure

EVEN_IF_REPEATED = (CommitResult.COMMITTED, CommitResult.ALREADY)
"""What a commit may come to if its answer can have been lost."""


class Book(Protocol):
    """Entries of one ledger scope that nobody else can change meanwhile, or not without being noticed."""

    @property
    def policy(self) -> Policy: ...

    @property
    def now(self) -> float:
        """The store's clock, read when the entries were safe from others, or before."""

    @property
    def controls(self) -> Controls: ...

    def entry(self, key: str) -> Entry | None: ...

    def set(self, key: str, entry: Entry | None) -> None: ...

    def keep(self, letter: DeadLetter) -> None:
        """Add a dead letter."""


def claim(book: Book, headers: Sequence[ChangeHeader], terms: LeaseTerms, tokens: Sequence[int]) -> ClaimResults:
    results = ClaimResults()
    for header, token in zip(sorted(headers, key=lambda header: header.key), tokens, strict=True):
        entry = book.entry(header.key)
        refusal = rules.decide_under(book.controls, entry, header, book.now, book.policy, terms)
        if refusal is not None:
            results.refused[header.key] = refusal
            continue
        lifted = rules.in_era(header, entry, book.controls)
        after, granted = rules.grant(entry, lifted, token, book.now, terms, book.policy)
        book.set(header.key, after)
        results.granted.append(granted)
    return results


def renew(book: Book, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
    lost = []
    for one in claims:
        entry = rules.renew(book.entry(one.key), one, book.now, lease_s)
        if entry is None:
            lost.append(one)
        else:
            book.set(one.key, entry)
    return lost


def commit(book: Book, claims: Sequence[Claim], allowed: tuple[CommitResult, ...] = EVEN_IF_REPEATED) -> list[Claim]:
    """Raise the marks of claims; return those with another result than is allowed."""
    refused = []
    for one in claims:
        entry, result = rules.commit(book.entry(one.key), one, book.now, book.policy)
        book.set(one.key, entry)
        if result not in allowed:
            refused.append(one)
    return refused


def fail(book: Book, failures: Sequence[Failure]) -> None:
    for failure in failures:
        key = failure.claim.key
        entry = rules.fail(book.entry(key), failure.claim, failure.certainty, failure.retry_s, book.now, book.policy)
        book.set(key, entry)


def release(book: Book, claims: Sequence[Claim]) -> None:
    for one in claims:
        book.set(one.key, rules.release(book.entry(one.key), one))


def dead_letter(book: Book, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
    lost = []
    for request in requests:
        if (one := request.claim) is not None:
            entry = book.entry(one.key)
            if entry is None or entry.token != one.token:
                lost.append(one)
                continue
            book.set(one.key, rules.dead_letter(entry, one, request.certainty, book.now, book.policy))
        book.keep(request.letter)
    return lost


def finish_repair(book: Book, one: Claim, written: ChangeHeader | None) -> None:
    book.set(one.key, rules.finish_repair(book.entry(one.key), one, written, book.now))


def mark_suspect(book: Book, headers: Sequence[ChangeHeader]) -> None:
    for header in headers:
        entry = book.entry(header.key)
        lifted = rules.in_era(header, entry, book.controls)
        book.set(header.key, rules.mark_suspect(entry, lifted, book.now, book.policy))


def reset(book: Book, one: Claim) -> int | None:
    """The new era of a key; None if the claim is lost."""
    entry = rules.reset(book.entry(one.key), one, book.controls)
    if entry is None:
        return None
    book.set(one.key, entry)
    return entry.era


# Without a claim, in a transaction that locks the keys.


def refusals(book: Book, headers: Sequence[ChangeHeader], entry: Callable[[str], Entry | None]) -> dict[str, Refusal]:
    """The refusals of headers, by entries that may come from elsewhere than the book."""
    refused = {}
    for header in headers:
        refusal = rules.decide_under(book.controls, entry(header.key), header, book.now, book.policy)
        if refusal is not None:
            refused[header.key] = refusal
    return refused


def mark(book: Book, headers: Sequence[ChangeHeader]) -> None:
    for header in headers:
        entry = book.entry(header.key)
        marked = rules.mark(entry, rules.in_era(header, entry, book.controls), book.now)
        book.set(header.key, rules.charged(marked, book.now, book.policy))


def fail_unclaimed(book: Book, headers: Sequence[ChangeHeader]) -> list[int]:
    counts = []
    for header in headers:
        before = book.entry(header.key)
        entry = rules.fail_unclaimed(before, rules.in_era(header, before, book.controls), book.now)
        book.set(header.key, entry)
        counts.append(entry.attempts)
    return counts


def bury_unclaimed(book: Book, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
    for header, letter in letters:
        if header is not None:
            book.set(header.key, rules.bury_unclaimed(book.entry(header.key)))
        book.keep(letter)


def is_plainly_newer(header: ChangeHeader, mark: Order | None, oldest: float) -> bool:
    """Whether nothing can be said against a header on an idle key, without a closer look."""
    order = header.order
    if mark is None or order is None:
        return header.sent_at >= oldest
    return order > mark and mark[2] >= 0 and order[2] >= 0
