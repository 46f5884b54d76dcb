"""Runs simulated reindexes."""

from collections.abc import Sequence

from keywise.core.sink import Grade
from keywise.testing.simulator.reindex.world import ReindexWorld
from keywise.testing.simulator.seeds import Run, Tally, run_seeds, run_world


def run_reindex_seed(seed: int, grade: Grade) -> Run:
    """Run one world of reindexes, swaps and rollbacks."""
    world, violations = run_world(ReindexWorld, seed, grade)
    if world is None:
        return Run(seed, grade, "not built", violations, {}, [])
    variant = "table" if world.has_table else "alias"
    return Run(seed, grade, variant, violations, dict(world.faults.injected), list(world.auditor.trace))


def run_reindex_seeds(grade: Grade, seeds: Sequence[int]) -> Tally:
    """Worlds one after another, in this process."""
    return run_seeds(grade, seeds, run_reindex_seed)
