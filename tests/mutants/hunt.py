"""Hunts for mutants: runs simulated worlds in which one lives, until the simulator notices it."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from keywise.core.sink import Grade
from keywise.testing.simulator.reindex.seeds import run_reindex_seed
from keywise.testing.simulator.seeds import SEEDS_A_COLLECTION, Run, quiet, run_seed, side_by_side
from keywise.testing.simulator.serial.seeds import run_serial_seed
from mutants import MUTANTS
from mutants.mutant import Mutant
from mutants.reindex import REINDEX_MUTANTS
from mutants.serial import SERIAL_MUTANTS

ERRORS = ("the run ended with ", "an unhandled error: ", " died of ")
"""What a world says that was ended by an error, and not by the auditor."""


class Hunt(msgspec.Struct, frozen=True):
    """How the search for one mutant ended."""

    name: str
    rule: int
    grade: Grade
    seeds: int
    """How many it took to find it, or how many were tried."""
    violation: str | None
    """None: it was not found."""
    seconds: float
    error: str | None = None
    """An error of the mutant itself, or one at which worlds ended, if it was not found otherwise."""


def hunt(mutant: Mutant, seeds: Sequence[int], run_one: Callable[[int, Grade], Run] = run_seed) -> Hunt:
    """Run worlds in which the mutant lives, until one of them shows it and the sound code does well in the same."""
    started, tried, violation, error = time.process_time(), 0, None, None
    with quiet():
        for tried, seed in enumerate(seeds, start=1):
            with mutant.alive() as own_errors:
                run = run_one(seed, mutant.grade)
            if own_errors:
                error = f"the mutant itself raises {own_errors[0]}"
                break
            shown, ended = _before_error(run.violations)
            if shown and not run_one(seed, mutant.grade).violations:
                violation, error = shown[0], None
                break
            error = error or ended
            if tried % SEEDS_A_COLLECTION == 0:
                gc.collect()
    return Hunt(mutant.name, mutant.rule, mutant.grade, tried, violation, time.process_time() - started, error)


def _before_error(violations: list[str]) -> tuple[list[str], str | None]:
    """Return what was found before the first error, and that error. Whatever is found later may follow from it."""
    for number, one in enumerate(violations):
        if any(words in one for words in ERRORS):
            return violations[:number], one
    return violations, None


def hunt_serial(mutant: Mutant, seeds: Sequence[int]) -> Hunt:
    """Hunt for a mutant of the serial functions."""
    return hunt(mutant, seeds, run_serial_seed)


def hunt_reindex(mutant: Mutant, seeds: Sequence[int]) -> Hunt:
    """Hunt for a mutant of reindexes and swaps."""
    return hunt(mutant, seeds, run_reindex_seed)


def hunt_all(seeds: Sequence[int], jobs: int) -> Iterator[Hunt]:
    """Hunt for every mutant on several processes; each hunt is handed out as it ends."""
    names = [mutant.name for mutant in (*MUTANTS, *REINDEX_MUTANTS, *SERIAL_MUTANTS)]
    return side_by_side(hunt_named, [(name, seeds) for name in names], jobs)


def hunt_named(name: str, seeds: Sequence[int]) -> Hunt:
    """By name, because a mutant holds functions that cannot be sent to another process."""
    for mutants, hunt_one in ((SERIAL_MUTANTS, hunt_serial), (REINDEX_MUTANTS, hunt_reindex)):
        for mutant in mutants:
            if mutant.name == name:
                return hunt_one(mutant, seeds)
    return hunt(next(mutant for mutant in MUTANTS if mutant.name == name), seeds)
