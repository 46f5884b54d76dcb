"""Bursts of one key are gathered in its lane: until it was quiet, but not for ever, and the newest stands for all."""

from flow.tickets import endings, names, ticket
from keywise.core.change import Outcome
from keywise.core.limits import Debounce
from keywise.flow.lanes import Lanes

QUIET_S, MAX_S = 1.0, 3.0


def gathering(capacity: int = 100) -> Lanes:
    return Lanes(capacity, debounce=Debounce(QUIET_S, max_wait=MAX_S))


def burst(lanes: Lanes, *arrivals: tuple[str, int, float]) -> None:
    for key, version, at in arrivals:
        lanes.add([ticket(key, version, at=at)])


def test_a_change_goes_on_when_its_key_was_quiet():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    assert (lanes.next_due(), lanes.take(10, 0.99)) == (1.0, [])
    assert names(lanes.take(10, 1.0)) == [("a", 1)]


def test_a_newer_change_starts_the_wait_again_and_the_newest_stands_for_all():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0), ("a", 2, 0.9))
    assert (lanes.take(10, 1.5), lanes.next_due()) == ([], 1.9)
    [newest] = lanes.take(10, 1.9)
    settled = lanes.finish(newest, Outcome.APPLIED, newest.change.order)
    assert endings(settled) == [("a", 2, "applied"), ("a", 1, "superseded")]


def test_an_older_change_that_is_late_does_not_start_the_wait_again():
    lanes = gathering()
    burst(lanes, ("a", 2, 0.0), ("a", 1, 0.9))
    assert names(lanes.take(10, 1.0)) == [("a", 2)]


def test_a_burst_that_does_not_end_goes_on_after_the_longest_wait():
    lanes = gathering()
    burst(lanes, *(("a", number, number * 0.5) for number in range(7)))
    assert lanes.next_due() == MAX_S
    assert lanes.take(10, 2.99) == []
    assert names(lanes.take(10, 3.0)) == [("a", 6)]


def test_keys_are_gathered_apart():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0), ("b", 1, 0.5), ("a", 2, 0.8))
    assert names(lanes.take(10, 1.5)) == [("b", 1)]
    assert names(lanes.take(10, 1.8)) == [("a", 2)]


def test_a_change_that_joins_when_the_wait_is_over_goes_along():
    lanes = gathering()
    burst(lanes, ("b", 1, 0.0), ("a", 1, 0.1))
    assert names(lanes.take(1, 1.1)) == [("b", 1)]
    burst(lanes, ("a", 2, 1.1))
    assert names(lanes.take(1, 1.1)) == [("a", 2)]


def test_what_arrives_while_its_key_is_worked_on_is_gathered_from_its_own_arrival():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    [first] = lanes.take(10, 1.0)
    burst(lanes, ("a", 2, 5.0))
    lanes.finish(first, Outcome.APPLIED, first.change.order)
    assert (lanes.next_due(), lanes.take(10, 5.9)) == (6.0, [])
    assert names(lanes.take(10, 6.0)) == [("a", 2)]


def test_what_was_gathered_long_enough_while_its_key_was_worked_on_goes_on_at_once():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    [first] = lanes.take(10, 1.0)
    burst(lanes, ("a", 2, 2.0))
    lanes.finish(first, Outcome.APPLIED, first.change.order)
    assert names(lanes.take(10, 9.0)) == [("a", 2)]


def test_a_retry_is_not_gathered_a_second_time():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    lanes.hold(lanes.take(10, 1.0)[0], due=1.2)
    assert names(lanes.take(10, 1.2)) == [("a", 1)]


def test_a_newer_change_during_the_wait_for_a_retry_is_gathered_and_does_not_wait_for_the_retry():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    lanes.hold(lanes.take(10, 1.0)[0], due=100.0)
    burst(lanes, ("a", 2, 2.0))
    assert (lanes.next_due(), lanes.take(10, 2.9)) == (3.0, [])
    assert names(lanes.take(10, 3.0)) == [("a", 2)]


def test_a_newer_change_that_came_while_an_older_one_failed_is_gathered():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    [older] = lanes.take(10, 1.0)
    burst(lanes, ("a", 2, 1.5))
    lanes.hold(older, due=100.0)
    assert (lanes.next_due(), lanes.take(10, 2.4)) == (2.5, [])
    assert names(lanes.take(10, 2.5)) == [("a", 2)]


