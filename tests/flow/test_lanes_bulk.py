"""Live lanes go before bulk lanes, but not for ever; and bulk never uses up the room of what is live."""

from flow.tickets import names, ticket
from keywise.core.change import Outcome
from keywise.core.limits import Debounce
from keywise.flow.lanes import LIVE_BEFORE_BULK, Lanes, Ticket

LIVE, BULK = 0, 1


def both(capacity: int = 100) -> Lanes:
    return Lanes(capacity, bulk={BULK})


def change(key: str, version: int = 1, *, source: int = BULK) -> Ticket:
    return ticket(key, version, source=source)


def live(*keys: str) -> list[Ticket]:
    return [change(key, source=LIVE) for key in keys]


def bulk(*keys: str) -> list[Ticket]:
    return [change(key) for key in keys]


def test_live_lanes_go_first():
    lanes = both()
    lanes.add([*bulk("b1", "b2"), *live("a1", "a2")])
    assert names(lanes.take(3, 0.0)) == [("a1", 1), ("a2", 1), ("b1", 1)]


def test_after_so_many_live_changes_a_bulk_one_has_its_turn():
    lanes = both()
    lanes.add([*bulk("b1", "b2", "b3"), *live(*(f"a{number}" for number in range(30)))])
    keys = [key for key, _ in names(lanes.take(27, 0.0))]
    assert [place for place, key in enumerate(keys) if key.startswith("b")] == [8, 17, 26]


def test_the_turn_of_bulk_is_counted_across_batches():
    lanes = both()
    lanes.add([*bulk("b1"), *live(*(f"a{number}" for number in range(LIVE_BEFORE_BULK + 1)))])
    taken = [names(lanes.take(1, 0.0))[0][0] for _ in range(LIVE_BEFORE_BULK + 1)]
    assert taken == [*(f"a{number}" for number in range(LIVE_BEFORE_BULK)), "b1"]


def test_no_more_bulk_is_taken_than_is_allowed():
    lanes = both()
    lanes.add([*bulk("b1", "b2", "b3"), *live("a1")])
    assert names(lanes.take(10, 0.0, bulk_limit=2)) == [("a1", 1), ("b1", 1), ("b2", 1)]
    assert lanes.take(10, 0.0, bulk_limit=0) == []
    assert names(lanes.take(10, 0.0)) == [("b3", 1)]


def test_a_bulk_lane_becomes_live_with_its_first_live_change():
    lanes = both()
    lanes.add([*bulk("b1", "b2", "k"), change("k", 2, source=LIVE)])
    [first] = lanes.take(1, 0.0)
    assert names([first]) == [("k", 2)]
    assert [one.change.version for one, _ in lanes.finish(first, Outcome.APPLIED, first.change.order)] == [2, 1]
    assert names(lanes.take(10, 0.0)) == [("b1", 1), ("b2", 1)]


def test_a_lane_that_became_live_is_taken_once():
    lanes = both()
    lanes.add([*bulk("k"), change("k", 2, source=LIVE), *live("a")])
    assert sorted(names(lanes.take(10, 0.0))) == [("a", 1), ("k", 2)]
    assert lanes.take(10, 0.0) == []


def test_a_lane_is_bulk_again_when_nothing_live_waits_in_it():
    lanes = both()
    lanes.add([*bulk("k"), change("k", 2, source=LIVE)])
    [poison] = lanes.take(1, 0.0)
    lanes.dead_letter(poison)
    lanes.add(live("a"))
    assert names(lanes.take(10, 0.0)) == [("a", 1), ("k", 1)]


def test_a_lane_is_bulk_again_when_its_live_changes_have_left_while_a_bulk_one_was_processed():
    lanes = both()
    lanes.add([change("a", 2)])
    [taken] = lanes.take(1, 0.0)
    lanes.add([change("a", 1, source=LIVE)])
    assert names(lanes.drain()) == [("a", 1)]
    lanes.hold(taken, 0.0)
    assert lanes.take(1, 0.0, bulk_limit=0) == []
    assert names(lanes.take(1, 0.0, bulk_limit=1)) == [("a", 2)]


def test_a_lane_is_bulk_again_when_its_live_changes_were_evicted():
    lanes = Lanes(1, bulk={BULK}, debounce=Debounce(quiet=1.0, max_wait=3.0))
    lanes.add([change("a", 1, source=LIVE), change("a", 2)])
    assert names(lanes.evict_blocked(0.0)) == [("a", 1)]
    assert lanes.take(1, 1.0, bulk_limit=0) == []
    assert names(lanes.take(1, 1.0, bulk_limit=1)) == [("a", 2)]


