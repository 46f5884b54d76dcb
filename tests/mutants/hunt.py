"""Hunts for mutants: runs simulated worlds in which one lives, until the simulator notices it."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import SEEDS_A_COLLECTION, Run, quiet, run_seed, side_by_side
from keywise.testing.simulator.serial.seeds import run_serial_seed
from mutants import MUTANTS
from mutants.mutant import Mutant
from mutants.serial import SERIAL_MUTANTS

MISFITS = ("TypeError", "AttributeError", "NameError", "KeyError")
"""A variant that raises one of these does not fit the code any more, which shows nothing."""


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


def hunt(mutant: Mutant, seeds: Sequence[int], run_one: Callable[[int, Grade], Run] = run_seed) -> Hunt:
    """Run worlds in which the mutant lives, until one of them shows it and the sound code does well in the same."""
    started, tried, violation = time.process_time(), 0, None
    with quiet():
        for tried, seed in enumerate(seeds, start=1):
            with mutant.alive():
                run = run_one(seed, mutant.grade)
            if (shown := _broken_promise(run)) and not run_one(seed, mutant.grade).violations:
                violation = shown
                break
            if tried % SEEDS_A_COLLECTION == 0:
                gc.collect()
    return Hunt(mutant.name, mutant.rule, mutant.grade, tried, violation, time.process_time() - started)


def hunt_serial(mutant: Mutant, seeds: Sequence[int]) -> Hunt:
    """Hunt for a mutant of the serial functions."""
    return hunt(mutant, seeds, run_serial_seed)


def hunt_all(seeds: Sequence[int], jobs: int) -> Iterator[Hunt]:
    """Hunt for every mutant on several processes; each hunt is handed out as it ends."""
    names = [mutant.name for mutant in (*MUTANTS, *SERIAL_MUTANTS)]
    return side_by_side(hunt_named, [(name, seeds) for name in names], jobs)


def hunt_named(name: str, seeds: Sequence[int]) -> Hunt:
    """By name, because a mutant holds functions that cannot be sent to another process."""
    for mutant in SERIAL_MUTANTS:
        if mutant.name == name:
            return hunt_serial(mutant, seeds)
    return hunt(next(mutant for mutant in MUTANTS if mutant.name == name), seeds)


def _broken_promise(run: Run) -> str | None:
    if any(word in one for one in run.violations for word in MISFITS):
        return None
    return next(iter(run.violations), None)
