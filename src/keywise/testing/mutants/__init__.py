"""Broken variants, at least one for each rule of the protocol; the simulator must find every one of them."""

from keywise.testing.mutants.acts import ACTS
from keywise.testing.mutants.claims import CLAIMS
from keywise.testing.mutants.commits import COMMITS
from keywise.testing.mutants.flows import FLOWS
from keywise.testing.mutants.limits import LIMITS
from keywise.testing.mutants.mutant import Mutant
from keywise.testing.mutants.outages import OUTAGES
from keywise.testing.mutants.replays import REPLAYS

MUTANTS: tuple[Mutant, ...] = (*CLAIMS, *COMMITS, *ACTS, *FLOWS, *LIMITS, *OUTAGES, *REPLAYS)

__all__ = ["MUTANTS", "Mutant"]
