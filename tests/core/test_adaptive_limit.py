"""A store that is too busy gets less and later, and more again when it copes."""

import pytest

from keywise.core.adaptive_limit import BACKOFF_MAX_S, BACKOFF_S, AdaptiveLimit


class Hands:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def refuse(adaptive_limit: AdaptiveLimit, clock: Hands, times: int, **how: bool) -> float:
    """Refuse each time that it is asked again; return how long it is left alone in the end."""
    for _ in range(times):
        clock.now += max(0.0, adaptive_limit.wait_s)
        adaptive_limit.record_refusal("full", **how)
    return adaptive_limit.wait_s


def test_an_engine_that_is_too_busy_gets_less_and_later():
    clock = Hands()
    adaptive_limit = AdaptiveLimit(100, clock)
    assert adaptive_limit.wait_s <= 0
    assert refuse(adaptive_limit, clock, 1, is_crowded=True) == pytest.approx(2 * BACKOFF_S)
    assert adaptive_limit.limit == 50
    assert refuse(adaptive_limit, clock, 1, is_crowded=True) == pytest.approx(4 * BACKOFF_S)
    assert adaptive_limit.limit == 25
    assert refuse(adaptive_limit, clock, 20, is_crowded=True) == pytest.approx(BACKOFF_MAX_S)
    assert adaptive_limit.limit == 1


def test_an_engine_that_copes_gets_more_again():
    clock = Hands()
    adaptive_limit = AdaptiveLimit(100, clock)
    refuse(adaptive_limit, clock, 20, is_crowded=True)
    clock.now += BACKOFF_MAX_S
    assert adaptive_limit.wait_s <= 0
    adaptive_limit.record_success(1)
    adaptive_limit.record_success(1)
    assert adaptive_limit.limit == 2, "one change more than before, and a smaller request tells nothing"
    for _ in range(50):
        adaptive_limit.record_success(100)
    assert adaptive_limit.limit == 100
    assert refuse(adaptive_limit, clock, 1, is_crowded=False) == pytest.approx(2 * BACKOFF_S)
    assert adaptive_limit.limit == 100, "fewer at once would not help"


def test_requests_that_are_refused_side_by_side_count_once():
    adaptive_limit = AdaptiveLimit(100, Hands())
    for _ in range(16):
        adaptive_limit.record_refusal("full", is_crowded=True)
    assert adaptive_limit.limit == 50 and adaptive_limit.wait_s == pytest.approx(2 * BACKOFF_S)


def test_an_engine_that_says_how_long_is_left_alone_for_as_long():
    adaptive_limit = AdaptiveLimit(100, Hands())
    adaptive_limit.record_refusal("full", wait_s=30.0, is_crowded=True)
    adaptive_limit.record_refusal("away", is_crowded=False)
    assert adaptive_limit.wait_s == pytest.approx(30.0), "another refusal does not shorten it"
    assert adaptive_limit.cause == "away"


def test_a_part_that_is_refused_does_not_stop_the_rest_for_long():
    clock = Hands()
    assert refuse(AdaptiveLimit(100, clock), clock, 10, is_crowded=False, is_whole=False) == pytest.approx(BACKOFF_S)


def test_a_step_is_added_each_time_that_as_much_as_the_limit_went_well():
    clock = Hands()
    adaptive_limit = AdaptiveLimit(32, clock, step=1)
    assert refuse(adaptive_limit, clock, 1, is_crowded=True) > 0 and adaptive_limit.limit == 16
    adaptive_limit.record_success(15)
    assert adaptive_limit.limit == 16
    adaptive_limit.record_success(16)
    assert adaptive_limit.limit == 17
