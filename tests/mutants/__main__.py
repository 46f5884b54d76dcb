"""Hunts for every mutant, as `make mutants` does; exits with status 1 if one is not found."""

import argparse
import sys

from keywise.testing.simulator.seeds import cores
from mutants.hunt import Hunt, hunt_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="at most so many for each mutant")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    options = parser.parse_args()
    hunts = []
    for hunt in hunt_all(range(options.seeds), options.jobs):
        hunts.append(hunt)
        print(f"{len(hunts):>3} {_line(hunt)}", flush=True)
    escaped = sorted((hunt for hunt in hunts if hunt.violation is None), key=lambda hunt: hunt.name)
    print(f"found {len(hunts) - len(escaped)} of {len(hunts)} mutants; most seeds: {max(hunt.seeds for hunt in hunts)}")
    for hunt in escaped:
        why = f"ERROR of the mutant: {hunt.error}" if hunt.error else f"NOT FOUND in {hunt.seeds} seeds"
        print(f"{why}: {hunt.name}", file=sys.stderr)
    return 1 if escaped else 0


def _line(hunt: Hunt) -> str:
    found = ("ERROR" if hunt.error else "NOT FOUND") if hunt.violation is None else f"found after {hunt.seeds} seeds"
    rule = f"rule {hunt.rule:>2}" if hunt.rule else "serial "
    return f"{rule}  {hunt.grade:<11}  {found:<23} {hunt.name}: {hunt.violation or hunt.error or ''}"


if __name__ == "__main__":
    sys.exit(main())
