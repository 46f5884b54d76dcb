"""Seeds that once found a fault of the product: each stands for a story that a later change could bring back."""

import pytest

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import run_seed

STORIES = {
    "a repair runs beside a write that no claim covers": (4511, Grade.CONDITIONAL),
    "an outage costs an attempt after a pause of the process": (2839, Grade.CONDITIONAL),
    "a repair that was only given back widens the probation window": (75, Grade.PLAIN),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_fault_that_was_mended_stays_away(story: str):
    assert run_seed(*STORIES[story]).violations == []
