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
    escaped = sorted(hunt.name for hunt in hunts if hunt.violation is None)
    print(f"found {len(hunts) - len(escaped)} of {len(hunts)} mutants; most seeds: {max(hunt.seeds for hunt in hunts)}")
    for name in escaped:
        print(f"NOT FOUND in {options.seeds} seeds: {name}", file=sys.stderr)
    return 1 if escaped else 0


def _line(hunt: Hunt) -> str:
    found = "NOT FOUND" if hunt.violation is None else f"found after {hunt.seeds} seeds"
    rule = f"rule {hunt.rule:>2}" if hunt.rule else "serial "
    return f"{rule}  {hunt.grade:<11}  {found:<23} {hunt.name}: {hunt.violation or ''}"


if __name__ == "__main__":
    sys.exit(main())
