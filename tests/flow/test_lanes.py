"""The waiting lines of one consumer: newest first, one of a key at a time, and nothing blocked holds up the rest."""

from flow.tickets import endings, names, ticket
from keywise.core.change import Outcome, order_of
from keywise.core.entry import Level
from keywise.flow.coalesce import coalesce
from keywise.flow.lanes import Lanes


def filled(*wanted: tuple[str, int | None], capacity: int = 100) -> Lanes:
    lanes = Lanes(capacity)
    lanes.add([ticket(key, version) for key, version in wanted])
    return lanes


def test_a_batch_takes_the_newest_change_of_each_key():
    """Rule 2: a batch takes at most one change per key."""
    lanes = filled(("a", 1), ("b", 5), ("a", 3), ("a", 2))
    assert names(lanes.take(10, 0.0)) == [("a", 3), ("b", 5)]
    assert lanes.take(10, 0.0) == []


def test_the_lane_that_has_waited_longest_goes_first():
    lanes = filled(("b", 1), ("a", 1), ("c", 1))
    assert names(lanes.take(2, 0.0)) == [("b", 1), ("a", 1)]
    assert names(lanes.take(2, 0.0)) == [("c", 1)]


def test_followers_end_only_when_the_newest_is_committed():
    """Rule 4: they end with it, and not before."""
    lanes = filled(("a", 1), ("a", 3), ("a", 2))
    [newest] = lanes.take(10, 0.0)
    assert len(lanes) == 3
    settled = lanes.finish(newest, Outcome.APPLIED, newest.change.order)
    assert endings(settled) == [("a", 3, "applied"), ("a", 1, "superseded"), ("a", 2, "superseded")]
    assert (len(lanes), lanes.tickets()) == (0, [])


def test_a_follower_of_the_same_version_is_a_duplicate():
    lanes = Lanes(10)
    lanes.add([ticket("a", 3, number=1), ticket("a", 3, number=2)])
    [first] = lanes.take(10, 0.0)
    settled = lanes.finish(first, Outcome.APPLIED, first.change.order)
    assert endings(settled) == [("a", 3, "applied"), ("a", 3, "duplicate")]


def test_a_change_that_cannot_be_compared_follows_nobody():
    """Rule 21: versioned and unversioned changes of a key are never acked for each other."""
    for first, second in ((3, None), (None, -3)):
        lanes = filled(("a", first), ("a", second))
        [taken] = lanes.take(10, 0.0)
        assert len(lanes.finish(taken, Outcome.APPLIED, taken.change.order)) == 1
        assert len(lanes.take(10, 0.0)) == 1
        coalesced = coalesce([ticket("a", first), ticket("a", second)])
        assert coalesced.followed(()) == {}


def test_a_change_that_joined_meanwhile_and_is_newer_has_its_turn_afterwards():
    lanes = filled(("a", 1))
    [first] = lanes.take(10, 0.0)
    lanes.add([ticket("a", 2)])
    assert lanes.take(10, 0.0) == []
    assert endings(lanes.finish(first, Outcome.APPLIED, first.change.order)) == [("a", 1, "applied")]
    assert names(lanes.take(10, 0.0)) == [("a", 2)]


def test_a_stale_change_ends_with_everything_up_to_the_mark():
    """Rule 4: the ledger said how far the key is committed, and that holds for the followers too."""
    lanes = filled(("a", 5), ("a", 3))
    [newest] = lanes.take(10, 0.0)
    lanes.add([ticket("a", 7), ticket("a", 9)])
    settled = lanes.finish(newest, Outcome.STALE, order_of(7))
    assert endings(settled) == [("a", 5, "stale"), ("a", 3, "stale"), ("a", 7, "duplicate")]
    assert names(lanes.take(10, 0.0)) == [("a", 9)]


def test_the_next_newest_has_its_turn_when_the_newest_is_buried():
    """Rule 4: if the survivor is poison, nothing that follows it is acked."""
    lanes = filled(("a", 1), ("a", 3), ("a", 2))
    [poison] = lanes.take(10, 0.0)
    assert endings(lanes.dead_letter(poison)) == [("a", 3, "dead")]
    assert names(lanes.take(10, 0.0)) == [("a", 2)]


