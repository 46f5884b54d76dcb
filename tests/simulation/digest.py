"""Prints one digest over the outcomes of many simulated seeds, to show that a refactoring changed no behaviour.

Only what happened counts: marks, tombstones, moments, contents, faults and dead letters, not the words of the trace.
"""

import argparse
import hashlib
from collections.abc import Iterator

from keywise.core.sink import Grade
from keywise.testing.simulator.seeds import quiet
from keywise.testing.simulator.serial.world import SerialWorld
from keywise.testing.simulator.world import World

SERIAL_GRADES = (Grade.PLAIN, Grade.ATOMIC)


def flow_outcome(seed: int, grade: Grade) -> str:
    """What one seed of the flow ended with."""
    world = World(seed, grade)
    world.run()
    entries = sorted((key, entry.mark, entry.deleted, entry.updated_at) for key, entry in world.entries().items())
    faults = sorted(world.faults.injected.values())
    figures = (len(world.auditor.trace), len(world.auditor.violations), len(world.letters()), world.now())
    return repr((entries, faults, figures))


def serial_outcome(seed: int, grade: Grade) -> str:
    """What one seed of the serial functions ended with."""
    world = SerialWorld(seed, grade)
    world.run()
    faults = sorted(world.faults.injected.values())
    return repr((faults, len(world.auditor.trace), len(world.auditor.violations), world.loop.time()))


def outcomes(seeds: int) -> Iterator[tuple[str, str]]:
    """Digests by workload and grade."""
    for grade in Grade:
        yield f"flow {grade.value}", _digest(flow_outcome(seed, grade) for seed in range(seeds))
    for grade in SERIAL_GRADES:
        yield f"serial {grade.value}", _digest(serial_outcome(seed, grade) for seed in range(seeds // 2))


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    with quiet():
        for name, digest in outcomes(parser.parse_args().seeds):
            print(name, digest)
