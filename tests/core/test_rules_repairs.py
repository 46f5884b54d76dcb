"""What a repair leaves behind, what is forgotten, and what is worth keeping."""

import pytest

from core.one_key import LEASE_S, PLAIN, REDELIVERY_S, RETENTION_S, SAFE, OneKey, committed
from keywise.core import rules
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Certainty, Claim, CommitResult, Entry, Refusal, RefusalReason


def test_a_repair_clears_a_suspicion_and_keeps_the_mark():
    """Suspect and repair: the truth was written, at the order that is committed."""
    key = committed(5)
    key.commit(Claim("a", order_of(4), False, token=99))
    key.finish_repair(key.exclude(), ChangeHeader("a", order_of(5)))
    assert (0, 0.0, order_of(5), 0) == (key.suspicions, key.entry.suspected_at, key.entry.mark, key.entry.token)


def test_a_repair_keeps_a_suspicion_that_has_grown_meanwhile():
    """Suspect and repair: another late write may have landed after the truth was read."""
    key = committed(5)
    key.commit(Claim("a", order_of(4), False, token=99))
    exclusion = key.exclude()
    key.commit(Claim("a", order_of(3), False, token=98))
    key.finish_repair(exclusion, ChangeHeader("a", order_of(5)))
    assert (key.suspicions, key.entry.token) == (2, 0)


def test_a_repair_that_found_newer_state_raises_the_mark():
    """Rule 3: what lies in the sink is newer, so an older message must not follow."""
    key = committed(5)
    key.finish_repair(key.exclude(), ChangeHeader("a", order_of(8), deleted=True))
    assert (order_of(8), True) == (key.entry.mark, key.entry.deleted)
    assert RefusalReason.STALE is key.ask(7).reason


def test_a_repair_that_found_nothing_leaves_a_tombstone():
    """Rule 11: the key is gone from the sink, so its mark says so."""
    key = committed(5)
    key.finish_repair(key.exclude(), ChangeHeader("a", order_of(5), deleted=True))
    assert (order_of(5), True) == (key.entry.mark, key.entry.deleted)


def test_a_repair_drops_an_unknown_write_whose_message_can_no_longer_arrive():
    """Rule 19: the truth was written over it, so nothing has to wait for it any more."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    key.finish_repair(key.exclude(), None)
    assert key.entry.unknown == order_of(5)
    key.wait(REDELIVERY_S - 1)
    exclusion = key.exclude()
    assert key.entry.unknown == order_of(5)
    key.wait(1)
    key.finish_repair(exclusion, None)
    assert (key.entry.unknown, key.suspicions) == (None, 0)


def test_a_repair_does_not_prolong_the_wait_for_a_failed_change():
    """Rule 10: older changes wait for the message that failed, and only since its last attempt."""
    key = OneKey(SAFE)
    key.fail(key.take(5), Certainty.CLEAN, retry_s=0)
    key.wait(REDELIVERY_S - 1)
    key.finish_repair(key.exclude(), None)
    assert Refusal(RefusalReason.DEFERRED, 1.0) == key.ask(4)
    key.wait(1)
    assert isinstance(key.ask(4), Claim)


def test_a_repair_never_lowers_the_mark():
    """Rule 3: whatever it has read."""
    key = committed(5)
    key.finish_repair(key.exclude(), ChangeHeader("a", order_of(2)))
    assert order_of(5) == key.entry.mark


def test_a_repair_of_a_key_without_a_mark_leaves_nothing_behind():
    """An entry that remembers nothing is not kept."""
    key = OneKey(entry=Entry(suspicions=1))
    key.finish_repair(key.exclude(), None)
    assert key.entry is None
    assert rules.finish_repair(None, Claim("a", None, False, token=1), None, key.now) is None


def test_an_exclusion_has_nothing_to_commit_or_mark():
    """Rule 3: only an order raises a mark."""
    key = OneKey()
    with pytest.raises(AssertionError, match="nothing to commit"):
        key.commit(key.exclude())
    with pytest.raises(AssertionError, match="only an order"):
        rules.mark(None, ChangeHeader("a", None), key.now)


def test_a_suspect_is_doubtful_from_the_last_suspicion_on():
    """Suspect and repair: the repair waits until no earlier call can land any more, counted from here."""
    key = committed(5)
    assert rules.suspect_since(key.entry, PLAIN) is None
    key.wait(7)
    key.commit(Claim("a", order_of(4), False, token=99))
    assert rules.suspect_since(key.entry, PLAIN) == key.now


def test_an_unknown_write_is_doubtful_once_its_message_can_no_longer_arrive():
    """Rule 19: until then the message itself may still settle it."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    assert rules.suspect_since(key.entry, PLAIN) == key.now + REDELIVERY_S