def test_what_is_bulk_only_after_an_eviction_keeps_to_the_room_of_bulk_too():
    """The live change of a lane leaves, so its others are bulk, and then there is more bulk than its quarter."""
    lanes = Lanes(4, bulk={BULK}, debounce=Debounce(quiet=1.0, max_wait=3.0))
    numbered = [("c", 1, LIVE), ("a", 1, BULK), ("a", 1, BULK), ("c", 2, BULK), ("c", 2, BULK)]
    lanes.add([ticket(key, version, number, source=source) for number, (key, version, source) in enumerate(numbered)])
    assert lanes.evict_blocked(0.0)
    assert lanes.evict_blocked(0.0) == []


def test_a_bulk_lane_that_waits_becomes_live_with_a_live_change_even_if_that_is_older():
    lanes = both()
    lanes.add([change("k", 5), *bulk("b")])
    lanes.hold(lanes.take(1, 0.0)[0], due=10.0)
    lanes.add([change("k", 1, source=LIVE)])
    assert names(lanes.take(1, 10.0)) == [("k", 5)]


def test_bulk_leaves_half_of_the_room_to_what_is_live():
    lanes = both(capacity=16)
    assert lanes.room_for(BULK) == 8
    lanes.add(bulk("b1", "b2", "b3"))
    assert (lanes.room_for(LIVE), lanes.room_for(BULK)) == (13, 5)
    lanes.add(live(*(f"a{number}" for number in range(12))))
    assert (lanes.room_for(LIVE), lanes.room_for(BULK)) == (1, 1)


def test_live_leaves_a_part_of_the_room_to_bulk():
    """However much of it comes: bulk that finds no room would be starved."""
    lanes = both(capacity=16)
    assert lanes.room_for(LIVE) == 14
    lanes.add([*live(*(f"a{number}" for number in range(14))), *bulk("b1")])
    assert (lanes.room_for(LIVE), lanes.room_for(BULK)) == (0, 1)


def test_live_has_all_of_the_room_where_nothing_is_bulk_or_there_is_room_for_one_only():
    assert (Lanes(16).room_for(LIVE), both(capacity=1).room_for(LIVE)) == (16, 1)


def test_bulk_finds_room_in_the_smallest_lanes_too():
    lanes = both(capacity=1)
    assert lanes.room_for(BULK) == 1
    lanes.add(bulk("b"))
    assert lanes.room_for(BULK) == 0


def test_room_comes_back_whatever_became_of_a_bulk_change():
    lanes = both(capacity=10)
    lanes.add([*bulk("b1", "b2", "b3", "b4", "b5"), change("b1", 0)])
    one, two, three, *_ = lanes.take(10, 0.0)
    assert lanes.room_for(BULK) == 0
    lanes.finish(one, Outcome.APPLIED, one.change.order)
    lanes.dead_letter(two)
    lanes.leave(three)
    assert lanes.room_for(BULK) == 3
    lanes.drain()
    assert (lanes.room_for(BULK), len(lanes)) == (3, 2)


def test_blocked_bulk_changes_take_at_most_half_of_the_room_of_bulk():
    """Rule 15: other bulk changes go on, and live ones are not asked to leave for them."""
    lanes = both(capacity=16)
    lanes.add([*bulk(*(f"b{number}" for number in range(8))), *live("a")])
    for one in lanes.take(20, 0.0):
        lanes.hold(one, due=100.0)
    leaving = lanes.evict_blocked(0.0)
    assert (len(leaving), {one.source for one in leaving}) == (4, {BULK})
    assert lanes.room_for(BULK) == 4


def test_a_change_that_left_comes_back_as_a_new_one():
    lanes = both()
    lanes.add([change("k", 2), change("k", 1)])
    [newest] = lanes.take(10, 0.0)
    lanes.leave(newest)
    assert (len(lanes), names(lanes.take(10, 0.0))) == (1, [("k", 1)])
    lanes.add([change("k", 2)])
    assert len(lanes) == 2


def test_what_stands_here_is_told_by_kind():
    lanes = both()
    lanes.add([*live("a", "b"), *bulk("c", "d", "e")])
    first, second, *_ = lanes.take(4, 0.0)
    lanes.hold(second, due=10.0)
    assert lanes.counts() == (2, 3, 3, 1)
    lanes.finish(first, Outcome.APPLIED, first.change.order)
    assert lanes.counts() == (1, 3, 2, 1)


def test_an_outdated_place_in_the_line_of_bulk_is_nobodys():
    """The lane became live: its place among the bulk ones is not used, and costs no bulk change its turn."""
    lanes = both()
    lanes.add([*bulk("k", "b"), *live(*(f"a{number}" for number in range(LIVE_BEFORE_BULK + 1)))])
    lanes.add([change("k", 2, source=LIVE)])
    assert [key for key, _ in names(lanes.take(11, 0.0))][-3:] == ["b", "a8", "k"]


def test_room_comes_back_when_a_bulk_change_without_followers_is_committed():
    lanes = both(capacity=10)
    lanes.add(bulk("b"))
    [one] = lanes.take(10, 0.0)
    lanes.finish(one, Outcome.APPLIED, one.change.order)
    assert (lanes.room_for(BULK), lanes.counts()) == (5, (0, 0, 0, 0))
