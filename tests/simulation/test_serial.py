"""The merge queue keeps its promises in simulated worlds full of faults, and what is broken on purpose is seen."""

from collections import Counter

import pytest

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import quiet
from keywise.testing.simulator.serial.faults import KINDS
from keywise.testing.simulator.serial.seeds import GRADES, run_serial_seed, run_serial_seeds
from mutants.hunt import hunt_serial
from mutants.serial import SERIAL_MUTANTS

FIRST_SEEDS = range(120)
SEEDS_A_MUTANT = range(600)
"""It ends with the first that shows it; what needs a shared transaction and a lost turn is seen in one of about 150."""
NOT_ATOMIC = {"nested call"}
"""A call from within a transaction would wait for the transaction itself."""


@pytest.mark.parametrize("grade", GRADES)
def test_no_promise_is_broken_under_faults(grade):
    tally = run_serial_seeds(grade, FIRST_SEEDS)
    failures = [f"seed {one.seed}: {one.violation}\n" + "\n".join(one.trace) for one in tally.failures]
    assert not failures, "\n\n".join(failures)
    missing = set(KINDS) - set(tally.faults) - (NOT_ATOMIC if grade is Grade.ATOMIC else set())
    assert not missing, f"never injected: {sorted(missing)}"


@pytest.mark.parametrize("mutant", SERIAL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant):
    hunt = hunt_serial(mutant, SEEDS_A_MUTANT)
    assert hunt.violation is not None, f"{mutant.name} was not found in {hunt.seeds} seeds"


@pytest.mark.parametrize("seed", range(1, 13))
def test_a_seed_is_repeatable(seed):
    with quiet():
        first = run_serial_seed(seed, Grade.PLAIN)
        # They move the objects of the next world, whose addresses must not matter.
        others = [object() for _ in range(997 * seed)]
        again = run_serial_seed(seed, Grade.PLAIN)
    assert first.trace == again.trace and Counter(first.faults) == Counter(again.faults), len(others)
