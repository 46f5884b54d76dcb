"""How a claim ends: commit, failure, release, dead letter, repair; and what an entry remembers afterwards."""

import pytest

from core.one_key import LEASE_S, PLAIN, REDELIVERY_S, SAFE, OneKey, committed
from keywise.core import rules
from keywise.core.change import order_of
from keywise.core.entry import Certainty, Claim, CommitResult, Entry, Level, Refusal, RefusalReason
from keywise.core.ledger import Failure

CERTAINTIES = list(Certainty)


def test_a_commit_raises_the_mark_and_leaves_an_idle_entry():
    """Rule 3: the mark is raised by commit only."""
    key = OneKey()
    claim = key.take(5)
    assert key.entry.mark is None
    key.wait(1)
    assert CommitResult.COMMITTED is key.commit(claim)
    assert Entry(mark=order_of(5), updated_at=key.now) == key.entry


def test_a_commit_may_be_repeated_after_a_lost_answer():
    """Rule 12: the mark is at this order, so it was committed."""
    key = OneKey()
    claim = key.take(5)
    key.commit(claim)
    before = key.entry
    key.wait(1)
    assert CommitResult.ALREADY is key.commit(claim)
    assert before == key.entry


def test_a_repeated_commit_does_not_end_the_claim_of_the_next_holder():
    """Rule 9: commit acts only where the token is its own."""
    key = OneKey()
    first = key.take(5)
    key.commit(first)
    second = key.take(6, "w2")
    assert CommitResult.ALREADY is key.commit(first)
    assert second.token == key.entry.token


def test_a_commit_with_a_token_of_the_past_is_refused():
    """Rule 9: the key is somebody else's, and the mark stays."""
    key = OneKey()
    first = key.take(5, "w1")
    key.expire()
    second = key.take(5, "w2", level=Level.ALONE)
    assert CommitResult.REFUSED is key.commit(first)
    assert (None, second.token) == (key.entry.mark, key.entry.token)
    assert CommitResult.COMMITTED is key.commit(second)


def test_a_refused_commit_makes_the_key_suspect_only_where_an_intent_is_on():
    """Rule 6: what was written under it may lie over something newer."""
    for policy, suspect in ((PLAIN, 1), (SAFE, 0)):
        key = committed(7, policy)
        stranger = Claim("a", order_of(5), False, token=99)
        assert CommitResult.REFUSED is key.commit(stranger)
        assert suspect == key.suspicions
        assert order_of(7) == key.entry.mark


def test_a_refused_commit_of_a_forgotten_key_leaves_a_suspect():
    """Rule 6: even if the entry is gone, the write may be there."""
    key = OneKey()
    assert CommitResult.REFUSED is key.commit(Claim("a", order_of(5), False, token=99))
    assert Entry(suspicions=1, suspected_at=key.now, updated_at=key.now) == key.entry
    safe = OneKey(SAFE)
    assert CommitResult.REFUSED is safe.commit(Claim("a", order_of(5), False, token=99))
    assert safe.entry is None


def test_a_commit_after_the_own_deadline_is_not_taken_for_a_repeated_one():
    """Rule 7: somebody else may have committed the same order, and the late write came after it."""
    key = OneKey()
    first = key.take(5, "w1")
    key.expire()
    key.commit(key.take(5, "w2", level=Level.ALONE))
    before = key.suspicions
    assert CommitResult.REFUSED is key.commit(first, overdue=True)
    assert before + 1 == key.suspicions


def test_a_commit_at_the_mark_under_the_own_token_frees_the_key():
    """Rule 12: nothing is left to do under such a claim."""
    key = committed(5)
    mine = Claim("a", order_of(5), False, token=7)
    key.entry = Entry(mark=order_of(5), token=7, lease_until=key.now + 5)
    assert CommitResult.ALREADY is key.commit(mine)
    assert key.entry.token == 0


def test_a_commit_below_the_mark_is_refused_though_the_token_is_its_own():
    """Rule 3: a mark never moves backwards."""
    key = OneKey(entry=Entry(mark=order_of(9), token=7, lease_until=2000.0))
    assert CommitResult.REFUSED is key.commit(Claim("a", order_of(5), False, token=7))
    assert order_of(9) == key.entry.mark


def test_a_renewal_extends_the_lease_of_its_own_token_only():
    """Rule 9: a stranger's renewal changes nothing."""
    key = OneKey()
    claim = key.take(5)
    key.wait(LEASE_S - 1)
    assert key.renew(claim)
    assert key.now + LEASE_S == key.entry.lease_until
    assert not key.renew(Claim("a", order_of(5), False, token=99))
    assert rules.renew(None, claim, key.now, LEASE_S) is None


def test_a_holder_that_nobody_replaced_may_renew_after_its_lease():
    """Rule 8: the store judges, and as long as nobody took the key it is the holder's."""
    key = OneKey()
    claim = key.take(5)
    key.wait(LEASE_S * 2)
    assert key.renew(claim)
    assert RefusalReason.BUSY is key.ask(5, "w2").reason


