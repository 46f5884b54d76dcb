"""Rows of a reindex: the highest version wins in any order, and what an operator removed stays removed."""

import itertools

import pytest
from msgspec.structs import replace

from core.one_key import PLAIN, SAFE, OneKey, committed
from core.row_histories import RowHistory
from keywise.core import ledger_steps, rules
from keywise.core.change import Change, ChangeHeader, above, order_of
from keywise.core.controls import Controls
from keywise.core.entry import Claim, Entry, Refusal, RefusalReason
from mutants import MUTANTS
from mutants.moves import MOVES
from mutants.rows import ROWS

HISTORIES = range(1500)
BOTH_POLICIES = pytest.mark.parametrize("policy", [PLAIN, SAFE], ids=["plain", "safe"])


def row(version: int, generation: int, era: int = 0) -> ChangeHeader:
    return ChangeHeader("a", (era, version, generation), is_row=True)


def removed(version: int, generation: int = 1) -> OneKey:
    """A key that an operator has removed at a version."""
    key = committed(version)
    key.commit(key.ask_for(ChangeHeader("a", (0, version, generation), deleted=True)))
    return key


def test_a_row_at_the_version_of_a_removal_is_refused_and_the_mark_is_named():
    assert removed(5).ask_for(row(5, 2)) == Refusal(RefusalReason.REMOVED, mark=(0, 5, 1))
    assert committed(5, deleted=True).ask_for(row(5, 1)) == Refusal(RefusalReason.REMOVED, mark=(0, 5, 0))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (row(5, 3), RefusalReason.DUPLICATE),
        (row(5, 2), RefusalReason.STALE),
        (row(4, 9), RefusalReason.STALE),
        (row(6, 1), None),
        (row(5, 4, era=1), None),
        (ChangeHeader("a", (0, 5, 4)), None),
        (ChangeHeader("a", (0, 5, 4), deleted=True), None),
        (ChangeHeader("a", order_of(5)), RefusalReason.STALE),
    ],
)
def test_nothing_else_is_refused_as_removed(header, reason):
    answer = removed(5, generation=3).ask_for(header)
    assert isinstance(answer, Claim) if reason is None else answer.reason is reason


def test_a_row_is_written_above_what_is_not_deleted():
    assert isinstance(committed(5).ask_for(row(5, 1)), Claim)
    assert isinstance(OneKey().ask_for(row(5, 1)), Claim)


def test_a_removal_is_known_although_the_key_is_held_paused_or_in_another_era():
    key = removed(5)
    key.take(6)
    assert key.ask_for(row(5, 2), "w2").reason is RefusalReason.REMOVED
    in_era = Entry((3, 5, 1), deleted=True)
    refusal = rules.decide_under(Controls(era=3), in_era, row(5, 2), 0.0, PLAIN)
    assert refusal == Refusal(RefusalReason.REMOVED, mark=(0, 5, 1))
    assert rules.decide_under(Controls(era=4), in_era, row(5, 2), 0.0, PLAIN) is None, "a new era is newer"


def test_a_header_stays_a_row_in_every_era_and_beside_work_in_parts():
    raised = rules.current(row(5, 2), None, Controls(era=3))
    assert (raised.order, raised.is_row) == ((3, 5, 2), True)
    continued = rules.current(row(5, 2), Entry(advanced=(0, 6, 0)), Controls())
    assert (continued.order, continued.is_row) == ((0, 6, 0), True)
    assert replace(Change("a", order_of(5), is_row=True), body=b"{}").is_row


def test_a_row_is_never_plainly_newer():
    assert ledger_steps.is_plainly_newer(ChangeHeader("a", (0, 5, 1)), (0, 5, 0), 0.0)
    assert not ledger_steps.is_plainly_newer(row(5, 1), (0, 5, 0), 0.0)


def test_all_orders_of_a_row_a_removal_and_live_changes_end_right():
    """A row of version 5 meets live versions 5 and 6; an operator removes version 5 as soon as it is there."""
    live, newer, read = (ChangeHeader("a", order_of(5)), ChangeHeader("a", order_of(6)), row(5, 7))
    for count in (2, 3):
        for order in itertools.permutations((live, newer, read), count):
            key = OneKey()
            for header in order:
                answer = key.ask_for(header)
                if isinstance(answer, Claim):
                    key.commit(answer)
                    if answer.order[1] == 5:
                        key.commit(key.ask_for(ChangeHeader("a", above(key.entry.mark), deleted=True)))
            assert key.entry.deleted is (newer not in order)
            assert key.entry.mark[1] == (6 if newer in order else 5)


@BOTH_POLICIES
def test_the_highest_version_wins_and_a_removal_stays(policy):
    for seed in HISTORIES:
        assert RowHistory(seed, policy).run() == [], f"history {seed}"


@BOTH_POLICIES
@pytest.mark.parametrize("mutant", ROWS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant, policy):
    with mutant.alive() as errors:
        found = [seed for seed in HISTORIES if RowHistory(seed, policy).run()]
    assert (bool(found), errors) == (True, [])


def test_each_mutant_has_a_name_of_its_own():
    names = [mutant.name for mutant in (*MUTANTS, *ROWS, *MOVES)]
    assert len(names) == len(set(names))
