"""Reindexes, swaps and rollbacks keep their promises in simulated worlds, and what is broken on purpose is seen."""

from pathlib import Path

import pytest

from keywise.core.sink import Grade
from keywise.testing.simulator.reindex.faults import KINDS
from keywise.testing.simulator.reindex.seeds import run_reindex_seed, run_reindex_seeds
from keywise.testing.simulator.seeds import Tally, quiet
from mutants.hunt import hunt_reindex
from mutants.reindex import REINDEX_MUTANTS

FIRST_SEEDS = range(15)
REMEMBERED = Path(__file__).with_name("reindex_seeds.txt")
SELDOM = {"crash with a last row", "operator starts some rows"}
"""Some worlds have none of these."""

# Each is found within so many seeds; `make mutants` hunts for all of them.
QUICK_MUTANTS = {
    "an expired token survives the swap": 25,
    "claims of the other scope survive the swap": 60,
    "generation hides a newer version": 15,
    "two workers swap at once": 25,
    "a swap is called off after its call": 25,
    "the name moves before the last pass": 15,
    "a half-built target is adopted": 15,
    "a half-built table is adopted": 15,
    "a worker goes on with the old target": 15,
    "a sweep believes gone once": 200,
    "a cursor moves before its rows end": 15,
}


def remembered() -> list[tuple[Grade, int]]:
    lines = [line.split() for line in REMEMBERED.read_text().splitlines() if line and not line.startswith("#")]
    return [(Grade(grade), int(seed)) for grade, seed in lines]


def expect_no_violation(tally: Tally) -> None:
    failures = [f"seed {one.seed}: {one.violation}\n" + "\n".join(one.trace) for one in tally.failures]
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(("grade", "seed"), remembered())
def test_a_seed_that_failed_once_never_fails_again(grade, seed):
    expect_no_violation(run_reindex_seeds(grade, [seed]))


@pytest.fixture(scope="module")
def tallies() -> dict[Grade, Tally]:
    """What the first seeds of each grade showed."""
    return {grade: run_reindex_seeds(grade, FIRST_SEEDS) for grade in Grade}


@pytest.mark.parametrize("grade", list(Grade))
def test_no_promise_is_broken_under_faults(tallies, grade):
    expect_no_violation(tallies[grade])


@pytest.mark.parametrize("grade", list(Grade))
def test_the_name_really_moves_there_and_back(tallies, grade):
    assert tallies[grade].faults["swap"] > len(FIRST_SEEDS)
    assert tallies[grade].faults["rollback"] > 0


def test_every_kind_of_fault_is_really_injected(tallies):
    injected = {kind for tally in tallies.values() for kind in tally.faults}
    assert set(KINDS) - SELDOM <= injected <= set(KINDS)


@pytest.mark.parametrize(("name", "seeds"), QUICK_MUTANTS.items())
def test_a_mutant_is_found(name, seeds):
    [mutant] = [mutant for mutant in REINDEX_MUTANTS if mutant.name == name]
    found = hunt_reindex(mutant, range(seeds))
    assert found.violation is not None, found.error or f"not noticed in {seeds} seeds"


@pytest.mark.parametrize("grade", list(Grade))
def test_a_seed_is_repeatable(grade):
    with quiet():
        first, again = run_reindex_seed(3, grade), run_reindex_seed(3, grade)
    assert first.trace == again.trace != []
    assert first.faults == again.faults
