"""Who is next, what a lost runner leaves behind, and who would wait for ever: the rules of turns."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from keywise.core.serial import rules
from keywise.core.serial.contract import Ending, Mode, Record, Reply, Request, Switch, TurnPolicy

OWNERS = ("", "w1", "w2", "w3")
ALIVE = {"w1", "w2"}


def record(place: int = 1, *, runner: str = "", deadline: float = math.inf, **more) -> Record:
    request = Request(id=f"r{place}", key="a", body=b"", runner=runner, mode=more.pop("mode", Mode.ON))
    return Record(request=request, place=place, asked_at=0.0, deadline=deadline, **more)


records = st.builds(
    lambda runner, deadline: record(runner=runner, deadline=deadline),
    st.sampled_from(OWNERS),
    st.sampled_from((5.0, 10.0, 15.0)),
)
lines = st.lists(records, max_size=8).map(
    lambda found: [
        replace(one, place=n, request=replace(one.request, id=f"r{n}")) for n, one in enumerate(found, start=1)
    ]
)


@given(lines, st.integers(1, 4), st.sampled_from(("w1", "w2")))
def test_a_run_is_the_beginning_of_the_line_without_those_that_can_have_no_turn(line, run_max, owner):
    now = 10.0
    ended, run = rules.run_of(line, owner, run_max, now, ALIVE.__contains__)
    able = [one for one in line if one.deadline > now and one.request.runner in {"", *ALIVE}]
    assert run == able[: len(run)], "somebody was passed over"
    assert len(run) <= run_max
    assert all(one.request.runner in ("", owner) for one in run)
    rest = able[len(run) :]
    assert not rest or len(run) == run_max or rest[0].request.runner not in ("", owner), "the run could go on"
    assert {reply.id for reply in ended}.isdisjoint(one.request.id for one in able)
    assert all(reply.outcome is Ending.EXPIRED for reply in ended)


@given(lines, st.sampled_from(("w1", "w2")))
def test_whoever_is_in_front_of_a_run_and_not_in_it_has_ended(line, owner):
    ended, run = rules.run_of(line, owner, 2, 10.0, ALIVE.__contains__)
    gone = {reply.id for reply in ended}
    if run:
        before = [one for one in line if one.place < run[-1].place and one not in run]
        assert {one.request.id for one in before} <= gone


def test_a_request_at_its_very_deadline_is_over():
    assert rules.departure(record(deadline=10.0), 10.0, True).outcome is Ending.EXPIRED
    assert rules.departure(record(deadline=10.0), 9.99, True) is None


def test_a_request_that_anybody_may_run_needs_no_caller():
    assert rules.departure(record(), 0.0, False) is None
    assert rules.departure(record(runner="w3"), 0.0, False).cause == rules.CALLER_GONE


# Circles.


graphs = st.dictionaries(st.integers(1, 6), st.sets(st.integers(0, 6), max_size=3), max_size=6)


@given(graphs, st.sets(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 6))
def test_a_circle_is_found_exactly_where_the_holders_lead_back_to_the_caller(waits, within, start):
    """Keys are numbers, each held by the token of the same number; 0 is held by nobody."""

    def leads_back(key: int, seen: frozenset[int]) -> bool:
        if key == 0 or key in seen:
            return False
        return key in within or any(leads_back(further, seen | {key}) for further in waits.get(key, ()))

    def spots(token):
        return [(("f", str(key)), 0) for key in waits.get(token, ())]

    path = rules.circle((("f", str(start)), 0), tuple(within), lambda spot: {int(spot[1])} - {0}, spots)
    assert (path is not None) == leads_back(start, frozenset())
    if path is not None:
        keys = [int(key) for _, key in path]
        assert keys[0] == start and keys[-1] in within
        assert all(after in waits[before] for before, after in itertools.pairwise(keys))
        assert all(repr(str(key)) in rules.circle_cause(path) for key in keys)


# Ids.


def test_an_id_that_has_ended_has_its_reply_unless_it_expired():
    request = record().request
    for outcome in (Ending.DONE, Ending.FAILED, Ending.CANCELLED, Ending.LOST):
        reply = Reply(id="r1", outcome=outcome)
        assert rules.arrival(record(reply=reply), request) is reply
    expired = record(reply=Reply(id="r1", outcome=Ending.EXPIRED))
    assert rules.arrival(expired, request) is rules.Arrival.NEW
    assert rules.arrival(None, request) is rules.Arrival.NEW
    assert rules.arrival(record(), request) is rules.Arrival.JOINED


def test_an_id_stands_for_one_key_and_body_even_if_it_expired():
    expired = record(reply=Reply(id="r1", outcome=Ending.EXPIRED))
    for other in ({"key": "b"}, {"body": b"x"}):
        answer = rules.arrival(expired, replace(record().request, **other))
        assert answer.outcome is Ending.REFUSED and "'r1'" in answer.cause


# Ends.


def test_a_reply_needs_the_token_of_the_present_turn():
    reply = Reply(id="r1", outcome=Ending.DONE, token=7)
    assert rules.word_on(record(token=7), reply) is rules.Word.ENDS
    assert rules.word_on(record(token=8), reply) is rules.Word.REFUSED
    assert rules.word_on(None, reply) is rules.Word.REFUSED
    assert rules.word_on(record(), replace(reply, token=0)) is rules.Word.REFUSED
    assert rules.word_on(record(token=7, reply=reply), reply) is rules.Word.ALREADY
    assert rules.word_on(record(token=7, reply=replace(reply, body=b"x")), reply) is rules.Word.REFUSED


def test_only_what_was_done_in_a_transaction_is_run_again():
    plain, atomic = TurnPolicy(), TurnPolicy(atomic=True, attempts_max=2)
    new = record(deadline=100.0)
    begun = rules.begun(new, 7, "w1", 1.0, atomic)
    for finder in (plain, atomic):
        assert rules.after_loss(rules.begun(new, 7, "w1", 1.0, plain), 10.0, finder).outcome is Ending.LOST
        assert rules.after_loss(begun, 10.0, finder) is None
    assert rules.after_loss(begun, 100.0, atomic).outcome is Ending.EXPIRED
    assert rules.after_loss(replace(begun, attempts=2), 10.0, atomic).outcome is Ending.FAILED
    observed = record(token=7, attempts=1, mode=Mode.OBSERVE)
    assert rules.after_loss(observed, 10.0, plain).outcome is Ending.LOST


def test_a_turn_that_was_given_back_does_not_count_and_one_that_was_lost_does():
    begun = rules.begun(record(), 7, "w1", 10.0, TurnPolicy(atomic=True))
    assert rules.given_back(begun) == record()
    again = rules.begun(rules.waiting_again(begun), 8, "w2", 20.0, TurnPolicy())
    assert (again.token, again.owner, again.attempts) == (8, "w2", 2)
    assert rules.turn_of(again, 20.0).attempts == 1


def test_what_runs_or_has_ended_cannot_be_withdrawn():
    assert rules.withdrawn(record(), Ending.CANCELLED, "why").cause == "why"
    assert rules.withdrawn(record(token=7), Ending.CANCELLED, "") is None
    assert rules.withdrawn(record(reply=Reply(id="r1", outcome=Ending.DONE)), Ending.CANCELLED, "") is None


# Modes.


def switch(keys: str, mode: Mode, at: float = 0.0, *, until: float = 0.0) -> Switch:
    return Switch(keys=keys, mode=mode, is_pattern="*" in keys, at=at, observe_until=until)


def test_the_switch_of_the_key_goes_before_the_newest_pattern():
    request = record().request
    for switches, expected in (
        ([], Mode.ON),
        ([switch("*", Mode.OFF)], Mode.OFF),
        ([switch("a*", Mode.OFF, 1.0), switch("*", Mode.OBSERVE, 2.0)], Mode.OBSERVE),
        ([switch("a", Mode.OFF, 1.0), switch("*", Mode.OBSERVE, 2.0)], Mode.OFF),
        ([switch("b", Mode.OFF)], Mode.ON),
        ([switch("a", Mode.ON, until=10.0)], Mode.OBSERVE),
        ([switch("a", Mode.OFF, until=10.0)], Mode.OFF),
    ):
        assert rules.mode_of(request, switches, 5.0, False) is expected, switches
    assert rules.mode_of(request, [switch("a", Mode.ON, until=10.0)], 10.0, False) is Mode.ON


def test_nothing_is_observed_beside_a_line():
    assert rules.mode_of(record().request, [switch("*", Mode.OBSERVE)], 5.0, True) is Mode.ON
    assert rules.mode_of(record().request, [switch("*", Mode.OFF)], 5.0, True) is Mode.OFF