def test_a_redelivered_message_only_brings_its_newer_receipt():
    """Rule 5: an ack goes out with the newest receipt, also for a change that is being worked on."""
    lanes = filled(("a", 1))
    [taken] = lanes.take(10, 0.0)
    lanes.add([ticket("a", 1, receipt=2, at=9.0)])
    assert len(lanes) == 1
    [(settled, _)] = lanes.finish(taken, Outcome.APPLIED, taken.change.order)
    assert (settled.delivery.receipt, settled.extended_at) == (2, 9.0)


def test_messages_of_two_sources_may_have_the_same_number():
    lanes = Lanes(10)
    lanes.add([ticket("a", 1, number=7, source=0), ticket("b", 1, number=7, source=1)])
    assert len(lanes) == 2


def test_a_held_lane_waits_until_it_is_due():
    lanes = filled(("a", 1), ("b", 1))
    first, _ = lanes.take(10, 0.0)
    lanes.hold(first, due=5.0)
    assert lanes.next_due() == 5.0
    assert lanes.take(10, 4.9) == []
    assert names(lanes.take(10, 5.0)) == [("a", 1)]
    assert lanes.next_due() is None


def test_a_held_key_holds_up_nobody_else():
    """Rule 15: one blocked key never holds up another."""
    lanes = filled(("a", 1))
    lanes.hold(lanes.take(1, 0.0)[0], due=1000.0)
    lanes.add([ticket("b", 1)])
    assert names(lanes.take(10, 0.0)) == [("b", 1)]


def test_a_newer_change_frees_a_held_lane():
    """Rule 15: what the lane waits for belongs to an older change."""
    lanes = filled(("a", 1))
    lanes.hold(lanes.take(1, 0.0)[0], due=1000.0)
    lanes.add([ticket("a", 2)])
    assert names(lanes.take(10, 0.0)) == [("a", 2)]
    assert lanes.next_due() is None


def test_an_older_change_does_not_free_a_held_lane():
    lanes = filled(("a", 2))
    lanes.hold(lanes.take(1, 0.0)[0], due=1000.0)
    lanes.add([ticket("a", 1)])
    assert lanes.take(10, 0.0) == []
    assert names(lanes.take(10, 1000.0)) == [("a", 2)]


def test_a_change_that_was_overtaken_while_it_was_worked_on_holds_up_nothing():
    """Rule 15: the reason to wait does not concern the newer one."""
    lanes = filled(("a", 1))
    [older] = lanes.take(1, 0.0)
    lanes.add([ticket("a", 2)])
    lanes.hold(older, due=1000.0)
    assert lanes.next_due() is None
    assert names(lanes.take(10, 0.0)) == [("a", 2)]


def test_a_change_of_the_same_order_does_not_end_a_hold():
    """Rule 15: the reason to wait concerns both, so neither is tried before it is due."""
    lanes = Lanes(10)
    lanes.add([ticket("a", 1, number=1)])
    [first] = lanes.take(1, 0.0)
    lanes.add([ticket("a", 1, number=2)])
    lanes.hold(first, due=1000.0)
    assert lanes.next_due() == 1000.0
    assert lanes.take(10, 999.0) == []
    assert names(lanes.take(10, 1000.0)) == [("a", 1)]


def test_a_lane_that_is_held_again_wakes_once():
    lanes = filled(("a", 1))
    lanes.hold(lanes.take(1, 0.0)[0], due=5.0)
    lanes.add([ticket("a", 2)])
    lanes.hold(lanes.take(1, 0.0)[0], due=5.0)
    assert names(lanes.take(10, 5.0)) == [("a", 2)]
    assert lanes.take(10, 5.0) == []


def test_a_lane_that_is_held_for_longer_does_not_wake_at_its_earlier_time():
    lanes = filled(("b", 1), ("a", 1))
    for one, due in zip(lanes.take(2, 0.0), (1.0, 5.0), strict=True):
        lanes.hold(one, due)
    lanes.add([ticket("a", 2)])
    lanes.hold(lanes.take(1, 0.0)[0], due=10.0)
    assert names(lanes.take(10, 5.0)) == [("b", 1)]
    assert lanes.next_due() == 10.0


