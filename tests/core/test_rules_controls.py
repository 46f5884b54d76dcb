"""Rates and eras as the rules decide them: a burst and then an even pace; and whatever was, a new era is newer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, PLAIN, Controls, Move, Pause, ReindexRun, RunState, controls_of, text_of
from keywise.core.entry import Certainty, Commit, CommitResult, Entry, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.ledger import Failure
from keywise.core.limits import Rate

TERMS = LeaseTerms("w1", 30.0)
PER_S = 60.0
versions = st.integers(VERSION_MIN, VERSION_MAX) | st.integers(-3, 3)
rates = st.builds(Rate, st.integers(1, 5), st.just(PER_S))


def dispatched(rate: Rate, waits: list[float]) -> list[float]:
    """When a key is dispatched that is asked for after each wait: every time the rate allows it."""
    entry, now, found = rules.EMPTY, 0.0, []
    policy = LedgerPolicy(rate=rate)
    for version, wait_s in enumerate(waits):
        now += wait_s
        header = ChangeHeader("a", order_of(version))
        if rules.decide(entry, header, now, policy, TERMS) is None:
            entry, claim = rules.grant(entry, header, version + 1, now, TERMS, policy)
            entry, _ = rules.commit(entry, Commit(claim), now, policy)
            found.append(now)
    return found


@given(rate=rates, waits=st.lists(st.floats(0.0, PER_S), max_size=60))
def test_no_stretch_has_more_than_a_burst_and_an_even_pace(rate, waits):
    times = dispatched(rate, waits)
    for start in range(len(times)):
        for end in range(start, len(times)):
            evenly = (times[end] - times[start]) / rate.interval_s
            assert end - start + 1 <= rate.n + evenly + 1e-6


@given(rate=rates)
def test_a_burst_is_as_large_as_the_rate_and_comes_back_after_the_whole_stretch(rate):
    assert len(dispatched(rate, [0.0] * (rate.n + 5))) == rate.n
    assert len(dispatched(rate, [0.0] * 9 + [PER_S + 4.0] + [0.0] * 9)) == 2 * rate.n


@given(rate=rates, waits=st.lists(st.floats(0.0, PER_S), max_size=20))
def test_after_the_wait_that_was_told_a_dispatch_is_allowed(rate, waits):
    entry, now, policy = rules.EMPTY, 0.0, LedgerPolicy(rate=rate)
    for wait_s in waits:
        now += wait_s
        entry = rules.charged(entry, now, policy)
    refusal = rules.decide(entry, ChangeHeader("a", order_of(1)), now, policy, TERMS)
    if refusal is not None:
        assert refusal.reason is RefusalReason.LIMITED
        again = rules.decide(entry, ChangeHeader("a", order_of(1)), now + refusal.wait_s + 1e-6, policy, TERMS)
        assert again is None


@pytest.mark.parametrize("ending", ["commit", "fail", "release", "dead_letter"])
def test_a_dispatch_stays_charged_whatever_becomes_of_it(ending):
    policy = LedgerPolicy(rate=Rate(1, per=PER_S))
    entry, claim = rules.grant(None, ChangeHeader("a", order_of(1)), 1, 0.0, TERMS, policy)
    after = {
        "commit": lambda: rules.commit(entry, Commit(claim), 1.0, policy)[0],
        "fail": lambda: rules.fail(entry, Failure(claim, Certainty.CLEAN), 1.0, policy),
        "release": lambda: rules.release(entry, claim),
        "dead_letter": lambda: rules.dead_letter(entry, claim, Certainty.CLEAN, 1.0, policy),
    }[ending]()
    refusal = rules.decide(after, ChangeHeader("a", order_of(2)), 2.0, policy, TERMS)
    assert refusal is not None and (refusal.reason, refusal.wait_s) == (RefusalReason.LIMITED, PER_S - 2.0)


def test_without_a_rate_nothing_is_charged():
    assert rules.charged(rules.EMPTY, 5.0, LedgerPolicy()) == rules.EMPTY


@given(mark=versions, next_one=versions, key_era=st.integers(0, 3), era=st.integers(0, 3))
def test_after_a_reset_any_version_is_granted_and_marks_in_the_new_era(mark, next_one, key_era, era):
    controls, before = Controls(era=era), Entry((key_era, mark, 0), token=7)
    [held] = [rules.grant(replace(before, token=0), ChangeHeader("a", None), 9, 0.0, TERMS, LedgerPolicy())]
    entry = rules.reset(*held, controls)
    assert entry is not None
    assert entry.mark == before.mark and entry.token == 0
    header = rules.in_era(ChangeHeader("a", order_of(next_one)), entry, controls)
    assert (
        rules.decide_under(controls, entry, ChangeHeader("a", order_of(next_one)), 0.0, LedgerPolicy(), TERMS) is None
    )
    entry, claim = rules.grant(entry, header, 10, 0.0, TERMS, LedgerPolicy())
    entry, result = rules.commit(entry, Commit(claim), 0.0, LedgerPolicy())
    assert result is CommitResult.COMMITTED
    assert entry is not None and entry.mark == (1 + max(era, key_era), next_one, 0)
    assert entry.era == 0, "the mark says it now, so an idle entry stays small"


@given(mark=versions, version=versions, era=st.integers(1, 3))
def test_an_era_of_all_keys_puts_all_that_was_behind_it(mark, version, era):
    controls = Controls(era=era)
    assert (
        rules.decide_under(controls, Entry((0, mark, 0)), ChangeHeader("a", order_of(version)), 0.0, LedgerPolicy())
        is None
    )
    within = rules.decide_under(
        controls, Entry((era, mark, 0)), ChangeHeader("a", order_of(version)), 0.0, LedgerPolicy()
    )
    plain = rules.decide(Entry((0, mark, 0)), ChangeHeader("a", order_of(version)), 0.0, LedgerPolicy())
    assert within == plain, "upstream, which knows no era, is told the mark as it knows it"


@given(era=st.integers(1, 3), version=versions)
def test_a_change_that_names_its_era_keeps_it(era, version):
    header = ChangeHeader("a", order_of(version, era))
    assert rules.in_era(header, Entry((5, 0, 0)), Controls(era=4)) is header
    assert rules.in_era(ChangeHeader("a", None), None, Controls(era=4)).order is None


@pytest.mark.parametrize("pause", [Pause("a"), Pause("?", is_pattern=True), Pause(EVERYTHING, is_pattern=True)])
def test_a_pause_refuses_what_would_be_granted_and_nothing_else(pause):
    paused, entry = Controls(pauses=(pause,)), Entry((0, 5, 0))
    for version in (4, 5, 6):
        header = ChangeHeader("a", order_of(version))
        plain = rules.decide_under(PLAIN, entry, header, 0.0, LedgerPolicy(), TERMS)
        found = rules.decide_under(paused, entry, header, 0.0, LedgerPolicy(), TERMS)
        assert found is not None
        assert found.reason is (RefusalReason.PAUSED if plain is None else plain.reason)
    despite = replace(TERMS, despite_pause=True)
    assert rules.decide_under(paused, entry, ChangeHeader("a", order_of(6)), 0.0, LedgerPolicy(), despite) is None


RUNNING = ReindexRun(3, RunState.SCANNING, by="ann", why='{"era":1,"pauses":[1],"move":{}')
MOVE = Move("one", '"move":null,', 2**62, is_called=True)


@pytest.mark.parametrize(
    "controls",
    [
        PLAIN,
        Controls(resync_at=5.0),
        Controls(scale="s3-sequencer"),
        Controls(resync_at=5.0, scale="s3-sequencer", run=RUNNING),
        Controls(1, run=RUNNING),
        Controls(pauses=(Pause("a"),), run=RUNNING),
        Controls(2, (Pause("a"),)),
        Controls(target='"move":', spare="one", target_epoch=3),
        Controls(move=MOVE),
        Controls(2, (Pause("a"),), MOVE, run=RUNNING),
    ],
)
def test_the_text_of_controls_shows_at_its_beginning_whether_they_decide_claims(controls):
    """Stores that claim in one step compare this text, and read nothing behind it."""
    text = text_of(controls)
    assert (text == "{}" or text.startswith('{"era":0,"pauses":[],"move":null,')) is controls.is_plain
    assert controls_of(text) == controls_of(text.encode()) == controls
