"""Broken variants, at least one for each rule of the protocol; the simulator must find every one of them."""

from mutants.claims import CLAIMS
from mutants.commits import COMMITS
from mutants.flows import FLOWS
from mutants.levels import LEVELS
from mutants.limits import LIMITS
from mutants.mutant import Mutant
from mutants.objects import OBJECTS
from mutants.outages import OUTAGES
from mutants.positions import POSITIONS
from mutants.replays import REPLAYS
from mutants.timing import ACTS

MUTANTS: tuple[Mutant, ...] = (
    *CLAIMS,
    *COMMITS,
    *ACTS,
    *LEVELS,
    *FLOWS,
    *LIMITS,
    *OUTAGES,
    *REPLAYS,
    *POSITIONS,
    *OBJECTS,
)

__all__ = ["MUTANTS", "Mutant"]