def test_a_change_on_probation_is_taken_at_its_level_only():
    """Rule 18: the change that somebody died with runs with nothing beside it."""
    lanes = filled(("a", 1), ("b", 1))
    first, second = lanes.take(10, 0.0)
    lanes.put_on_probation(first, Level.PROBATION)
    lanes.hold(second, due=0.0)
    assert lanes.has_on_probation(Level.PROBATION)
    assert names(lanes.take(10, 0.0)) == [("b", 1)]
    assert names(lanes.take_on_probation(Level.PROBATION)) == [("a", 1)]
    assert not lanes.has_on_probation(Level.PROBATION)
    assert lanes.take_on_probation(Level.PROBATION) == []


def test_a_lane_on_probation_that_was_emptied_is_not_taken():
    lanes = filled(("a", 1))
    lanes.put_on_probation(lanes.take(1, 0.0)[0], Level.PROBATION)
    lanes.drain()
    lanes.add([ticket("a", 2)])
    assert lanes.take_on_probation(Level.PROBATION) == []
    assert names(lanes.take(10, 0.0)) == [("a", 2)]


def test_the_newest_of_a_lane_on_probation_is_taken():
    lanes = filled(("a", 1))
    lanes.put_on_probation(lanes.take(1, 0.0)[0], Level.PROBATION)
    lanes.add([ticket("a", 2)])
    assert lanes.take(10, 0.0) == []
    assert names(lanes.take_on_probation(Level.PROBATION)) == [("a", 2)]


def test_room_is_what_is_left_of_the_capacity():
    lanes = filled(("a", 1), ("a", 2), ("b", 1), capacity=4)
    assert lanes.room == 1
    lanes.take(10, 0.0)
    assert lanes.room == 1, "what is worked on still counts"
    lanes.add([ticket("c", 1), ticket("c", 2), ticket("c", 3)])
    assert lanes.room == 0


def test_blocked_changes_take_at_most_half_of_the_room():
    """Rule 15: the surplus leaves, and ready lanes keep what they have."""
    lanes = filled(("b", 1), *(("a", version) for version in range(6)), capacity=8)
    other, newest = lanes.take(10, 0.0)
    lanes.hold(newest, due=1000.0)
    lanes.add([ticket("b", 2)])
    lanes.finish(other, Outcome.APPLIED, other.change.order)
    leaving = lanes.evict_blocked(0.0)
    assert {one.change.key for one in leaving} == {"a"}
    assert (len(leaving), len(lanes)) == (2, 5)
    assert lanes.evict_blocked(0.0) == []
    assert names(lanes.take(10, 0.0)) == [("b", 2)]


def test_followers_of_a_change_that_is_at_work_for_a_second_are_surplus_too():
    lanes = filled(*(("a", version) for version in range(6)), capacity=4)
    [working] = lanes.take(10, 5.0)
    assert (lanes.evict_blocked(5.9), lanes.next_blocked(5.9)) == ([], 6.0)
    assert names(lanes.evict_blocked(6.0)) == [("a", 0), ("a", 1), ("a", 2)]
    assert lanes.next_blocked(6.0) is None
    assert len(lanes.finish(working, Outcome.APPLIED, working.change.order)) == 3


def test_a_key_that_is_refused_again_and_again_is_blocked_though_each_wait_is_short():
    lanes = filled(*(("a", version) for version in range(6)), capacity=4)
    for now in (0.0, 0.4, 0.8):
        assert lanes.evict_blocked(now) == []
        lanes.hold(lanes.take(1, now)[0], due=now + 0.4)
    assert len(lanes.evict_blocked(1.1)) == 4


def test_a_key_that_moves_on_is_not_blocked():
    """Each change takes most of a second, and each is committed."""
    lanes = filled(*(("a", version) for version in range(6)), capacity=4)
    for now in (0.0, 0.8, 1.6, 2.4):
        [one] = lanes.take(1, now)
        assert lanes.evict_blocked(now + 0.7) == []
        assert lanes.dead_letter(one)


