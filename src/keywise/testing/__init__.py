"""For tests: simulated worlds with faults, virtual time, and broken variants that must be found."""

from keywise.testing.faults import Faults
from keywise.testing.mutants import MUTANTS, Mutant
from keywise.testing.seeds import Hunt, Run, Tally, hunt, run_seed, run_seeds
from keywise.testing.virtual import Process, VirtualLoop
from keywise.testing.world import World

__all__ = [
    "MUTANTS",
    "Faults",
    "Hunt",
    "Mutant",
    "Process",
    "Run",
    "Tally",
    "VirtualLoop",
    "World",
    "hunt",
    "run_seed",
    "run_seeds",
]
