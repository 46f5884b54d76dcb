"""The rules of a ledger as pure functions: whether it grants a claim, and how each operation changes an entry.

Every ledger that runs `ledger_steps` calls these functions; the conformance suite holds every other one to them.
`now` is always the store's clock. Nothing here reads a clock, waits or writes.
"""

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, Order, is_same_version, is_unversioned
from keywise.core.controls import Controls
from keywise.core.entry import (
    EMPTY,
    Advance,
    Certainty,
    Claim,
    Commit,
    CommitResult,
    Entry,
    LeaseTerms,
    LedgerPolicy,
    Level,
    Phase,
    Refusal,
    RefusalReason,
)
from keywise.core.ledger import Failure

PAUSE_LOOK_S = 2.0
"""How many seconds a worker waits before it claims a paused key again."""
MOVE_LOOK_S = 0.2
"""How many seconds a worker waits before it claims a key again during a swap, which takes seconds itself."""


def decide(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    """Return why the claim must be refused, or None to grant it.

    `terms=None` means that the caller decides inside a transaction and holds no claim.
    """
    entry = entry or EMPTY
    # The order matters: a stale change is acked even while the key is busy, paused or limited.
    return (
        _against_mark(entry, header, now, policy)
        or _against_holder(entry, header, now, terms, policy)
        or _against_attempts(entry, header, now, policy)
        or _against_rate(entry, now, policy)
        or _against_company(entry, terms)
    )


def decide_under(
    controls: Controls,
    entry: Entry | None,
    header: ChangeHeader,
    now: float,
    policy: LedgerPolicy,
    terms: LeaseTerms | None = None,
) -> Refusal | None:
    """Decide as `decide` does, under the controls: in the key's era, and neither paused nor during a swap."""
    refusal = decide(entry, current(header, entry, controls), now, policy, terms)
    if refusal is None and controls.move is not None and (terms is None or terms.move_token != controls.move.token):
        return Refusal(RefusalReason.PAUSED, MOVE_LOOK_S)
    if refusal is None and controls.pauses and not (terms is not None and terms.despite_pause):
        return Refusal(RefusalReason.PAUSED, PAUSE_LOOK_S) if controls.pauses_key(header.key) else None
    if refusal is not None and refusal.mark is not None and header.order is not None and header.order[0] == 0:
        # The caller compares the mark with other waiting changes, whose orders have era 0, as they came from upstream.
        return replace(refusal, mark=(0, *refusal.mark[1:]))
    return refusal


def current(header: ChangeHeader, entry: Entry | None, controls: Controls) -> ChangeHeader:
    """Return the header at the order that its key takes it at now: in the key's era, and not below work in parts.

    Work in parts reads its content under the claim, so an older change would write the same as the newer one that was
    begun. It continues there: at its own order, a sink that compares versions would hold two contents of one version.
    A restart is such a newer order too, of which only the entry knows: its message continues it after a crash.
    """
    header = in_era(header, entry, controls)
    if entry is None or entry.advanced is None or header.order is None or header.order >= entry.advanced:
        return header
    is_stale = entry.mark is not None and header.order <= entry.mark
    if is_stale or is_unversioned(header.order) != is_unversioned(entry.advanced):
        return header
    return _at(header, entry.advanced)


def in_era(header: ChangeHeader, entry: Entry | None, controls: Controls) -> ChangeHeader:
    """Return the header in the current era of its key.

    Upstream knows nothing of eras, so an order with era 0 belongs to the current one.
    """
    if header.order is None or header.order[0] != 0:
        return header
    era = era_of(entry or EMPTY, controls)
    return header if era == 0 else _at(header, (era, *header.order[1:]))


def era_of(entry: Entry, controls: Controls) -> int:
    """Return the era that new changes of a key belong to."""
    return max(controls.era, entry.era, entry.mark[0] if entry.mark is not None else 0)


def grant(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    """Give the key to a claim that `decide` allowed; return the new entry and the claim.

    The header is in the key's era. An expired lease is taken over, and with it the previous holder's unknown write.
    """
    entry = charged(entry or EMPTY, now, policy)
    entry = _without_passed_unknown(_without_dead_holder(entry, policy, now), header, now)
    took_over, level = entry.token != 0, level_of(entry, terms)
    died_alone = took_over and _died(entry, terms) and entry.deaths is Level.ALONE
    # Count a crash only if the previous holder died at work with nothing beside it: any other death may have
    # another cause, or may be the fault of another change in the same process. Nor does the death of a repair count
    # while the counters belong to a change.
    is_crash = died_alone and entry.phase is Phase.BEGUN and not _was_repair_of_tried(entry, policy)
    if died_alone and entry.phase is Phase.ACCOMPANIED:
        # It may have killed its worker so late that it was not alone any more: next time it is alone for longer.
        entry = replace(entry, late_deaths=entry.late_deaths + 1)
    if header.order is None and entry.tried is not None and now >= entry.tried_at + policy.redelivery_s:
        # The message of the tried change can no longer arrive, so the counters go to this repair from now on:
        # a repair that crashes its worker must reach the crash limit too.
        entry = replace(entry, tried=None, tried_at=0.0, attempts=0, crashes=0, not_before=0.0)
    elif header.order is not None and header.order != entry.tried:
        # Attempts and crashes are counted per order: another change starts at zero.
        entry = replace(entry, tried=header.order, attempts=0, crashes=0, not_before=0.0)
    elif is_crash and (header.order is None or header.order == entry.tried):
        # Both are None for a repair that follows a repair. A swap takes the key over for a moment, and keeps the count.
        entry = replace(entry, crashes=entry.crashes + 1)
    if entry.advanced is not None and header.order is not None and header.order != entry.advanced:
        # What this claim writes lies over the parts of the other order, so that order must not be resumed either.
        entry = replace(entry, position=None, advanced=header.order)
    entry = replace(
        entry,
        token=token,
        owner=terms.owner,
        lease_until=now + terms.lease_s,
        abandoned=False,
        # A worker that dies before it has noted the beginning has run no user code for this claim.
        phase=Phase.CLAIMED,
        deaths=level,
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
        level=level,
        late_deaths=entry.late_deaths,
        position=entry.position if header.order is not None else None,
        extent=entry.extent,
    )
    return entry, claim


def level_of(entry: Entry, terms: LeaseTerms) -> Level:
    """Return the level at which a key is granted to these terms: one more than before if its holder died at work.

    The first death counts even if no work had begun, because a claim at the usual level does not note its beginning.
    """
    if entry.token == 0 or not _died(entry, terms) or entry.deaths is Level.ALONE:
        return entry.deaths
    is_raised = entry.deaths is Level.USUAL or entry.phase is not Phase.CLAIMED
    return Level(entry.deaths + is_raised)


def renew(entry: Entry | None, claim: Claim, now: float, lease_s: float, phase: Phase = Phase.CLAIMED) -> Entry | None:
    """Extend the lease of a claim, and note how far its holder has come; None if it is lost or was abandoned."""
    if entry is None or entry.token != claim.token or entry.abandoned:
        return None
    return replace(entry, lease_until=now + lease_s, phase=max(entry.phase, phase))


def advance(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    """Keep the position of a claim; None if the claim is lost or was abandoned, or if the place is behind the kept one.

    With `is_repeatable=False`, a place that is already kept is refused as well.
    """
    claim, order, place = advance.claim, advance.order, advance.position.place
    assert order is not None and claim.order is not None, "an exclusion has no order to advance"
    if entry is None or entry.token != claim.token or entry.abandoned:
        return None
    if entry.advanced is not None and order < entry.advanced:
        return None  # A call from before a restart arrives late.
    if entry.advanced is not None and order > entry.advanced:
        entry = replace(entry, position=None)
    kept_place = entry.position.place if entry.position is not None else -1
    if place < kept_place + (not is_repeatable):
        return None
    if advance.restart is not None:
        # The same change goes on at a higher order, so its attempts and crashes stay.
        entry = replace(entry, tried=order, intent=order if entry.intent is not None else None)
    entry = replace(
        entry,
        position=advance.position,
        advanced=order,
        extent=max(entry.extent, advance.extent),
        updated_at=now,
        # While an object is read for hours, its message is not delivered again: the wait for it starts here.
        tried_at=now,
    )
    if place <= max(kept_place, 0):
        # A repetition, or a reservation before the first part, is no progress. If it counted, a change that kills its
        # worker in the next part would never become a dead letter.
        return entry
    return replace(entry, attempts=0, crashes=0, not_before=0.0, deaths=Level.USUAL, late_deaths=0)


def commit(entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy) -> tuple[Entry | None, CommitResult]:
    """Raise the mark if the claim still holds the key and its order is above the mark.

    A refused commit makes the key suspect: its write is in the sink, and another holder may have written before it.
    """
    claim = commit.claim
    assert claim.order is not None, "an exclusion has nothing to commit"
    mine = entry is not None and entry.token == claim.token
    mark = entry.mark if entry else None
    if entry and mine and (mark is None or claim.order > mark):
        if commit.repairs and entry.suspicions == claim.suspicions:
            entry = replace(entry, suspicions=0, suspected_at=0.0)
        entry = replace(_marked(entry, claim.order, claim.deleted, now), note=commit.note)
        return entry if commit.extent is None else replace(entry, extent=commit.extent), CommitResult.COMMITTED
    if entry and mark == claim.order and not commit.overdue:
        # An earlier commit of this claim arrived, and its answer was lost. An overdue claim has no such excuse:
        # its write may have landed after the write of the worker that raised the mark.
        return (_without_position(_idle(entry)) if mine else entry), CommitResult.ALREADY
    return _suspected(entry, policy, now), CommitResult.REFUSED


def mark(entry: Entry | None, header: ChangeHeader, now: float) -> Entry:
    """Raise the mark in the transaction that also holds the effect. The caller has used `decide` in the same one."""
    assert header.order is not None, "only an order can be marked"
    return _marked(entry or EMPTY, header.order, header.deleted, now)


def charged(entry: Entry, now: float, policy: LedgerPolicy) -> Entry:
    """Charge one dispatch to the key's rate limit; a dispatch counts even if it fails later."""
    if policy.rate is None:
        return entry
    return replace(entry, rate_at=max(entry.rate_at, now) + policy.rate.interval_s)


def fail(entry: Entry | None, failure: Failure, now: float, policy: LedgerPolicy) -> Entry | None:
    """Count a failed attempt and end the claim. A repeated report of the same failure does nothing.

    A holder that lost its key while it was writing makes the key suspect.
    """
    claim, certainty = failure.claim, failure.certainty
    if entry is None or entry.token != claim.token:
        # The key has another holder by now, and this write may land after that holder's write.
        late = failure.overdue and certainty is not Certainty.CLEAN
        return _suspected(entry, policy, now) if late else entry
    if entry.abandoned:
        return entry
    if claim.order is not None and failure.counts_attempt:
        not_before = now + failure.retry_s
        entry = replace(entry, attempts=entry.attempts + 1, not_before=not_before, tried_at=now, updated_at=now)
    if certainty is Certainty.UNKNOWN:
        # The call may still take effect: no other worker may have the key before the lease expires.
        return replace(entry, abandoned=True)
    if certainty is Certainty.ENDED:
        # It may be in the sink already: older changes wait until this order is settled.
        entry = _with_unknown(entry, entry.intent, now + policy.redelivery_s)
    return _free(entry)


def fail_unclaimed(entry: Entry | None, header: ChangeHeader, now: float) -> Entry:
    """Count a failed attempt in a transaction that holds no claim. An expired claim of another holder ends with it."""
    entry = _free(entry or EMPTY)
    attempts = entry.attempts if entry.tried == header.order else 0
    tries = replace(entry, tried=header.order, attempts=attempts + 1, tried_at=now)
    return replace(tries, crashes=0, not_before=0.0, updated_at=now)


def release(entry: Entry | None, claim: Claim) -> Entry | None:
    """End a claim under which nothing was written. It costs no attempt."""
    if entry is None or entry.token != claim.token:
        return entry
    return kept(_free(entry))


def dead_letter(
    entry: Entry | None, claim: Claim, certainty: Certainty, now: float, policy: LedgerPolicy
) -> Entry | None:
    """End a claim whose change becomes a dead letter. Older changes of the key may be claimed again.

    The position stays: if the letter is replayed before another change of the key is claimed, the work resumes.
    """
    assert entry is not None and entry.token == claim.token, "only its holder may dead-letter a change"
    if certainty is not Certainty.CLEAN:
        entry = _with_unknown(entry, entry.intent, now)
    entry = _idle(entry)
    if entry.unknown is not None and claim.order is not None and entry.unknown <= claim.order:
        # The dead-lettered change may be in the sink all the same.
        entry = replace(_suspected(entry, policy, now) or entry, unknown=None, unknown_until=0.0)
    return kept(entry)


def dead_letter_unclaimed(entry: Entry | None) -> Entry | None:
    """Dead-letter a change in a transaction that holds no claim: the entry forgets its attempts."""
    return kept(_idle(entry)) if entry is not None else None


def finish_repair(entry: Entry | None, claim: Claim, written: ChangeHeader | None, now: float) -> Entry | None:
    """End a repair: clear the suspicion unless it has grown meanwhile; raise the mark if newer state was written."""
    if entry is None or entry.token != claim.token:
        return entry
    if now >= entry.unknown_until:
        entry = replace(entry, unknown=None, unknown_until=0.0)
    calm = entry.suspicions == claim.suspicions
    entry = replace(entry, suspicions=0 if calm else entry.suspicions, suspected_at=0.0 if calm else entry.suspected_at)
    if written and written.order and (entry.mark is None or written.order > entry.mark):
        return _marked(entry, written.order, written.deleted, now)
    if written and written.order == entry.mark and written.deleted:
        # The source of truth says that the key is gone: the mark becomes a tombstone.
        entry = replace(entry, deleted=True)
    if written is not None:
        # The whole state lies over the parts of an order that was under way.
        entry = _without_position(entry)
    if entry.tried is None:
        # The repair has run to its end, so it is not to blame for the deaths before it. While a tried change waits,
        # that change may be: it keeps its level.
        entry = replace(entry, deaths=Level.USUAL, late_deaths=0, crashes=0)
    return kept(_free(entry))


def mark_suspect(entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Entry | None:
    """Record a write without a claim: the key becomes suspect, and older changes wait as behind any uncommitted write.

    It does nothing for a sink that itself refuses older versions. The header is in the key's era.
    """
    if not policy.intents:
        return entry
    marked = _without_position(_suspected(entry, policy, now) or EMPTY)
    if header.order is None:
        return marked
    if marked.tried is not None and header.order >= marked.tried:
        # The change that the last holder tried was superseded without a claim, and its message was acked.
        # No retry will arrive to settle that attempt, so the claim must not wait for one: free the key, or,
        # while the lease still runs, mark it as abandoned so that the takeover blames no worker.
        marked = _free(marked) if now >= marked.lease_until else replace(marked, abandoned=True)
    if marked.mark is not None and header.order <= marked.mark:
        return marked
    return _with_unknown(marked, header.order, now + policy.redelivery_s)


def reset(entry: Entry | None, claim: Claim, controls: Controls) -> Entry | None:
    """Raise the era of a claimed key, so that the next change is newer than all before it. The mark stays.

    None if the claim is lost.
    """
    if entry is None or entry.token != claim.token:
        return None
    return replace(_without_position(_idle(entry)), era=era_of(entry, controls) + 1)


def suspect_since(entry: Entry, policy: LedgerPolicy) -> float | None:
    """Return since when, or from when on, the key is suspect and should be repaired; None if it is not.

    A write of unknown outcome makes its key suspect once its message can no longer arrive to settle it.
    """
    if entry.suspicions:
        return entry.suspected_at
    if entry.unknown is not None:
        return entry.unknown_until
    if entry.token and entry.intent is not None:
        return entry.lease_until + policy.redelivery_s
    return None


def is_prunable(entry: Entry, now: float, retention_s: float, policy: LedgerPolicy) -> bool:
    """Whether the key is idle and no delivery of an older version can still be accepted.

    An older version may be sent some time after a newer one was committed. The entry must outlive that message:
    therefore the longest redelivery delay is added to the retention.
    An extent is no history: it says what has to be deleted from the sink later, so its entry stays.
    """
    busy = entry.token != 0 or entry.unknown is not None or entry.suspicions > 0 or entry.extent > 0
    return not busy and entry.updated_at < now - retention_s - policy.redelivery_s


def is_known(entry: Entry) -> bool:
    """Whether an entry holds more than the state of its rate limit."""
    return entry.mark is not None or not entry.is_idle


def kept(entry: Entry | None) -> Entry | None:
    """Return the entry, or None if it holds nothing that is worth storing."""
    if entry is None:
        return None
    return entry if replace(entry, updated_at=0.0, not_before=0.0, tried=None, tried_at=0.0) != EMPTY else None


def _at(header: ChangeHeader, order: Order) -> ChangeHeader:
    return ChangeHeader(header.key, order, header.deleted, header.sent_at, header.is_row)


def _against_mark(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    mark, order = entry.mark, header.order
    if order is None:
        return None
    if mark is None:
        # The age is checked in the same step as the entry: an earlier check could pass before the key is pruned.
        late = policy.retention_s is not None and header.sent_at < now - policy.retention_s
        # A change that was tried before passed this check then, and may be in the sink by now, or a part of it.
        return Refusal(RefusalReason.FORGOTTEN) if late and order not in (entry.tried, entry.advanced) else None
    if is_unversioned(mark) != is_unversioned(order) and mark[0] == order[0]:
        return Refusal(RefusalReason.MIXED, mark=mark)
    if order == mark:
        return Refusal(RefusalReason.DUPLICATE, mark=mark)
    if order < mark:
        return Refusal(RefusalReason.STALE, mark=mark)
    # An operator has removed the key, and the origin still has its row: only a newer version brings the key back.
    is_removed = header.is_row and entry.deleted and is_same_version(order, mark)
    return Refusal(RefusalReason.REMOVED, mark=mark) if is_removed else None


def _against_rate(entry: Entry, now: float, policy: LedgerPolicy) -> Refusal | None:
    if policy.rate is None:
        return None
    wait_s = entry.rate_at - policy.rate.burst_s - now
    return Refusal(RefusalReason.LIMITED, wait_s) if wait_s > 0 else None


def _against_holder(
    entry: Entry, header: ChangeHeader, now: float, terms: LeaseTerms | None, policy: LedgerPolicy
) -> Refusal | None:
    if entry.token != 0 and now < entry.lease_until:
        return Refusal(RefusalReason.BUSY, entry.lease_until - now)
    # A caller without terms runs no user code, so it cannot have crashed a worker, and takes an expired lease over.
    # So does a swap: its exclusion only makes sure that the dead holder commits no more.
    is_swap = terms is not None and terms.move_token != 0 and header.order is None
    is_dead = terms is not None and not is_swap and entry.token != 0 and _died(entry, terms)
    if is_dead and entry.tried is not None and (header.order is None or header.order < entry.tried):
        # Do not alternate between two changes, or a change and a repair, that crash their worker: each switch
        # would reset the crash counter, and neither would ever be dead-lettered.
        wait_s = entry.lease_until + policy.redelivery_s - now
        return Refusal(RefusalReason.DEFERRED, wait_s) if wait_s > 0 else None
    return None


def _against_company(entry: Entry, terms: LeaseTerms | None) -> Refusal | None:
    if terms is None or terms.level >= (level := level_of(entry, terms)):
        return None
    return Refusal(RefusalReason.PROBATION, level=level)


def _against_attempts(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    if header.order is None:
        return None
    if entry.token != 0:
        # The expired holder may have written its intent.
        entry = _with_unknown(entry, entry.intent, entry.lease_until + policy.redelivery_s)
    if entry.unknown is not None and header.order < entry.unknown and now < entry.unknown_until:
        return Refusal(RefusalReason.DEFERRED, entry.unknown_until - now)
    if entry.tried is not None and header.order <= entry.tried and now < entry.not_before:
        return Refusal(RefusalReason.BUSY, entry.not_before - now)
    has_failed = entry.attempts > 0 or entry.deaths >= Level.SOLE
    if entry.tried is not None and has_failed and header.order < entry.tried:
        # Do not alternate between two changes that fail: each switch would reset the attempts of the other. Nor
        # between two when workers died on probation with the newer one: a commit of the older one would reset the
        # level. After the first death the newer one is most likely innocent, so the older one need not wait.
        wait_s = entry.tried_at + policy.redelivery_s - now
        return Refusal(RefusalReason.DEFERRED, wait_s) if wait_s > 0 else None
    return None


def _died(entry: Entry, terms: LeaseTerms) -> bool:
    """Whether the holder of an expired lease has died.

    It is alive if it abandoned the claim explicitly, or if it is the one that claims now: then the answer to its
    first claim was lost.
    """
    return not entry.abandoned and entry.owner != terms.owner


def _was_repair_of_tried(entry: Entry, policy: LedgerPolicy) -> bool:
    """Whether the holder is a repair, while the counters belong to a change. Only keys with intents are repaired."""
    return policy.intents and entry.intent is None and entry.tried is not None


def _without_dead_holder(entry: Entry, policy: LedgerPolicy, now: float) -> Entry:
    """Return the entry as a takeover inherits it: suspect, and with the unknown write of the previous holder."""
    if entry.token == 0:
        return entry
    entry = _suspected(entry, policy, now) or entry
    return _with_unknown(entry, entry.intent, entry.lease_until + policy.redelivery_s)


def _without_passed_unknown(entry: Entry, header: ChangeHeader, now: float) -> Entry:
    """Drop an unknown write whose message can no longer arrive, so that no key waits for ever; it becomes suspect.

    A change at or above the unknown write settles it by its own commit, so then it stays.
    """
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
    entry = replace(_idle(entry), mark=order, deleted=deleted, updated_at=now, position=None, advanced=None)
    if entry.unknown is not None and entry.unknown <= order:
        entry = replace(entry, unknown=None, unknown_until=0.0)
    return replace(entry, era=0) if order[0] >= entry.era else entry


def _suspected(entry: Entry | None, policy: LedgerPolicy, now: float) -> Entry | None:
    if not policy.intents:
        return entry
    entry = entry or EMPTY
    return replace(entry, suspicions=entry.suspicions + 1, suspected_at=now, updated_at=now)


def _free(entry: Entry) -> Entry:
    return replace(entry, token=0, owner="", lease_until=0.0, abandoned=False, phase=Phase.CLAIMED, intent=None)


def _without_position(entry: Entry) -> Entry:
    return replace(entry, position=None, advanced=None) if entry.advanced is not None else entry


def _idle(entry: Entry) -> Entry:
    return replace(
        _free(entry),
        deaths=Level.USUAL,
        late_deaths=0,
        tried=None,
        tried_at=0.0,
        attempts=0,
        crashes=0,
        not_before=0.0,
    )
