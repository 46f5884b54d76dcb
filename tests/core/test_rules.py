"""What a ledger answers to a claim: the rules that keep newer before older and one holder at a time."""

import pytest

from core.one_key import LEASE_S, PLAIN, REDELIVERY_S, RETENTION_S, SAFE, OneKey, committed
from keywise.core import rules
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Certainty, Claim, CommitResult, Entry, LedgerPolicy, Level, Phase, Refusal, RefusalReason


def test_an_unknown_key_is_granted_with_a_fresh_deadline():
    """Rule 1: check and take are one step, so the entry after a grant has its holder."""
    key = OneKey()
    claim = key.take(5, "w1")
    assert Entry(
        token=claim.token,
        owner="w1",
        lease_until=key.now + LEASE_S,
        intent=order_of(5),
        tried=order_of(5),
        tried_at=key.now,
        updated_at=key.now,
    ) == (key.entry)
    assert (claim.key, claim.order, claim.attempts, claim.crashes) == ("a", order_of(5), 0, 0)


def test_a_second_claim_is_busy_until_the_lease_ends():
    """Rule 1: nobody else gets the key, however new the change is."""
    key = OneKey()
    key.take(5)
    key.wait(4)
    for version in (4, 5, 6):
        assert Refusal(RefusalReason.BUSY, LEASE_S - 4) == key.ask(version, "w2"), version


def test_a_holder_that_asks_twice_is_busy_too():
    """Rule 1: a claim is not re-entrant, since two tasks of one worker would both write."""
    key = OneKey()
    key.take(5, "w1")
    assert RefusalReason.BUSY is key.ask(5, "w1").reason


def test_an_older_version_than_the_mark_is_stale():
    """Rule 3: what is older than the mark is acked, and the mark is told."""
    assert Refusal(RefusalReason.STALE, mark=order_of(5)) == committed(5).ask(4)


def test_the_version_of_the_mark_is_a_duplicate():
    """Rule 12: an equal order is acked."""
    assert Refusal(RefusalReason.DUPLICATE, mark=order_of(5)) == committed(5).ask(5)


def test_a_stale_change_is_told_so_even_while_somebody_holds_the_key():
    """Rule 15: what can end at once does not wait for another change of its key."""
    key = committed(5)
    key.take(7)
    assert RefusalReason.STALE is key.ask(4, "w2").reason
    assert RefusalReason.DUPLICATE is key.ask(5, "w2").reason


def test_a_deletion_of_an_unknown_key_writes_its_tombstone():
    """Rule 11: an older version that arrives after it finds the mark."""
    key = OneKey()
    assert CommitResult.COMMITTED is key.commit(key.take(5, deleted=True))
    assert (order_of(5), True) == (key.entry.mark, key.entry.deleted)
    assert RefusalReason.STALE is key.ask(4).reason


def test_a_newer_version_brings_a_deleted_key_back():
    """Rule 11: a tombstone is a mark like any other."""
    key = committed(5, deleted=True)
    assert CommitResult.COMMITTED is key.commit(key.take(6))
    assert (order_of(6), False) == (key.entry.mark, key.entry.deleted)


def test_a_reindex_compares_the_version_before_the_generation():
    """Rule 16: a reindex writes its version again, but never an older one."""
    key = committed(5)
    assert RefusalReason.STALE is key.ask_for(ChangeHeader("a", (0, 4, 9))).reason
    again = key.ask_for(ChangeHeader("a", (0, 5, 1)))
    assert CommitResult.COMMITTED is key.commit(again)
    assert RefusalReason.STALE is key.ask(5).reason


def test_a_raised_era_goes_before_every_version():
    """Rule 20: numbering that restarts is newer, and the mark does not fall."""
    key = committed(1000)
    claim = key.ask_for(ChangeHeader("a", (1, 1, 0)))
    assert CommitResult.COMMITTED is key.commit(claim)
    assert RefusalReason.STALE is key.ask(2000).reason


def test_an_unversioned_change_counts_once():
    """Rule 21: without a version a change means once per key."""
    key = committed(None)
    assert RefusalReason.DUPLICATE is key.ask(None).reason


