"""The gap between two targets at a key, and the order at which each takes what closes it."""

from hypothesis import given
from hypothesis import strategies as st

from keywise.core.entry import Entry
from keywise.reindex.gap import UNKNOWN_KEY, GapKind, KeyState, gap_kind, order_to_write, state_of

orders = st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 2))
states = st.one_of(st.just(UNKNOWN_KEY), st.builds(KeyState, orders, st.booleans()))


def test_generations_make_no_gap():
    assert gap_kind(KeyState((0, 5, 3)), KeyState((0, 5, 0))) is GapKind.NONE


def test_a_deletion_of_the_live_target_is_copied_without_a_look_at_the_origin():
    assert gap_kind(KeyState((0, 5, 0), deleted=True), UNKNOWN_KEY) is GapKind.TOMBSTONE
    assert gap_kind(KeyState((0, 5, 0), deleted=True), KeyState((0, 4, 0))) is GapKind.TOMBSTONE
    # An operator has removed the version that both have.
    assert gap_kind(KeyState((0, 5, 1), deleted=True), KeyState((0, 5, 0))) is GapKind.TOMBSTONE


def test_a_target_that_is_ahead_is_no_reason_to_delete():
    assert gap_kind(KeyState((0, 5, 0), deleted=True), KeyState((0, 6, 0))) is GapKind.ROW
    assert gap_kind(UNKNOWN_KEY, KeyState((0, 6, 0))) is GapKind.ROW


def test_a_key_is_not_calm_while_something_is_going_on():
    assert state_of(Entry(mark=(0, 1, 0))).is_resolved
    assert not state_of(Entry(mark=(0, 1, 0), token=7)).is_resolved
    assert not state_of(Entry(mark=(0, 1, 0), suspicions=1)).is_resolved
    assert not state_of(Entry(mark=(0, 1, 0), unknown=(0, 2, 0))).is_resolved


@given(states, states)
def test_a_copied_tombstone_leaves_no_gap(live: KeyState, other: KeyState):
    if gap_kind(live, other) is GapKind.TOMBSTONE:
        assert live.mark is not None
        order = order_to_write(other, live.mark, deleted=True)
        assert order is not None and (other.mark is None or order > other.mark)
        assert gap_kind(live, KeyState(order, deleted=True)) is GapKind.NONE


@given(states, states, orders, st.booleans())
def test_a_row_that_is_not_older_leaves_no_gap(live: KeyState, other: KeyState, row, deleted: bool):
    marks = [state.mark for state in (live, other) if state.mark is not None]
    if any(row[:2] < mark[:2] for mark in marks) or gap_kind(live, other) is not GapKind.ROW:
        return
    if live.mark is not None and row[:2] == live.mark[:2]:
        deleted = live.deleted  # One version has one content, and the live target has it already.
    after = [KeyState(order_to_write(state, row, deleted=deleted) or state.mark, deleted) for state in (live, other)]
    assert gap_kind(*after) is GapKind.NONE


@given(states, orders, st.booleans())
def test_no_target_takes_an_order_that_its_ledger_would_refuse(state: KeyState, order, deleted: bool):
    taken = order_to_write(state, order, deleted=deleted)
    assert taken is None or state.mark is None or taken > state.mark