def test_the_next_newest_of_a_burial_is_not_gathered_again():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0), ("a", 2, 0.1))
    lanes.dead_letter(lanes.take(10, 1.1)[0])
    assert names(lanes.take(10, 1.1)) == [("a", 1)]


def test_what_came_during_the_work_of_a_buried_change_is_gathered():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    [poison] = lanes.take(10, 1.0)
    burst(lanes, ("a", 2, 1.5))
    lanes.dead_letter(poison)
    assert (lanes.take(10, 2.4), names(lanes.take(10, 2.5))) == ([], [("a", 2)])


def test_a_message_that_comes_again_does_not_start_the_wait_again():
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    lanes.add([ticket("a", 1, receipt=2, at=0.9)])
    assert names(lanes.take(10, 1.0)) == [("a", 1)]


def test_a_key_that_is_limited_keeps_its_newer_changes_waiting():
    """A firm wait concerns the key: quiet or not, nothing of it goes on before it is over."""
    lanes = gathering()
    burst(lanes, ("a", 1, 0.0))
    lanes.hold(lanes.take(10, 1.0)[0], due=10.0, blocks_newer=True)
    burst(lanes, ("a", 2, 2.0))
    assert (lanes.next_due(), lanes.take(10, 9.9)) == (10.0, [])
    assert names(lanes.take(10, 10.0)) == [("a", 2)]


def test_a_firm_wait_holds_for_a_newer_change_that_came_while_the_key_was_asked_for():
    lanes = Lanes(100)
    lanes.add([ticket("a", 1)])
    [asked] = lanes.take(10, 0.0)
    lanes.add([ticket("a", 2)])
    lanes.hold(asked, due=10.0, blocks_newer=True)
    assert lanes.take(10, 9.9) == []
    assert names(lanes.take(10, 10.0)) == [("a", 2)]


def test_a_lane_blocks_newer_changes_only_as_long_as_its_last_wait_was():
    lanes = Lanes(100)
    lanes.add([ticket("a", 1)])
    lanes.hold(lanes.take(10, 0.0)[0], due=10.0, blocks_newer=True)
    lanes.hold(lanes.take(10, 10.0)[0], due=100.0)
    lanes.add([ticket("a", 2)])
    assert names(lanes.take(10, 10.0)) == [("a", 2)]


def test_of_a_burst_without_room_the_oldest_leave():
    """The newest would come back later, and be one more write; the oldest come back stale."""
    lanes = gathering(capacity=4)
    burst(lanes, *(("a", version, 0.1) for version in (5, 1, 6, 3, 2, 4)))
    assert sorted(names(lanes.evict_blocked(0.1))) == [("a", 1), ("a", 2), ("a", 3)]
    assert names(lanes.take(10, 5.0)) == [("a", 6)]


def test_the_newest_of_a_burst_is_never_given_back():
    """It would be gathered anew each time it came back: with a large backlog no key would ever be quiet for long."""
    lanes = gathering(capacity=10)
    burst(lanes, *((f"k{number}", 1, 0.0) for number in range(10)))
    assert lanes.evict_blocked(0.0) == []
    assert len(lanes.take(10, 1.0)) == 10


def test_a_lane_that_is_worked_on_has_nothing_to_give_back():
    """It was gathered before, and waits for nothing now."""
    lanes = gathering(capacity=2)
    burst(lanes, ("a", 1, 0.0), ("b", 1, 0.0), ("c", 1, 0.0), ("c", 2, 0.0), ("c", 3, 0.0))
    [first, *_] = lanes.take(1, 5.0)
    lanes.hold(first, due=50.0, blocks_newer=True)
    lanes.take(1, 5.0)
    assert all(ticket.change.key != "b" for ticket in lanes.evict_blocked(9.0))


def test_the_time_of_a_debounce_does_not_make_a_key_blocked():
    """It was gathered for three seconds, and has been at work for a moment."""
    lanes = gathering(capacity=4)
    burst(lanes, *(("a", version, version / 2) for version in range(7)))
    [newest] = lanes.take(10, 3.0)
    assert (newest.change.version, lanes.evict_blocked(3.9)) == (6, [])
    assert len(lanes.evict_blocked(4.0)) == 4