@pytest.mark.parametrize(("first", "second"), [(5, None), (None, 5), (0, None), (None, 0), (-5, None), (None, -5)])
def test_versioned_and_unversioned_changes_do_not_mix(first: int | None, second: int | None):
    """Rule 21: nobody can order them, so the later one is set aside."""
    key = committed(first)
    assert Refusal(RefusalReason.MIXED, mark=order_of(first)) == key.ask(second)


def test_a_late_change_of_a_forgotten_key_is_set_aside():
    """Rule 14: nobody can tell whether it is stale."""
    assert Refusal(RefusalReason.FORGOTTEN) == OneKey().ask(5, late=True)


def test_a_change_becomes_late_only_after_the_whole_retention():
    """Rule 14: the moment that counts is when it is judged, not when it was received."""
    key = OneKey()
    header = key.header(5)
    key.wait(RETENTION_S)
    assert isinstance(key.ask_for(header), Claim)
    key.release(Claim("a", order_of(5), False, key.entry.token))
    key.wait(1)
    assert Refusal(RefusalReason.FORGOTTEN) == key.ask_for(header)


def test_a_late_change_that_was_tried_before_goes_on():
    """Rule 14: it was judged when it was in time, and may be in the sink by now."""
    key = OneKey()
    header = key.header(5)
    key.fail(key.ask_for(header), Certainty.ENDED, retry_s=0)
    key.wait(RETENTION_S + 1)
    assert isinstance(key.ask_for(header), Claim)
    assert Refusal(RefusalReason.FORGOTTEN) == OneKey().ask(5, late=True)


def test_nothing_is_late_where_nothing_is_forgotten():
    """Rule 14: without a declared retention no key is pruned, so every change can be judged."""
    key = OneKey(LedgerPolicy(intents=True))
    assert isinstance(key.ask_for(ChangeHeader("a", order_of(5), sent_at=0.0)), Claim)


def test_a_late_change_of_a_known_key_is_judged_by_the_mark():
    """Rule 14: the ledger still remembers, so there is no doubt."""
    key = committed(5)
    assert RefusalReason.STALE is key.ask(4, late=True).reason
    assert isinstance(key.ask(6, late=True), Claim)


def test_an_expired_lease_of_a_dead_holder_is_taken_over_alone_only():
    """Rule 18: a dead owner's change is run again with nothing beside it."""
    key = OneKey()
    key.take(5, "w1")
    key.expire()
    assert Refusal(RefusalReason.PROBATION, level=Level.PROBATION) == key.ask(5, "w2")
    assert key.take(5, "w2", level=Level.ALONE).took_over


def test_a_takeover_has_a_fresh_token_and_a_fresh_deadline():
    """Rules 8 and 9: a third worker cannot steal at once, and the first cannot act any more."""
    key = OneKey()
    first = key.take(5, "w1")
    key.expire()
    second = key.take(5, "w2", level=Level.ALONE)
    assert first.token != second.token
    assert key.now + LEASE_S == key.entry.lease_until
    assert RefusalReason.BUSY is key.ask(5, "w3", level=Level.ALONE).reason
    assert not key.renew(first)


def test_a_holder_whose_answer_was_lost_gets_its_key_again_after_the_lease():
    """Rule 18: whoever asks now is alive, so nobody died and nothing runs alone."""
    key = OneKey()
    key.die(key.take(5, "w1", level=Level.ALONE))
    claim = key.take(5, "w1")
    assert (claim.took_over, claim.crashes) == (True, 0)


def test_an_abandoned_lease_puts_nothing_on_probation():
    """Rule 18: a holder that said it does not know the outcome is alive."""
    key = OneKey()
    key.fail(key.take(5, "w1", level=Level.ALONE), Certainty.UNKNOWN)
    key.expire()
    claim = key.take(5, "w2")
    assert (claim.took_over, claim.crashes) == (True, 0)


def test_only_a_crash_alone_counts():
    """Rule 18: a neighbour may have been the killer."""
    key, seen = OneKey(), []
    claim = key.take(5, "w1")
    for number in range(2, 8):
        key.die(claim)
        claim = key.take(5, f"w{number}", level=Level.ALONE)
        seen.append((claim.level, claim.crashes))
    assert seen == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]


