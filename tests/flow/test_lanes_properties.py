"""Random days of a consumer's lanes: no ticket is ever lost, doubled or worked on beside another of its key."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flow.tickets import ticket
from keywise.core.change import Outcome
from keywise.core.entry import Level
from keywise.core.limits import Debounce
from keywise.flow.coalesce import coalesce
from keywise.flow.lanes import LIVE_BEFORE_BULK, Lanes, Ticket

KEYS = st.sampled_from("abc")
VERSIONS = st.integers(1, 6)
LIVE, BULK = 0, 1
SOURCES = st.sampled_from([LIVE, BULK])
DEBOUNCES = st.sampled_from([None, None, Debounce(1.0, max_wait=3.0)])


class Day(RuleBasedStateMachine):
    """Everything that a consumer does with its lanes, beside a plain list of what is where."""

    @initialize(capacity=st.integers(1, 12), bulk=st.sampled_from([(), (BULK,)]), debounce=DEBOUNCES)
    def begin(self, capacity: int, bulk: tuple[int, ...], debounce: Debounce | None) -> None:
        self.lanes = Lanes(capacity, bulk=bulk, debounce=debounce)
        self.bulk, self.debounce = bulk, debounce
        self.now = 0.0
        self.blocked: dict[str, float] = {}
        """Until when nothing of a key may be taken."""
        self.numbers = 0
        self.inside: dict[int, Ticket] = {}
        self.working: list[Ticket] = []

    # What happens.

    @rule(changes=st.lists(st.tuples(KEYS, VERSIONS, SOURCES), min_size=1, max_size=6))
    def messages_arrive(self, changes: list[tuple[str, int, int]]) -> None:
        arrived = []
        for key, version, source in changes:
            self.numbers += 1
            arrived.append(ticket(key, version, self.numbers, source=source, at=self.now))
        self.lanes.add(arrived)
        self.inside.update({one.delivery.id: one for one in arrived})

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def a_message_arrives_again(self, data: st.DataObject) -> None:
        known = self.inside[data.draw(st.sampled_from(sorted(self.inside)))]
        self.numbers += 1
        again = ticket(
            known.change.key,
            known.change.version,
            known.delivery.id,
            receipt=self.numbers,
            source=known.source,
            at=self.now,
        )
        self.lanes.add([again])
        assert known.delivery.receipt == self.numbers

    @rule(limit=st.integers(0, 4), bulk_limit=st.none() | st.integers(0, 4))
    def a_batch_is_taken(self, limit: int, bulk_limit: int | None) -> None:
        mixed = {one.change.key for one in self.inside.values() if one.source not in self.bulk}
        taken = self.lanes.take(limit, self.now, bulk_limit)
        assert len(taken) <= limit
        assert bulk_limit is None or sum(one.change.key not in mixed for one in taken) <= bulk_limit
        for one in taken:
            self._begun(one)

    @rule()
    def one_is_taken_alone(self) -> None:
        one = next(iter(self.lanes.take_on_probation(Level.ALONE)), None)
        if one is not None:
            self._begun(one)

    @precondition(lambda self: self.working)
    @rule(data=st.data(), beyond=st.integers(0, 2))
    def work_is_committed(self, data: st.DataObject, beyond: int) -> None:
        one = self._any_worker(data)
        era, version, generation = one.change.order
        upto = (era, version + beyond, generation)
        ended = self.lanes.finish(one, Outcome.APPLIED, upto)
        assert ended[0] == (one, Outcome.APPLIED)
        assert all(other.change.order <= upto and other.change.key == one.change.key for other, _ in ended)
        self._left([other for other, _ in ended])
        waiting = [other for other in self.inside.values() if other.change.key == one.change.key]
        assert all(other.change.order > upto for other in waiting), "every follower ended with it"

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def work_is_buried(self, data: st.DataObject) -> None:
        one = self._any_worker(data)
        assert self.lanes.dead_letter(one) == [(one, Outcome.DEAD)]
        self._left([one])

    @precondition(lambda self: self.working)
    @rule(data=st.data(), wait_s=st.sampled_from([0.0, 1.0, 5.0]), blocks_newer=st.booleans())
    def work_has_to_wait(self, data: st.DataObject, wait_s: float, blocks_newer: bool) -> None:
        one = self._any_worker(data)
        self.lanes.hold(one, self.now + wait_s, blocks_newer=blocks_newer)
        if blocks_newer:
            self.blocked[one.change.key] = self.now + wait_s

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def work_goes_away_for_now(self, data: st.DataObject) -> None:
        one = self._any_worker(data)
        self.lanes.leave(one)
        self._left([one])

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def work_is_isolated(self, data: st.DataObject) -> None:
        self.lanes.put_on_probation(self._any_worker(data), Level.ALONE)

    @rule()
    def the_surplus_leaves(self) -> None:
        working = {id(one) for one in self.working}
        leaving = self.lanes.evict_blocked(self.now)
        assert all(id(one) not in working for one in leaving), "what is worked on stays"
        self._left(leaving)
        self._forget_blocked_keys_that_left()
        assert self.lanes.evict_blocked(self.now) == []
        assert self.lanes.blocked(self.now) <= self.lanes.capacity // 2
        assert self.lanes.next_blocked(self.now) is None or self.lanes.next_blocked(self.now) > self.now

    @rule()
    def everything_that_waits_leaves(self) -> None:
        self._left(self.lanes.drain())
        self._forget_blocked_keys_that_left()
        assert len(self.inside) == len(self.working)

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # What holds at all times.

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        held = Counter(one.delivery.id for one in self.lanes.tickets())
        assert held == Counter(self.inside.keys())
        assert len(self.lanes) == len(self.inside)
        assert self.lanes.room == max(0, self.lanes.capacity - len(self.inside))

    @invariant()
    def one_change_of_a_key_is_worked_on_at_a_time(self) -> None:
        assert all(count == 1 for count in Counter(one.change.key for one in self.working).values())

    @invariant()
    def room_and_counts_are_those_of_what_is_inside(self) -> None:
        bulk = sum(one.source in self.bulk for one in self.inside.values())
        live_and_bulk = self.lanes.counts()[:2]
        assert live_and_bulk == (len(self.inside) - bulk, bulk)
        if self.bulk:
            assert self.lanes.room_for(BULK) == max(0, min(self.lanes.room, max(1, self.lanes.capacity // 2) - bulk))
        assert bool(self.lanes.room) == any(self.lanes.room_for(source) for source in (LIVE, *self.bulk))

    @invariant()
    def no_key_waits_for_longer_than_it_was_told(self) -> None:
        due = self.lanes.next_due()
        assert due is None or due <= self.now + 5.0

    def teardown(self) -> None:
        """Whatever happened, all that is left can be brought to its end."""
        if not hasattr(self, "lanes"):
            return
        for one in list(self.working):
            self.lanes.hold(one, self.now)
        self.working.clear()
        for _ in range(len(self.inside) + 1):
            taken = self.lanes.take(100, self.now + 1000.0)
            taken += self.lanes.take_on_probation(Level.ALONE)
            for one in taken:
                self._left([one for one, _ in self.lanes.finish(one, Outcome.APPLIED, one.change.order)])
        assert self.inside == {}, "a ticket that nobody can reach is lost"

    # The list of what is where.

    def _begun(self, one: Ticket) -> None:
        same = [other for other in self.inside.values() if other.change.key == one.change.key]
        assert one.change.order == max(other.change.order for other in same), "the newest goes first"
        assert self.blocked.pop(one.change.key, 0.0) <= self.now, "a firm wait holds for every change of its key"
        self.working.append(one)

    def _forget_blocked_keys_that_left(self) -> None:
        """What comes back later is asked for anew."""
        here = {one.change.key for one in self.inside.values()}
        self.blocked = {key: until for key, until in self.blocked.items() if key in here}

    def _any_worker(self, data: st.DataObject) -> Ticket:
        return self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))

    def _left(self, tickets: list[Ticket]) -> None:
        for one in tickets:
            assert self.inside.pop(one.delivery.id) is one


Day.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_no_ticket_is_lost_or_doubled_on_any_day = Day.TestCase


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_neither_line_starves_the_other(changes: list[tuple[bool, int]], limits: list[int]):
    """Between two bulk changes, while one waits, never more live ones than allowed; live ones wait for one at most."""
    lanes = Lanes(1000, bulk={BULK})
    tickets = [ticket(f"{is_bulk} {key}", 1, n, source=int(is_bulk)) for n, (is_bulk, key) in enumerate(changes)]
    lanes.add(tickets)
    order: list[bool] = []
    for place in range(200):
        taken = lanes.take(limits[place % len(limits)], 0.0)
        order += [one.source == BULK for one in taken]
    assert len(order) == len({one.change.key for one in tickets})
    while any(order) and not all(order):
        row = order.index(True)
        assert row == LIVE_BEFORE_BULK or not any(is_bulk is False for is_bulk in order[row:]), order
        order = order[row + 1 :]


@given(st.lists(st.tuples(KEYS, VERSIONS), max_size=12))
def test_a_fold_neither_loses_nor_doubles_a_ticket(changes: list[tuple[str, int]]):
    tickets = [ticket(key, version, number) for number, (key, version) in enumerate(changes)]
    coalesced = coalesce(tickets)
    kept = [*coalesced.survivors, *(one for some in coalesced.followers.values() for one in some)]
    assert sorted(one.delivery.id for one in kept) == list(range(len(changes)))
    newest = {one.change.key: one.change.order for one in sorted(tickets, key=lambda one: one.change.order)}
    assert {one.change.key: one.change.order for one in coalesced.survivors} == newest
