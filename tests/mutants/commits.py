"""Variants that commit, release, dead-letter, prune or repair what they must not."""

from collections.abc import Sequence

from msgspec.structs import replace

from keywise.adapters.memory.ledger import MemoryLedger, MemoryTransaction
from keywise.core import ledger_steps, rules
from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Certainty, Claim, Commit, CommitResult, Entry, LedgerPolicy
from keywise.core.ledger import Failure
from keywise.core.sink import Grade
from mutants.mutant import Mutant

_commit, _mark, _fail, _release = rules.commit, rules.mark, rules.fail, rules.release
_dead_letter, _finish_repair, _is_prunable = rules.dead_letter, rules.finish_repair, rules.is_prunable


def _any_token(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    return _commit(
        entry, Commit(replace(commit.claim, token=entry.token), commit.overdue) if entry else commit, now, policy
    )


def _any_order(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    claim = commit.claim
    return _mark(entry, ChangeHeader(claim.key, claim.order, claim.deleted), now), CommitResult.COMMITTED


def _no_tombstone(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    after, result = _commit(entry, commit, now, policy)
    return (None if commit.claim.deleted else after), result


def _no_tombstone_for_strangers(entry: Entry | None, header: ChangeHeader, now: float) -> Entry | None:
    return None if header.deleted and (entry is None or entry.mark is None) else _mark(entry, header, now)


def _refusal_unnoticed(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    after, result = _commit(entry, commit, now, policy)
    return (entry if result is CommitResult.REFUSED else after), result


def _already_though_overdue(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    return _commit(entry, Commit(commit.claim), now, policy)


async def _twice_in_a_transaction(self: MemoryTransaction, claims: Sequence[Claim]) -> list[Claim]:
    return ledger_steps.commit(self._working_set, [Commit(claim) for claim in claims])


def _clean(entry: Entry | None, failure: Failure, now: float, policy: LedgerPolicy) -> Entry | None:
    return _fail(entry, replace(failure, certainty=Certainty.CLEAN), now, policy)


def _uncounted(entry: Entry | None, failure: Failure, now: float, policy: LedgerPolicy) -> Entry | None:
    after = _fail(entry, failure, now, policy)
    return replace(after, attempts=entry.attempts) if after is not None and entry is not None else after


def _released_by_anybody(entry: Entry | None, claim: Claim) -> Entry | None:
    return _release(entry, replace(claim, token=entry.token) if entry else claim)


def _release_drops_unknown(entry: Entry | None, claim: Claim) -> Entry | None:
    after = _release(entry, claim)
    return replace(after, unknown=None) if after is not None else None


def _unsuspected(
    entry: Entry | None, claim: Claim, certainty: Certainty, now: float, policy: LedgerPolicy
) -> Entry | None:
    after = _dead_letter(entry, claim, certainty, now, policy)
    return replace(after, suspicions=entry.suspicions) if after is not None and entry is not None else after


async def _no_letter(self: MemoryLedger, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
    await self.release([request.claim for request in requests if request.claim is not None])
    return []


def _too_early(entry: Entry, now: float, retention_s: float, policy: LedgerPolicy) -> bool:
    return _is_prunable(entry, now, retention_s / 5, replace(policy, redelivery_s=0.0))


def _after_retention_only(entry: Entry, now: float, retention_s: float, policy: LedgerPolicy) -> bool:
    return _is_prunable(entry, now, retention_s, replace(policy, redelivery_s=0.0))


def _though_busy(entry: Entry, now: float, retention_s: float, policy: LedgerPolicy) -> bool:
    return _is_prunable(replace(entry, token=0, unknown=None, suspicions=0), now, retention_s, policy)


def _repair_finished_blindly(
    entry: Entry | None, claim: Claim, written: ChangeHeader | None, now: float
) -> Entry | None:
    return _finish_repair(
        entry, replace(claim, suspicions=entry.suspicions, token=entry.token) if entry else claim, written, now
    )


COMMITS = (
    Mutant("a commit ignores the token", 9, rules, "commit", _any_token),
    Mutant("a commit ignores the token in a transaction", 9, rules, "commit", _any_token, Grade.ATOMIC),
    Mutant("a commit moves the mark back", 3, rules, "commit", _any_order),
    Mutant("a deletion leaves no tombstone", 11, rules, "commit", _no_tombstone),
    Mutant(
        "a deletion of a stranger leaves no tombstone", 11, rules, "mark", _no_tombstone_for_strangers, Grade.ATOMIC
    ),
    Mutant("a refused commit is not suspect", 6, rules, "commit", _refusal_unnoticed),
    Mutant("an overdue commit counts as done", 7, rules, "commit", _already_though_overdue),
    Mutant("a transaction repeats an effect", 12, MemoryTransaction, "commit", _twice_in_a_transaction, Grade.ATOMIC),
    Mutant("an unknown outcome is released", 6, rules, "fail", _clean),
    Mutant("failures are not counted", 10, rules, "fail", _uncounted),
    Mutant("anybody can release", 9, rules, "release", _released_by_anybody, Grade.CONDITIONAL),
    Mutant("a release drops the inherited unknown", 6, rules, "release", _release_drops_unknown),
    Mutant("a dead letter after an unknown outcome is not suspect", 6, rules, "dead_letter", _unsuspected),
    Mutant("a dead change leaves no letter", 13, MemoryLedger, "dead_letter", _no_letter),
    Mutant("pruned before the retention", 14, rules, "is_prunable", _too_early),
    Mutant("pruned before an older version is late", 14, rules, "is_prunable", _after_retention_only, Grade.ATOMIC),
    Mutant("pruned though something goes on", 14, rules, "is_prunable", _though_busy),
    Mutant("a repair clears what it has not seen", 6, rules, "finish_repair", _repair_finished_blindly),
)