@pytest.mark.parametrize("level", Level)
def test_a_key_is_granted_only_in_the_company_of_its_level(level):
    """Rule 18: also where no worker holds the key, and a takeover at the level that it raises to."""
    key = OneKey(SAFE)
    claim = key.climb(5, level)
    key.release(claim)
    for asked in Level:
        answer = key.ask(5, "w9", level=asked)
        if asked < level:
            assert answer == Refusal(RefusalReason.PROBATION, level=level)
        else:
            assert isinstance(answer, Claim) and answer.level is level
            key.release(answer)
    key.die(key.take(5, "w9", level=Level.ALONE))
    raised = Level(min(level + 1, Level.ALONE))
    assert key.ask(5, "w10", level=Level(raised - 1)) == Refusal(RefusalReason.PROBATION, level=raised)


def test_the_first_death_raises_the_level_begun_or_not_and_later_ones_only_if_begun():
    """Rule 18: what is claimed ahead at the usual level does not note its beginning."""
    key = OneKey()
    key.take(5, "w1")
    key.expire()
    claim = key.take(5, "w2", level=Level.ALONE)
    assert claim.level is Level.PROBATION
    key.expire()
    claim = key.take(5, "w3", level=Level.ALONE)
    assert claim.level is Level.PROBATION
    key.die(claim)
    assert key.take(5, "w4", level=Level.ALONE).level is Level.SOLE


@pytest.mark.parametrize("level", [Level.PROBATION, Level.SOLE, Level.ALONE])
def test_a_level_is_kept_by_a_release_a_failure_and_another_order(level):
    """Rule 18: a deadly document that is edited often would otherwise never climb."""
    key = OneKey(SAFE)
    key.release(key.climb(5, level))
    assert key.entry.deaths is level
    key.fail(key.take(5, "w1", level=level), Certainty.CLEAN, retry_s=0)
    assert key.entry.deaths is level
    claim = key.take(6, "w1", level=level)
    assert (claim.level, claim.crashes) == (level, 0)


def test_a_level_ends_with_a_commit_a_dead_letter_and_a_repair():
    for end in ("commit", "dead_letter"):
        key = OneKey()
        claim = key.climb(5, Level.ALONE)
        key.commit(claim) if end == "commit" else key.dead_letter(claim, Certainty.CLEAN)
        assert key.take(6, "w9").level is Level.USUAL
    key = committed(5)
    key.die(key.exclude("w1"))
    key.finish_repair(key.exclude("w2"), None)
    assert key.entry.deaths is Level.USUAL


def test_a_repair_does_not_end_the_level_of_a_change_that_waits():
    """Rule 18: a repair between its deaths would otherwise keep a killer from climbing."""
    key = OneKey()
    key.release(key.climb(5, Level.ALONE))
    key.finish_repair(key.exclude("w1"), None)
    claim = key.take(5, "w2", level=Level.ALONE)
    assert claim.level is Level.ALONE


def test_a_repair_that_succeeds_ends_its_own_crashes():
    key = committed(5)
    for number in range(5):
        key.die(key.exclude(f"w{number}"))
    claim = key.exclude("w9")
    assert (claim.level, claim.crashes) == (Level.ALONE, 2)
    key.finish_repair(claim, None)
    assert (key.entry.deaths, key.entry.crashes) == (Level.USUAL, 0)


def test_an_older_change_does_not_take_turns_with_one_that_climbs():
    """Rule 18: if its claim is released in between, the deaths would be forgotten by the commit of the older one."""
    key = OneKey(SAFE)
    key.release(key.climb(5, Level.PROBATION))
    assert isinstance(key.ask(4, "w2", level=Level.PROBATION), Claim), "one death says little about the newer one"
    for level in (Level.SOLE, Level.ALONE):
        key = OneKey(SAFE)
        key.release(key.climb(5, level))
        assert RefusalReason.DEFERRED is key.ask(4, "w2", level=Level.ALONE).reason
        assert isinstance(key.ask(6, "w2", level=Level.ALONE), Claim)
        key = OneKey(SAFE)
        key.release(key.climb(5, level))
        key.wait(REDELIVERY_S)
        assert isinstance(key.ask(4, "w2", level=Level.ALONE), Claim)


