"""Newest wins, as pure functions: what a ledger answers, and what its entry becomes.

The memory ledger calls these functions; every other ledger is held to them by the conformance suite.
`now` is always the store's clock. Nothing here reads a clock, waits or writes.
"""

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, Order, is_unversioned
from keywise.core.controls import Controls
from keywise.core.entry import (
    EMPTY,
    Certainty,
    Claim,
    CommitResult,
    Entry,
    LeaseTerms,
    LedgerPolicy,
    Refusal,
    RefusalReason,
)

PAUSE_LOOK_S = 2.0
"""How soon a paused key is asked for again."""


def decide(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    """Say why a claim cannot be granted; None grants it. Without terms, a transaction asks that takes no claim."""
    entry = entry or EMPTY
    return (
        _against_mark(entry, header, now, policy)
        or _against_holder(entry, header, now, terms, policy)
        or _against_history(entry, header, now, policy)
        or _against_rate(entry, now, policy)
    )


def decide_under(
    controls: Controls,
    entry: Entry | None,
    header: ChangeHeader,
    now: float,
    policy: LedgerPolicy,
    terms: LeaseTerms | None = None,
) -> Refusal | None:
    """As `decide`, under what an operator has set."""
    refusal = decide(entry, in_era(header, entry, controls), now, policy, terms)
    if refusal is None and controls.pauses and not (terms is not None and terms.despite_pause):
        return Refusal(RefusalReason.PAUSED, PAUSE_LOOK_S) if controls.pauses_key(header.key) else None
    if refusal is not None and refusal.mark is not None and header.order is not None and header.order[0] == 0:
        # Whoever asks compares it with what else waits, which names no era either.
        return replace(refusal, mark=(0, *refusal.mark[1:]))
    return refusal


def in_era(header: ChangeHeader, entry: Entry | None, controls: Controls) -> ChangeHeader:
    """The header in the era of its key. Upstream knows nothing of eras: what names none belongs to the current one."""
    if header.order is None or header.order[0] != 0:
        return header
    era = era_of(entry or EMPTY, controls)
    return header if era == 0 else ChangeHeader(header.key, (era, *header.order[1:]), header.deleted, header.sent_at)


def era_of(entry: Entry, controls: Controls) -> int:
    """The era that changes of a key belong to now."""
    return max(controls.era, entry.era, entry.mark[0] if entry.mark is not None else 0)


def grant(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    """Take the key, after `decide` found nothing against it; the header is in the key's era."""
    entry = charged(entry or EMPTY, now, policy)
    entry = _without_passed_unknown(_without_dead_holder(entry, policy, now), header, now)
    took_over = entry.token != 0
    died_isolated = took_over and entry.isolated and entry.begun and _died(entry, terms)
    if header.order is None and entry.tried is not None and now >= entry.tried_at + policy.redelivery_s:
        # Its message can no longer arrive. Deaths are counted from now on, or a deadly repair would never end.
        entry = replace(entry, tried=None, tried_at=0.0, attempts=0, crashes=0, not_before=0.0)
    elif header.order is not None and header.order != entry.tried:
        entry = replace(entry, tried=header.order, attempts=0, crashes=0, not_before=0.0)
    elif died_isolated and header.order == entry.tried:
        entry = replace(entry, crashes=entry.crashes + 1)
    entry = replace(
        entry,
        token=token,
        owner=terms.owner,
        lease_until=now + terms.lease_s,
        abandoned=False,
        isolated=terms.isolated and (header.order is not None or entry.tried is None),
        begun=False,
        intent=header.order if policy.intents else None,
        updated_at=now,
        tried_at=now if header.order is not None else entry.tried_at,
    )
    claim = Claim(
        header.key,
        header.order,
        header.deleted,
        token,
        entry.attempts,
        entry.crashes,
        entry.suspicions,
        took_over=took_over,
        isolated=terms.isolated,
    )
    return entry, claim


def renew(entry: Entry | None, claim: Claim, now: float, lease_s: float) -> Entry | None:
    """Extend a claim; None if it is no longer the holder's."""
    if entry is None or entry.token != claim.token or entry.abandoned:
        return None
    return replace(entry, lease_until=now + lease_s, begun=True)


def commit(entry: Entry | None, claim: Claim, now: float, policy: LedgerPolicy) -> tuple[Entry | None, CommitResult]:
    """Raise the mark, where the token is the holder's and the order is above the mark."""
    assert claim.order is not None, "an exclusion has nothing to commit"
    mine = entry is not None and entry.token == claim.token
    mark = entry.mark if entry else None
    if entry and mine and (mark is None or claim.order > mark):
        return _marked(entry, claim.order, claim.deleted, now), CommitResult.COMMITTED
    if entry and mark == claim.order and not claim.overdue:
        return (_idle(entry) if mine else entry), CommitResult.ALREADY
    return _suspected(entry, policy, now), CommitResult.REFUSED


def mark(entry: Entry | None, header: ChangeHeader, now: float) -> Entry:
    """Raise the mark inside the transaction that also holds the effect; `decide` was asked in the same one."""
    assert header.order is not None, "only an order can be marked"
    return _marked(entry or EMPTY, header.order, header.deleted, now)


def charged(entry: Entry, now: float, policy: LedgerPolicy) -> Entry:
    """Every dispatch is charged, whatever becomes of it."""
    if policy.rate is None:
        return entry
    return replace(entry, rate_at=max(entry.rate_at, now) + policy.rate.interval_s)


def fail(
    entry: Entry | None, claim: Claim, certainty: Certainty, retry_s: float, now: float, policy: LedgerPolicy
) -> Entry | None:
    """Count a failed try; only where the token is the holder's, and only once if it is told twice.

    A holder that lost its key while it was writing makes the key suspect.
    """
    if entry is None or entry.token != claim.token:
        # Its write may land, or have landed, after that of whoever has the key now.
        late = claim.overdue and certainty is not Certainty.CLEAN
        return _suspected(entry, policy, now) if late else entry
    if entry.abandoned:
        return entry
    if claim.order is not None and not claim.cut_off:
        entry = replace(entry, attempts=entry.attempts + 1, not_before=now + retry_s, tried_at=now, updated_at=now)
    if certainty is Certainty.UNKNOWN:
        return replace(entry, abandoned=True)
    if certainty is Certainty.ENDED:
        entry = _with_unknown(entry, entry.intent, now + policy.redelivery_s)
    return _free(entry)


def fail_unclaimed(entry: Entry | None, header: ChangeHeader, now: float) -> Entry:
    """Count a failed try inside a transaction that took no claim; a dead holder's claim ends with it."""
    entry = _free(entry or EMPTY)
    attempts = entry.attempts if entry.tried == header.order else 0
    tries = replace(entry, tried=header.order, attempts=attempts + 1, tried_at=now)
    return replace(tries, crashes=0, not_before=0.0, updated_at=now)


def release(entry: Entry | None, claim: Claim) -> Entry | None:
    """Give back a claim under which nothing was written. It costs nothing."""
    if entry is None or entry.token != claim.token:
        return entry
    return kept(_free(entry))


def dead_letter(
    entry: Entry | None, claim: Claim, certainty: Certainty, now: float, policy: LedgerPolicy
) -> Entry | None:
    """Set the claimed change aside; older ones are eligible again."""
    assert entry is not None and entry.token == claim.token, "only its holder may dead-letter a change"
    if certainty is not Certainty.CLEAN:
        entry = _with_unknown(entry, entry.intent, now)
    entry = _idle(entry)
    if entry.unknown is not None and claim.order is not None and entry.unknown <= claim.order:
        # The buried change may be in the sink all the same.
        entry = replace(_suspected(entry, policy, now) or entry, unknown=None, unknown_until=0.0)
    return kept(entry)


def dead_letter_unclaimed(entry: Entry | None) -> Entry | None:
    """Set a change aside inside a transaction that took no claim: its tries are forgotten."""
    return kept(_idle(entry)) if entry is not None else None


def finish_repair(entry: Entry | None, claim: Claim, written: ChangeHeader | None, now: float) -> Entry | None:
    """End a repair: clear a suspicion that has not grown meanwhile, and raise the mark if newer state was written."""
    if entry is None or entry.token != claim.token:
        return entry
    if now >= entry.unknown_until:
        entry = replace(entry, unknown=None, unknown_until=0.0)
    calm = entry.suspicions == claim.suspicions
    entry = replace(entry, suspicions=0 if calm else entry.suspicions, suspected_at=0.0 if calm else entry.suspected_at)
    if written and written.order and (entry.mark is None or written.order > entry.mark):
        return _marked(entry, written.order, written.deleted, now)
    if written and written.order == entry.mark and written.deleted:
        # The truth says that it is gone: the mark is a tombstone from now on.
        entry = replace(entry, deleted=True)
    return kept(_free(entry))


def mark_suspect(entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Entry | None:
    """A key was written without a claim: it is suspect, and older changes wait as for any write that is not committed.

    A sink that refuses what is older itself is right all the same. The header is in the key's era.
    """
    if not policy.intents:
        return entry
    marked = _suspected(entry, policy, now) or EMPTY
    if header.order is None:
        return marked
    if marked.tried is not None and header.order >= marked.tried:
        # What the last holder tried was written without a claim and acked: its message comes no more to settle it.
        # A lease that still runs ends by itself, and then nobody has to wait for the holder's next try.
        marked = _free(marked) if now >= marked.lease_until else replace(marked, abandoned=True)
    if marked.mark is not None and header.order <= marked.mark:
        return marked
    return _with_unknown(marked, header.order, now + policy.redelivery_s)


def reset(entry: Entry | None, claim: Claim, controls: Controls) -> Entry | None:
    """Raise the era of a key under an exclusion: whatever comes next is newer than all before. The mark stays."""
    if entry is None or entry.token != claim.token:
        return None
    return replace(_idle(entry), era=era_of(entry, controls) + 1)


def suspect_since(entry: Entry, policy: LedgerPolicy) -> float | None:
    """From when on the sink's content of a key is in doubt and should be repaired; None while it is not.

    A write of unknown outcome becomes doubtful once its message can no longer arrive to settle it.
    """
    if entry.suspicions:
        return entry.suspected_at
    if entry.unknown is not None:
        return entry.unknown_until
    if entry.token and entry.intent is not None:
        return entry.lease_until + policy.redelivery_s
    return None


def is_prunable(entry: Entry, now: float, retention_s: float, policy: LedgerPolicy) -> bool:
    """Nothing is going on, and no delivery can reach the key any more.

    An older version may have been sent a while after a newer one was committed; it has to be late before the key
    is forgotten, so the longest redelivery is waited for on top of the retention.
    """
    busy = entry.token != 0 or entry.unknown is not None or entry.suspicions > 0
    return not busy and entry.updated_at < now - retention_s - policy.redelivery_s


def is_known(entry: Entry) -> bool:
    """Whether an entry remembers more than when its key was dispatched last."""
    return kept(replace(entry, rate_at=0.0)) is not None


def kept(entry: Entry | None) -> Entry | None:
    """None for an entry that remembers nothing."""
    if entry is None:
        return None
    return entry if replace(entry, updated_at=0.0, not_before=0.0, tried=None, tried_at=0.0) != EMPTY else None


def _against_mark(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    mark, order = entry.mark, header.order
    if order is None:
        return None
    if mark is None:
        # Judged here and now: between an earlier look and this one, the key may have been pruned.
        late = policy.retention_s is not None and header.sent_at < now - policy.retention_s
        # What was tried before was judged then, and may be in the sink by now.
        return Refusal(RefusalReason.FORGOTTEN) if late and order != entry.tried else None
    if is_unversioned(mark) != is_unversioned(order) and mark[0] == order[0]:
        return Refusal(RefusalReason.MIXED, mark=mark)
    if order == mark:
        return Refusal(RefusalReason.DUPLICATE, mark=mark)
    return Refusal(RefusalReason.STALE, mark=mark) if order < mark else None


def _against_rate(entry: Entry, now: float, policy: LedgerPolicy) -> Refusal | None:
    if policy.rate is None:
        return None
    wait_s = entry.rate_at - policy.rate.burst_s - now
    return Refusal(RefusalReason.LIMITED, wait_s) if wait_s > 0 else None


def _against_holder(
    entry: Entry, header: ChangeHeader, now: float, terms: LeaseTerms | None, policy: LedgerPolicy
) -> Refusal | None:
    if entry.token == 0:
        return None
    if now < entry.lease_until:
        return Refusal(RefusalReason.BUSY, entry.lease_until - now)
    if terms is None or not _died(entry, terms):
        return None  # What writes in the ledger's own transaction runs no user code, so nothing can be blamed on it.
    if entry.tried is not None and (header.order is None or header.order < entry.tried):
        # Changes that kill their worker must not take turns, with each other or a repair: deaths would be forgotten.
        wait_s = entry.lease_until + policy.redelivery_s - now
        return Refusal(RefusalReason.DEFERRED, wait_s) if wait_s > 0 else None
    return Refusal(RefusalReason.ISOLATED) if not terms.isolated else None


def _against_history(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    if header.order is None:
        return None
    if entry.token != 0:
        entry = _with_unknown(entry, entry.intent, entry.lease_until + policy.redelivery_s)
    if entry.unknown is not None and header.order < entry.unknown and now < entry.unknown_until:
        return Refusal(RefusalReason.DEFERRED, entry.unknown_until - now)
    if entry.tried is not None and header.order <= entry.tried and now < entry.not_before:
        return Refusal(RefusalReason.BUSY, entry.not_before - now)
    if entry.tried is not None and entry.attempts and header.order < entry.tried:
        # Two changes that fail must not take turns, or each would make the other's failed tries forgotten.
        wait_s = entry.tried_at + policy.redelivery_s - now
        return Refusal(RefusalReason.DEFERRED, wait_s) if wait_s > 0 else None
    return None


def _died(entry: Entry, terms: LeaseTerms) -> bool:
    """Whether the holder of an expired lease is gone. It lives if it gave up in words, or if it asks now:
    then the answer to its claim was lost."""
    return not entry.abandoned and entry.owner != terms.owner


def _without_dead_holder(entry: Entry, policy: LedgerPolicy, now: float) -> Entry:
    """What a takeover inherits: the unknown write of the holder before."""
    if entry.token == 0:
        return entry
    entry = _suspected(entry, policy, now) or entry
    return _with_unknown(entry, entry.intent, entry.lease_until + policy.redelivery_s)


def _without_passed_unknown(entry: Entry, header: ChangeHeader, now: float) -> Entry:
    """Drop an unknown write whose message can no longer arrive: no key waits for ever, but it is suspect."""
    if (
        entry.unknown is None
        or now < entry.unknown_until
        or (header.order is not None and header.order >= entry.unknown)
    ):
        return entry
    return replace(entry, unknown=None, unknown_until=0.0, suspicions=entry.suspicions + 1, suspected_at=now)


def _with_unknown(entry: Entry, order: Order | None, until: float) -> Entry:
    if order is None or (entry.unknown is not None and entry.unknown >= order):
        return entry
    return replace(entry, unknown=order, unknown_until=until)


def _marked(entry: Entry, order: Order, deleted: bool, now: float) -> Entry:
    entry = replace(_idle(entry), mark=order, deleted=deleted, updated_at=now)
    if entry.unknown is not None and entry.unknown <= order:
        entry = replace(entry, unknown=None, unknown_until=0.0)
    return replace(entry, era=0) if order[0] >= entry.era else entry


def _suspected(entry: Entry | None, policy: LedgerPolicy, now: float) -> Entry | None:
    if not policy.intents:
        return entry
    entry = entry or EMPTY
    return replace(entry, suspicions=entry.suspicions + 1, suspected_at=now, updated_at=now)


def _free(entry: Entry) -> Entry:
    return replace(entry, token=0, owner="", lease_until=0.0, abandoned=False, isolated=False, begun=False, intent=None)


def _idle(entry: Entry) -> Entry:
    return replace(_free(entry), tried=None, tried_at=0.0, attempts=0, crashes=0, not_before=0.0)
