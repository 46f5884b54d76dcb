"""Runs simulated serial functions."""

from collections.abc import Sequence

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import Run, Tally, run_seeds, run_world
from keywise.testing.simulator.serial.world import SerialWorld

GRADES = (Grade.PLAIN, Grade.ATOMIC)


def run_serial_seed(seed: int, grade: Grade) -> Run:
    """Run one world of serial functions."""
    world, violations = run_world(SerialWorld, seed, grade)
    if world is None:
        return Run(seed, grade, "not built", violations, {}, [])
    return Run(seed, grade, "merge queue", violations, dict(world.faults.injected), list(world.auditor.trace))


def run_serial_seeds(grade: Grade, seeds: Sequence[int]) -> Tally:
    """Worlds one after another, in this process."""
    return run_seeds(grade, seeds, run_serial_seed)