def test_a_death_beside_others_at_the_highest_level_is_no_crash_but_lengthens_the_time_alone():
    """Rule 18: a slow killer is found too."""
    key = OneKey()
    key.die(key.climb(5, Level.ALONE), Phase.ACCOMPANIED)
    claim = key.take(5, "w8", level=Level.ALONE)
    assert (claim.level, claim.crashes, claim.late_deaths) == (Level.ALONE, 0, 1)
    key.die(claim)
    claim = key.take(5, "w9", level=Level.ALONE)
    assert (claim.crashes, claim.late_deaths) == (1, 1)


def test_a_phase_is_not_taken_back_by_a_renewal():
    key = OneKey()
    claim = key.climb(5, Level.PROBATION)
    key.renew(claim, Phase.BEGUN)
    key.renew(claim)
    assert key.entry.phase is Phase.BEGUN


def test_a_holder_that_died_before_its_work_began_blames_nobody():
    """Rule 18: a worker killed while idle costs nothing; the renewal before dispatch says that work began."""
    key = OneKey()
    key.climb(5, Level.ALONE)
    key.expire()
    assert key.take(5, "w2", level=Level.ALONE).crashes == 0


def test_another_change_starts_with_no_crashes():
    """Rule 18: crashes belong to one change."""
    key = OneKey()
    key.die(key.climb(5, Level.ALONE))
    assert key.take(6, "w2", level=Level.ALONE).crashes == 0


def test_an_older_change_does_not_take_turns_with_one_whose_holder_died():
    """Rule 18: two killers that take turns would never be blamed; rule 19: but nobody waits for ever."""
    key = OneKey(SAFE)
    key.take(5, "w1", level=Level.ALONE)
    key.expire()
    for level in Level:
        assert Refusal(RefusalReason.DEFERRED, REDELIVERY_S) == key.ask(4, "w2", level=level)
    key.wait(REDELIVERY_S)
    assert isinstance(key.ask(4, "w2", level=Level.ALONE), Claim)


def test_a_repair_does_not_take_turns_with_a_change_whose_holder_died():
    """Rule 18: its claim would forget the deaths."""
    key = OneKey()
    key.take(5, "w1", level=Level.ALONE)
    key.expire()
    assert RefusalReason.DEFERRED is key.exclude("w2").reason
    key.wait(REDELIVERY_S)
    assert isinstance(key.exclude("w2"), Claim)


def test_a_repair_that_dies_alone_is_counted():
    """Rule 18: user code that reads the truth may kill its worker too."""
    key = committed(5)
    claim = key.exclude("w1")
    for crashes in (0, 0, 0, 1, 2):
        key.die(claim)
        claim = key.exclude(f"after {claim.token}")
        assert crashes == claim.crashes


def test_the_death_of_a_repair_is_not_blamed_on_a_change_that_waits():
    """Rule 18: only a crash alone with the change itself counts."""
    key = OneKey()
    key.fail(key.take(5), Certainty.CLEAN, retry_s=0)
    key.die(key.exclude("w1"))
    claim = key.take(5, "w9", level=Level.ALONE)
    assert (claim.level, claim.crashes) == (Level.PROBATION, 0)


def test_an_exclusion_waits_for_the_holder_and_for_nothing_else():
    """Rule 10: neither a retry that is not due nor an unknown write concerns it."""
    key = OneKey()
    claim = key.take(5)
    assert RefusalReason.BUSY is key.exclude("w2").reason
    key.fail(claim, Certainty.ENDED, retry_s=50)
    exclusion = key.exclude("w2")
    assert isinstance(exclusion, Claim)
    assert order_of(5) == key.entry.unknown


def test_an_exclusion_keeps_others_out_and_leaves_no_intent():
    """Rule 19: nothing is about to be written at an order, so nothing older has to wait for it afterwards."""
    key = OneKey()
    exclusion = key.exclude()
    assert RefusalReason.BUSY is key.ask(1, "w2").reason
    assert key.entry.intent is None
    key.release(exclusion)
    assert isinstance(key.ask(1, "w2"), Claim)


def test_a_takeover_makes_a_key_suspect_only_where_an_intent_is_on():
    """Rule 19: a sink that refuses older writes cannot be left wrong."""
    for policy, suspect in ((PLAIN, 1), (SAFE, 0)):
        key = OneKey(policy)
        key.take(5, "w1")
        key.expire()
        assert suspect == key.take(5, "w2", level=Level.ALONE).suspicions == key.suspicions