def test_an_abandoned_claim_is_not_renewed():
    """Rule 6: its lease has to run out by itself."""
    key = OneKey()
    claim = key.take(5)
    key.fail(claim, Certainty.UNKNOWN)
    assert not key.renew(claim)


def test_a_clean_failure_counts_an_attempt_and_frees_the_key():
    """Rule 10: attempts are counted per key and order, in the ledger."""
    key = OneKey()
    for attempts in range(3):
        claim = key.take(5)
        assert attempts == claim.attempts
        key.fail(claim, Certainty.CLEAN, retry_s=0)
    assert (key.entry.token, key.entry.intent, key.entry.unknown, key.entry.attempts) == (0, None, None, 3)


def test_a_failure_that_may_have_written_defers_what_is_older():
    """Rule 6: nothing older may follow, since the newer write may be visible."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    assert Refusal(RefusalReason.DEFERRED, REDELIVERY_S) == key.ask(4)
    assert isinstance(key.ask(5), Claim)


def test_what_is_older_goes_on_once_the_unknown_write_is_committed():
    """Rule 6: something at or above it resolves it."""
    for version in (5, 6):
        key = OneKey()
        key.fail(key.take(5), Certainty.ENDED, retry_s=0)
        key.commit(key.take(version))
        assert key.entry.unknown is None
        assert RefusalReason.STALE is key.ask(4).reason


def test_an_unknown_write_outlives_a_commit_below_it():
    """Rule 6: only something at or above it resolves it."""
    key = OneKey(entry=Entry(token=7, lease_until=2000.0, unknown=order_of(9), unknown_until=5000.0))
    assert CommitResult.COMMITTED is key.commit(Claim("a", order_of(5), False, token=7))
    assert order_of(9) == key.entry.unknown


def test_an_unknown_write_is_dropped_when_its_message_can_no_longer_arrive():
    """Rule 19: no key waits for ever, but it is suspect from then on."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    key.wait(REDELIVERY_S)
    claim = key.take(4)
    assert (claim.suspicions, key.entry.unknown) == (1, None)
    assert key.now == key.entry.suspected_at


def test_a_failure_of_unknown_outcome_leaves_the_lease_to_run_out():
    """Rule 6: the call may still land, so nobody may follow before."""
    key = OneKey()
    claim = key.take(5)
    key.fail(claim, Certainty.UNKNOWN, retry_s=0)
    assert RefusalReason.BUSY is key.ask(6, "w2").reason
    key.expire()
    assert RefusalReason.DEFERRED is key.ask(4, "w2").reason
    assert key.take(5, "w2").attempts == 1


def test_a_takeover_inherits_the_unknown_write_even_if_its_own_try_fails_cleanly():
    """Rule 6: the first holder's write may be visible, whatever the second one knows of its own."""
    for end in (lambda key, claim: key.fail(claim, Certainty.CLEAN, retry_s=0), lambda key, claim: key.release(claim)):
        key = OneKey()
        key.take(5, "w1")
        key.expire()
        end(key, key.take(5, "w2", level=Level.ALONE))
        assert RefusalReason.DEFERRED is key.ask(4, "w3").reason


def test_a_holder_that_lost_its_answer_does_not_write_something_older_next():
    """Rule 6: it may have written under the claim that it does not know of."""
    key = OneKey()
    key.take(5, "w1")
    key.expire()
    assert Refusal(RefusalReason.DEFERRED, REDELIVERY_S) == key.ask(4, "w1")


def test_a_takeover_by_an_exclusion_inherits_the_unknown_write_too():
    """Rule 6: a repair that writes nothing resolves nothing."""
    key = OneKey()
    key.fail(key.take(5, "w1"), Certainty.UNKNOWN)
    key.expire()
    key.release(key.exclude("w2"))
    assert RefusalReason.DEFERRED is key.ask(4, "w3").reason


def test_a_newer_takeover_keeps_the_higher_of_two_unknown_writes():
    """Rule 6: an older claim can take nothing back from the newest that may be visible."""
    key = OneKey()
    key.take(5, "w1")
    key.expire()
    key.fail(key.take(7, "w2", level=Level.ALONE), Certainty.ENDED, retry_s=0)
    assert order_of(7) == key.entry.unknown
    assert RefusalReason.DEFERRED is key.ask(6).reason


def test_a_lower_unknown_write_does_not_replace_a_higher_one():
    """Rule 6: the newest that may be visible is what everything older waits for."""
    held = {"token": 7, "lease_until": 2000.0, "intent": order_of(5)}
    key = OneKey(entry=Entry(**held, unknown=order_of(9), unknown_until=5000.0))
    key.fail(Claim("a", order_of(5), False, token=7), Certainty.ENDED, retry_s=0)
    assert (key.entry.unknown, key.entry.unknown_until) == (order_of(9), 5000.0)


@pytest.mark.parametrize("certainty", CERTAINTIES)
def test_a_failure_of_unknown_outcome_that_is_told_twice_counts_once(certainty: Certainty):
    """Rule 10: the answer to the first report may have been lost."""
    key = OneKey()
    claim = key.take(5)
    key.fail(claim, Certainty.UNKNOWN)
    before = key.entry
    key.wait(1)
    key.fail(claim, certainty)
    assert before == key.entry


