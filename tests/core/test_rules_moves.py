"""The barrier of a swap as the rules decide it: only the holder of its token passes, and nothing is lost behind it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.move_histories import MoveHistory
from core.one_key import LEASE_S, PLAIN, REDELIVERY_S, SAFE, OneKey, committed
from keywise.core import rules
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Move, Pause
from keywise.core.entry import Claim, Entry, LeaseTerms, LedgerPolicy, Level, Phase, Refusal, RefusalReason
from mutants.moves import MOVES

HISTORIES = range(1500)
BOTH_POLICIES = pytest.mark.parametrize("policy", [PLAIN, SAFE], ids=["plain", "safe"])
TERMS = LeaseTerms("w1", 30.0)
WAITS = Refusal(RefusalReason.PAUSED, rules.MOVE_LOOK_S)

tokens = st.integers(1, 3)
terms_of_any = st.none() | st.builds(
    LeaseTerms,
    st.just("w1"),
    st.just(30.0),
    st.sampled_from(Level),
    st.booleans(),
    move_token=st.integers(0, 3),
)
entries = st.none() | st.builds(
    Entry,
    st.none() | st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)),
    st.booleans(),
    token=st.sampled_from([0, 9]),
    owner=st.sampled_from(["w1", "w2"]),
    lease_until=st.sampled_from([5.0, 15.0]),
    tried=st.none() | st.builds(order_of, st.integers(0, 4)),
    attempts=st.integers(0, 1),
)
headers = st.builds(
    ChangeHeader,
    st.just("a"),
    st.none() | st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)),
    st.booleans(),
    is_row=st.booleans(),
)


@given(
    entry=entries,
    header=headers,
    terms=terms_of_any,
    token=tokens,
    era=st.integers(0, 2),
    is_paused=st.booleans(),
    is_called=st.booleans(),
)
def test_a_move_refuses_what_would_be_granted_except_to_its_token(
    entry, header, terms, token, era, is_paused, is_called
):
    still = Controls(era, (Pause(EVERYTHING, is_pattern=True),) if is_paused else ())
    moving = replace(still, move=Move("one", "other", token, is_called))
    before = rules.decide_under(still, entry, header, 10.0, LedgerPolicy(), terms)
    answer = rules.decide_under(moving, entry, header, 10.0, LedgerPolicy(), terms)
    passes = terms is not None and terms.move_token == token
    is_due = before is None or before.reason is RefusalReason.PAUSED
    assert answer == (WAITS if is_due and not passes else before)


def test_a_move_lets_no_pause_be_passed_and_a_pause_no_move():
    move = Move("one", "other", 3)
    both = Controls(pauses=(Pause("a"),), move=move)
    header, holder = ChangeHeader("a", order_of(1)), replace(TERMS, move_token=3)
    assert rules.decide_under(both, None, header, 0.0, LedgerPolicy(), replace(TERMS, despite_pause=True)) == WAITS
    paused = rules.decide_under(both, None, header, 0.0, LedgerPolicy(), holder)
    assert paused == Refusal(RefusalReason.PAUSED, rules.PAUSE_LOOK_S)
    assert rules.decide_under(both, None, header, 0.0, LedgerPolicy(), replace(holder, despite_pause=True)) is None


SWAP = LeaseTerms("coordinator", LEASE_S, Level.ALONE, move_token=7)


def excluded(key: OneKey, terms: LeaseTerms) -> Refusal | None:
    """Whether an exclusion is refused, as the ledger decides it during a move with the token 7."""
    controls = Controls(move=Move("one", "other", 7))
    return rules.decide_under(controls, key.entry, ChangeHeader("a", None), key.now, key.policy, terms)


@BOTH_POLICIES
def test_a_swap_excludes_a_dead_holder_at_once(policy):
    key = OneKey(policy)
    dead = key.take(5, "dead")
    assert excluded(key, SWAP).reason is RefusalReason.BUSY
    key.wait(LEASE_S)
    assert excluded(key, SWAP) is None
    repair = rules.decide(key.entry, ChangeHeader("a", None), key.now, policy, replace(SWAP, move_token=0))
    assert repair is not None and repair.reason is RefusalReason.DEFERRED, "a repair has to wait"
    key.entry, claim = rules.grant(key.entry, ChangeHeader("a", None), 99, key.now, SWAP, policy)
    assert claim.took_over
    key.entry = rules.release(key.entry, claim)
    assert key.commit(dead).value == "refused"
    assert (key.entry.mark, key.entry.token) == (None, 0)
    assert bool(key.entry.suspicions) is policy.intents, "its write may be in a plain store"
    assert isinstance(key.ask(5, "w2", level=Level.ALONE), Claim)


def test_a_swap_takes_no_change_over_from_a_dead_holder():
    """Only its exclusions pass: a change would be tried in turns with the one that may have killed the worker."""
    key = OneKey()
    key.take(5, "dead")
    key.wait(LEASE_S)
    refusal = rules.decide(key.entry, ChangeHeader("a", order_of(4)), key.now, PLAIN, SWAP)
    assert refusal is not None and refusal.reason is RefusalReason.DEFERRED


def test_deaths_are_counted_although_swaps_come_between():
    """A change that kills its worker every time ends as a dead letter, however often a swap has excluded its key."""
    key, crashes = committed(4), []
    for round_ in range(6):
        claim = key.take(5, f"w{round_}", level=Level.ALONE)
        crashes.append(claim.crashes)
        assert key.renew(claim, Phase.BEGUN)
        key.wait(LEASE_S)
        assert excluded(key, SWAP) is None
        key.entry, swap = rules.grant(key.entry, ChangeHeader("a", None), 1000 + round_, key.now, SWAP, key.policy)
        key.entry = rules.release(key.entry, swap)
        key.wait(1.0)
    assert crashes == sorted(crashes)
    assert crashes[-1] >= 2
    assert key.now < 1000.0 + REDELIVERY_S


@BOTH_POLICIES
def test_nothing_is_written_behind_the_last_pass(policy):
    for seed in HISTORIES:
        assert MoveHistory(seed, policy).run() == [], f"history {seed}"


@BOTH_POLICIES
@pytest.mark.parametrize("mutant", MOVES, ids=lambda mutant: mutant.name)
def test_a_broken_barrier_is_noticed(mutant, policy):
    with mutant.alive() as errors:
        found = [seed for seed in HISTORIES if MoveHistory(seed, policy).run()]
    assert (bool(found), errors) == (True, [])