def test_an_intent_is_on_only_where_the_policy_says_so():
    """Rule 19: for other sinks a write of unknown outcome leaves no doubt."""
    for policy, doubt in ((PLAIN, order_of(5)), (SAFE, None)):
        key = OneKey(policy)
        claim = key.take(5)
        assert doubt == key.entry.intent
        key.fail(claim, Certainty.ENDED)
        assert (key.entry.intent, key.entry.unknown) == (None, doubt)


def test_a_retry_is_busy_until_it_is_due_and_so_is_everything_older():
    """Rule 10: back-off is a matter of the key's order, not of who asks."""
    key = OneKey(SAFE)
    key.fail(key.take(5), Certainty.CLEAN, retry_s=30)
    assert Refusal(RefusalReason.BUSY, 30.0) == key.ask(5, "w2")
    assert Refusal(RefusalReason.BUSY, 30.0) == key.ask(4, "w2")
    key.wait(30)
    assert isinstance(key.ask(5, "w2"), Claim)


def test_a_newer_change_does_not_wait_for_the_retry_of_an_older_one():
    """Rule 15: the reason to wait does not concern it."""
    key = OneKey()
    key.fail(key.take(5), Certainty.CLEAN, retry_s=30)
    claim = key.take(6)
    assert claim.attempts == 0


def test_changes_that_fail_do_not_make_each_others_tries_forgotten():
    """Rules 10 and 13: two workers with one poisoned change each would otherwise retry for ever."""
    key, attempts = OneKey(SAFE), {5: [], 6: []}
    for _ in range(5):
        for version in (6, 5):
            answer = key.ask(version)
            if isinstance(answer, Claim):
                attempts[version].append(answer.attempts)
                key.fail(answer, Certainty.CLEAN, retry_s=0)
    assert attempts == {6: [0, 1, 2, 3, 4], 5: []}
    assert RefusalReason.DEFERRED is key.ask(5).reason


def test_an_older_change_has_its_turn_once_the_failing_newer_one_can_no_longer_arrive():
    """Rule 19: no key waits for ever."""
    key = OneKey(SAFE)
    key.fail(key.take(6), Certainty.CLEAN, retry_s=0)
    assert Refusal(RefusalReason.DEFERRED, REDELIVERY_S) == key.ask(5)
    key.wait(REDELIVERY_S)
    assert key.take(5).attempts == 0


def test_busy_and_deferred_cost_no_attempt():
    """Rule 10: only a failed try is counted."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=3)
    for version in (4, 5, 4, 5):
        assert key.ask(version, "w2").reason in {RefusalReason.DEFERRED, RefusalReason.BUSY}
    key.wait(3)
    assert key.take(5, "w2").attempts == 1


def test_a_transaction_that_takes_no_claim_answers_like_a_claim():
    """Rules 3, 12 and 21 hold for it too."""
    key = OneKey(SAFE)
    assert key.transact(5) is None
    assert RefusalReason.DUPLICATE is key.transact(5).reason
    assert RefusalReason.STALE is key.transact(4).reason
    assert RefusalReason.MIXED is key.transact(None).reason
    assert RefusalReason.FORGOTTEN is OneKey(SAFE).transact(5, late=True).reason
    key.take(6)
    assert RefusalReason.BUSY is key.transact(7).reason


def test_a_transaction_without_user_code_is_not_held_up_by_a_dead_holder():
    """Rule 18: nothing can be blamed on it, so there is no need to run alone."""
    key = OneKey(SAFE)
    key.take(5)
    key.expire()
    assert key.transact(5) is None


def test_a_mark_ends_whatever_was_going_on():
    """Rule 3: attempts and back-off belong to what is now committed."""
    key = OneKey(SAFE)
    key.fail_unclaimed(5)
    assert key.transact(6) is None
    assert Entry(mark=order_of(6), updated_at=key.now) == key.entry


def test_deciding_changes_nothing():
    """Rule 1: an answer is a value; only a grant writes."""
    entry = committed(5).entry
    before = Entry(mark=order_of(5), updated_at=entry.updated_at)
    rules.decide(entry, ChangeHeader("a", order_of(9)), 5000.0, PLAIN)
    assert before == entry
