"""Runs simulated serial functions."""

from collections.abc import Sequence

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import Run, Tally, run_seeds
from keywise.testing.simulator.serial.world import SerialWorld

GRADES = (Grade.PLAIN, Grade.ATOMIC)


def run_serial_seed(seed: int, grade: Grade) -> Run:
    """One world. Whatever it raises is a violation too."""
    world: SerialWorld | None = None
    violations: list[str] = []
    try:
        world = SerialWorld(seed, grade)
        world.run()
    except Exception as error:
        violations.append(f"the run ended with {type(error).__name__}: {error}")
    if world is None:
        return Run(seed, grade, "not built", violations, {}, [])
    auditor, faults = world.auditor, dict(world.faults.injected)
    return Run(seed, grade, "merge queue", auditor.violations + violations, faults, list(auditor.trace))


def run_serial_seeds(grade: Grade, seeds: Sequence[int]) -> Tally:
    """Worlds one after another, in this process."""
    return run_seeds(grade, seeds, run_serial_seed)