def test_older_changes_of_all_blocked_keys_leave_before_the_newest_of_any():
    """The newest must be written; the others are stale when they come back."""
    lanes = filled(("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", 1), ("c", 3), ("c", 2), capacity=6)
    for one in lanes.take(10, 0.0):
        lanes.hold(one, due=100.0)
    assert names(lanes.evict_blocked(0.0)) == [("a", 1), ("b", 1), ("c", 1), ("c", 2)]
    assert lanes.evict_blocked(0.0) == []


def test_the_newest_changes_leave_if_there_are_too_many_blocked_keys():
    lanes = filled(*((f"k{number}", 1) for number in range(8)), capacity=8)
    for one in lanes.take(10, 0.0):
        lanes.hold(one, due=100.0)
    assert names(lanes.evict_blocked(0.0)) == [(f"k{number}", 1) for number in range(4)]


def test_a_key_whose_changes_were_evicted_is_reported_once_when_one_of_them_ends():
    lanes = filled(*(("a", version) for version in range(6)), ("b", 1), capacity=4)
    working, other = lanes.take(10, 0.0)
    lanes.evict_blocked(1.0)
    lanes.finish(other, Outcome.APPLIED, other.change.order)
    assert lanes.take_freed() == []
    lanes.finish(working, Outcome.APPLIED, working.change.order)
    assert lanes.take_freed() == ["a"]
    assert lanes.take_freed() == []


def test_draining_lets_go_of_everything_that_was_evicted():
    """No lane of this consumer will notice when the key is free."""
    lanes = filled(*(("a", version) for version in range(6)), capacity=4)
    lanes.take(10, 0.0)
    lanes.evict_blocked(1.0)
    lanes.drain()
    assert lanes.take_freed() == ["a"]


def test_draining_lets_go_of_what_was_evicted_from_lanes_that_wait():
    lanes = filled(*((key, version) for key in ("held", "on probation") for version in range(6)), capacity=8)
    held, on_probation = lanes.take(10, 0.0)
    lanes.hold(held, due=100.0)
    lanes.put_on_probation(on_probation, Level.PROBATION)
    assert {one.change.key for one in lanes.evict_blocked(1.0)} == {"held", "on probation"}
    lanes.drain()
    assert sorted(lanes.take_freed()) == ["held", "on probation"]


def test_a_lane_that_left_as_surplus_leaves_nothing_behind():
    lanes = filled(("a", 1), ("b", 1), capacity=1)
    for one in lanes.take(10, 0.0):
        lanes.hold(one, due=5.0)
    assert len(lanes.evict_blocked(0.0)) == 2
    assert (lanes.next_due(), lanes.take(10, 5.0), len(lanes)) == (None, [], 0)


def test_draining_gives_back_what_waits_and_keeps_what_is_worked_on():
    lanes = filled(("a", 1), ("a", 2), ("b", 1), ("c", 1))
    [working] = lanes.take(1, 0.0)
    assert sorted(names(lanes.drain())) == [("a", 1), ("b", 1), ("c", 1)]
    assert lanes.take(10, 0.0) == []
    assert endings(lanes.finish(working, Outcome.APPLIED, working.change.order)) == [("a", 2, "applied")]
    assert len(lanes) == 0


def test_a_drained_key_may_come_again():
    lanes = filled(("a", 1))
    lanes.drain()
    lanes.add([ticket("a", 1)])
    assert names(lanes.take(10, 0.0)) == [("a", 1)]


def test_a_fold_keeps_the_newest_of_each_key_and_knows_its_followers():
    """Rules 2 and 4, for a batch that waits for nothing."""
    coalesced = coalesce([ticket("a", 1), ticket("b", 1), ticket("a", 3), ticket("a", 2)])
    assert names(coalesced.survivors) == [("a", 3), ("b", 1)]
    followed = coalesced.followed(())
    assert {outcome: names(settled) for outcome, settled in followed.items()} == {
        Outcome.SUPERSEDED: [("a", 1), ("a", 2)]
    }
    assert coalesced.followed({"a"}) == {}


def test_a_fold_knows_duplicates():
    coalesced = coalesce([ticket("a", 3, number=number) for number in (1, 2, 3)])
    assert [one.delivery.id for one in coalesced.survivors] == [1]
    [(outcome, followers)] = coalesced.followed(()).items()
    assert (outcome, [one.delivery.id for one in followers]) == (Outcome.DUPLICATE, [2, 3])
