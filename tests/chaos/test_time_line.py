"""A judge of silence that finds nothing is only as good as what it can find."""

import pytest
from msgspec.structs import replace

from chaos.time_line import (
    READ,
    WROTE,
    Effect,
    Limits,
    NothingMeasuredError,
    Reading,
    Record,
    Sent,
    Wait,
    effects,
    judge,
    longest_before,
    readings,
    received_by_victim,
    waits,
    waves,
)

LIMITS = Limits(lease_s=10.0, redelivery_s=20.0, call_s=0.5, concurrency=4)
RECORD = Record(
    sent=[Sent("early", 1, 1.0), Sent("held", 2, 99.0), Sent("received", 3, 99.0), Sent("free", 4, 101.0)],
    effects=[
        Effect("early", 1, 1.5),
        Effect("held", 2, 110.5),
        Effect("received", 3, 120.0),
        Effect("free", 4, 102.0),
    ],
    readings=[
        Reading("dead", "held", 2, 1, 99.1),
        Reading("dead", "received", 3, 1, 99.1),
        Reading("alive", "free", 4, 1, 101.1),
        Reading("alive", "received", 3, 2, 119.0),
    ],
    victim="dead",
    claimed={"held"},
    began=100.0,
    ended=115.0,
    judged_at=130.0,
)


def test_each_group_of_keys_has_its_longest_silence_and_its_limit():
    found = [(one.keys, one.changes, one.longest_s, one.limit_s, one.verdict) for one in judge(RECORD, LIMITS)]
    assert found == [
        ("not claimed", 1, 1.0, 5.5, "held"),
        ("received, not claimed", 1, 21.0, 25.5, "held"),
        ("claimed", 1, 11.5, 15.5, "held"),
    ]


def test_a_silence_above_its_limit_is_missed():
    late = [effect if effect.key != "free" else replace(effect, at=107.0) for effect in RECORD.effects]
    silence, *_ = judge(replace(RECORD, effects=late), LIMITS)
    assert (silence.longest_s, silence.verdict) == (6.0, "MISSED")


def test_a_change_that_was_never_written_is_silent_until_the_end():
    written = [effect for effect in RECORD.effects if effect.key != "free"]
    silence, *_ = judge(replace(RECORD, effects=written), LIMITS)
    assert (silence.longest_s, silence.verdict) == (29.0, "MISSED")


def test_a_newer_version_ends_the_silence_of_an_older_one_and_an_older_one_does_not():
    sent = Sent("k", 2, 1.0)
    written = [Effect("k", 1, 2.0), Effect("other", 2, 2.5), Effect("k", 3, 3.0), Effect("k", 2, 4.0)]
    assert waits([sent], written) == [Wait(sent, 3.0)]


def test_without_claims_of_the_victim_nothing_is_measured():
    for claimed in (set[str](), {"another"}):
        with pytest.raises(NothingMeasuredError, match="claim"):
            judge(replace(RECORD, claimed=claimed), LIMITS)


def test_without_changes_to_other_keys_during_the_fault_nothing_is_measured():
    with pytest.raises(NothingMeasuredError, match="another key"):
        judge(replace(RECORD, sent=[one for one in RECORD.sent if one.key != "free"]), LIMITS)


def test_a_group_without_changes_has_no_silence_instead_of_none_at_all():
    silence = judge(replace(RECORD, sent=[one for one in RECORD.sent if one.key != "received"]), LIMITS)[1]
    assert (silence.changes, silence.longest_s, silence.verdict) == (0, None, "not measured")


def test_a_message_that_no_worker_read_at_its_first_delivery_was_with_the_worker_that_hung():
    unread = Reading("alive", "hidden", 9, 2, 108.0)
    after = Reading("dead", "later", 10, 1, 112.0)
    again = Reading("alive", "free", 4, 2, 103.0)
    record = replace(RECORD, readings=[again, after, unread, *RECORD.readings])
    assert received_by_victim(record) == {("held", 2), ("received", 3), ("hidden", 9)}


def test_the_silence_before_the_fault_leaves_out_what_was_written_later():
    assert longest_before(RECORD, 100.0) == 0.5


def test_waves_on_probation_double_up_to_the_concurrency():
    assert [waves(changes, 4) for changes in (0, 1, 2, 3, 4, 7, 8, 11, 12)] == [0, 1, 2, 2, 3, 3, 4, 4, 5]


def test_notes_of_a_worker_are_read_back():
    notes = f"started\n{READ} k1 7 2 10.5\n{WROTE} k1 7 10.75\nfailed k2\n"
    assert readings("one", notes) == [Reading("one", "k1", 7, 2, 10.5)]
    assert effects(notes) == [Effect("k1", 7, 10.75)]