@pytest.mark.parametrize("certainty", CERTAINTIES)
def test_a_failure_reported_with_a_token_of_the_past_changes_nothing(certainty: Certainty):
    """Rule 9: the key is somebody else's."""
    key = OneKey()
    first = key.take(5, "w1")
    key.expire()
    key.take(5, "w2", level=Level.ALONE)
    before = key.entry
    key.fail(first, certainty)
    key.release(first)
    key.finish_repair(first, None)
    assert before == key.entry
    assert rules.fail(None, Failure(first, certainty, 1.0), key.now, PLAIN) is None


def test_a_release_costs_nothing_and_leaves_nothing():
    """Rule 18: a drained worker costs nothing."""
    key = OneKey()
    key.release(key.take(5))
    assert key.entry is None
    assert rules.release(None, Claim("a", order_of(5), False, token=1)) is None


def test_a_release_keeps_the_attempts_that_were_counted_before():
    """Rule 10: giving back a retry does not make it the first try."""
    key = OneKey()
    key.fail(key.take(5), Certainty.CLEAN, retry_s=0)
    key.release(key.take(5))
    assert key.take(5).attempts == 1


def test_a_burial_makes_older_changes_eligible_again():
    """Rule 4: if the survivor is poison, the next newest has its turn."""
    key = OneKey()
    key.fail(key.take(5), Certainty.CLEAN, retry_s=0)
    key.dead_letter(key.take(5))
    assert key.entry is None
    assert key.take(4).attempts == 0


@pytest.mark.parametrize("certainty", [Certainty.ENDED, Certainty.UNKNOWN])
def test_a_burial_after_a_possible_write_leaves_a_suspect_and_no_one_waits(certainty: Certainty):
    """Rule 19: the buried change may be in the sink all the same."""
    key = OneKey()
    key.dead_letter(key.take(5), certainty)
    assert (key.suspicions, key.entry.unknown) == (1, None)
    assert isinstance(key.ask(4), Claim)


def test_a_burial_resolves_an_inherited_unknown_write_at_or_below_it():
    """Rule 6: something at or above it was buried."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    key.dead_letter(key.take(5))
    assert (key.suspicions, key.entry.unknown) == (1, None)


def test_a_burial_keeps_an_unknown_write_above_it():
    """Rule 6: a buried older change says nothing about the newer one."""
    key = OneKey(entry=Entry(token=7, lease_until=2000.0, unknown=order_of(9), unknown_until=5000.0))
    key.dead_letter(Claim("a", order_of(5), False, token=7))
    assert (0, order_of(9)) == (key.suspicions, key.entry.unknown)


def test_a_burial_needs_the_token():
    """Rule 9: only its holder may dead-letter a change."""
    key = OneKey()
    key.take(5)
    with pytest.raises(AssertionError, match="only its holder"):
        key.dead_letter(Claim("a", order_of(5), False, token=99))


def test_a_burial_keeps_the_mark():
    """Rule 3: what was committed before stays committed."""
    key = committed(5)
    key.dead_letter(key.take(6))
    assert Entry(mark=order_of(5), updated_at=key.now) == key.entry


def test_failures_without_a_claim_are_counted_per_order():
    """Rule 10: a transaction that takes no claim counts too."""
    key = OneKey(SAFE)
    assert [key.fail_unclaimed(5), key.fail_unclaimed(5), key.fail_unclaimed(6)] == [1, 2, 1]
    assert key.transact(6) is None


def test_a_burial_without_a_claim_forgets_the_tries():
    """Rule 13: the change is a dead letter now, and a replay begins afresh."""
    key = OneKey(SAFE)
    key.fail_unclaimed(5)
    assert rules.dead_letter_unclaimed(key.entry) is None
    assert rules.dead_letter_unclaimed(None) is None
    marked = committed(4, SAFE)
    marked.fail_unclaimed(5)
    assert Entry(mark=order_of(4), updated_at=marked.now) == rules.dead_letter_unclaimed(marked.entry)


def test_a_try_that_was_cut_off_costs_no_attempt_and_is_not_forgotten():
    """Rule 22: what was written may still land; if somebody else has the key by then, it is suspect."""
    key = OneKey()
    claim = key.take(5)
    key.fail(claim, Certainty.UNKNOWN, overdue=True, counts_attempt=False)
    assert (key.entry.attempts, key.entry.abandoned) == (0, True)
    key.expire()
    later = key.take(5, "w2", level=Level.ALONE)
    key.commit(later)
    before = key.entry.suspicions
    key.fail(claim, Certainty.UNKNOWN, overdue=True, counts_attempt=False)
    assert key.entry.suspicions == before + 1


def test_a_key_that_was_tried_is_known_even_if_nothing_counts():
    """Stores keep such an entry as one with something going on, so that prune and the list of keys count it."""
    key = OneKey(SAFE)
    key.fail(key.take(5), Certainty.ENDED, counts_attempt=False)
    assert rules.is_known(key.entry)
    assert not rules.is_known(Entry(updated_at=1.0, rate_at=2.0))
