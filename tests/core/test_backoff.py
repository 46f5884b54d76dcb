"""How long to wait before the next try: twice as long each time, up to a limit, and never all at once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise.core.backoff import backoff_s, shortened


class Drawn(random.Random):
    """Draws one number for ever."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def random(self) -> float:
        return self._number


@pytest.mark.parametrize(("attempts", "whole"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (8, 60.0), (1000, 60.0)])
def test_each_wait_is_twice_as_long_up_to_the_limit(attempts: int, whole: float):
    assert backoff_s(attempts, 0.5, 60.0, Drawn(0.0)) == whole / 2
    assert backoff_s(attempts, 0.5, 60.0, Drawn(1.0)) == whole


def test_a_limit_below_the_first_wait_counts():
    assert backoff_s(1, 10.0, 2.0, Drawn(1.0)) == 2.0


@given(st.integers(1, 10**6), st.floats(0.01, 100.0), st.floats(0.01, 1000.0), st.integers())
def test_a_wait_is_between_half_of_it_and_all_of_it(attempts: int, first_s: float, max_s: float, seed: int):
    wait_s = backoff_s(attempts, first_s, max_s, random.Random(seed))
    assert min(max_s, first_s) / 2 <= wait_s <= max_s


def test_crowds_disperse():
    rng = random.Random(1)
    assert len({backoff_s(5, 0.5, 60.0, rng) for _ in range(50)}) == 50


def test_a_batch_is_half_as_large_after_each_vain_try_and_never_empty():
    assert [shortened(1000, vain) for vain in (0, 1, 2, 9, 10, 5000)] == [1000, 500, 250, 1, 1, 1]