def test_a_holder_that_vanished_is_doubtful_once_its_message_can_no_longer_arrive():
    """Rule 19: nobody may ever ask for this key again."""
    key = OneKey()
    key.take(5)
    assert rules.suspect_since(key.entry, PLAIN) == key.now + LEASE_S + REDELIVERY_S
    safe = OneKey(SAFE)
    safe.take(5)
    assert rules.suspect_since(safe.entry, SAFE) is None


def test_a_repair_that_takes_the_key_drops_what_can_no_longer_arrive_and_leaves_a_suspect():
    """Rule 19: if the repair dies, its key is still known to be in doubt."""
    key = OneKey()
    key.fail(key.take(5), Certainty.ENDED, retry_s=0)
    key.wait(REDELIVERY_S)
    assert key.exclude().suspicions == 1
    assert key.entry.unknown is None


@pytest.mark.parametrize("wait_s", [0.0, LEASE_S / 2, LEASE_S])
def test_a_repair_need_not_wait_for_a_change_that_was_written_without_the_ledger(wait_s):
    """Rule 22: however short the outage was, its message was acked and comes no more to settle it."""
    for written in (5, 6):
        key = OneKey()
        claim = key.take(5, "w1")
        key.wait(wait_s)
        key.mark_suspect(written)
        key.wait(LEASE_S - wait_s)
        assert isinstance(key.exclude("w2"), Claim)
        assert key.commit(claim) is CommitResult.REFUSED


def test_a_doubt_during_a_lease_leaves_the_key_to_its_holder_until_then():
    """Rule 22: whether it still writes is not known."""
    key = OneKey()
    claim = key.take(5, "w1")
    key.mark_suspect(5)
    assert Refusal(RefusalReason.BUSY, LEASE_S) == key.exclude("w2")
    assert key.commit(claim) is CommitResult.COMMITTED
    assert (key.entry.suspicions, key.entry.token) == (1, 0)


def test_a_repair_waits_for_a_holder_that_tried_something_newer_than_was_written_without_it():
    """Rule 18: it may have died of that, and deaths must not be forgotten."""
    key = OneKey()
    key.take(5, "w1")
    key.mark_suspect(4)
    key.wait(LEASE_S)
    assert Refusal(RefusalReason.DEFERRED, REDELIVERY_S) == key.exclude("w2")


def test_only_idle_and_old_entries_are_pruned():
    """Rule 14: nothing is going on, and every version that may still be on its way is late by then."""
    old, retention_s = Entry(mark=order_of(5), updated_at=100.0), RETENTION_S
    due = 100.0 + retention_s + REDELIVERY_S
    assert not rules.is_prunable(old, due, retention_s, PLAIN)
    assert rules.is_prunable(old, due + 1, retention_s, PLAIN)
    for kept in (
        Entry(mark=order_of(5), updated_at=100.0, token=1, lease_until=110.0),
        Entry(mark=order_of(5), updated_at=100.0, unknown=order_of(6)),
        Entry(mark=order_of(5), updated_at=100.0, suspicions=1),
    ):
        assert not rules.is_prunable(kept, due + 1, retention_s, PLAIN)


def test_an_entry_is_kept_only_if_it_remembers_something():
    """Rule 14: a retry that was never needed is no memory; a mark, a count or a doubt is one."""
    assert rules.kept(None) is None
    assert rules.kept(Entry(updated_at=5.0, not_before=9.0, tried=order_of(1))) is None
    for entry in (Entry(mark=order_of(1)), Entry(attempts=1), Entry(crashes=1), Entry(suspicions=1), Entry(token=1)):
        assert entry == rules.kept(entry)
