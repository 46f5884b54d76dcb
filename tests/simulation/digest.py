"""Prints one digest over the outcomes of many simulated seeds, to show that a refactoring changed no behaviour.

Only what happened counts: marks, tombstones, moments, contents, faults and dead letters, not the words of the trace.
"""

import argparse
import hashlib
from collections.abc import Iterator

from keywise.core.sink import Grade
from keywise.testing.handlers.simulate import trial_of
from keywise.testing.handlers.world import HandlerWorld
from keywise.testing.simulator.crowd import CrowdWorld
from keywise.testing.simulator.seeds import SEEDS_A_CROWD, quiet
from keywise.testing.simulator.serial.world import SerialWorld
from keywise.testing.simulator.world import World
from mutants.mutant import LEASED
from simulation.handler_shop import Shop

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


def crowd_outcome(seed: int, grade: Grade) -> str:
    """What one seed of the crowd ended with."""
    world = CrowdWorld(seed, grade)
    world.run()
    entries = sorted((key, entry.mark, entry.late_deaths) for key, entry in world.database.scope("sim").entries.items())
    return repr((entries, len(world.auditor.violations), world.now()))


def handler_outcome(seed: int) -> str:
    """What one seed of a handler ended with."""
    shop = Shop()
    shop.pipeline.apply(shop.write)
    world = HandlerWorld(trial_of(shop.app, state=lambda: dict(shop.stored), reset=shop.reset), seed)
    state = world.run()
    return repr((state, sorted(world.faults.injected.items()), world.watch.calls, world.now()))


def outcomes(seeds: int) -> Iterator[tuple[str, str]]:
    """Digests by workload and grade."""
    for grade in Grade:
        yield f"flow {grade.value}", _digest(flow_outcome(seed, grade) for seed in range(seeds))
    for grade in SERIAL_GRADES:
        yield f"serial {grade.value}", _digest(serial_outcome(seed, grade) for seed in range(seeds // 2))
    for grade in LEASED:
        yield f"crowd {grade.value}", _digest(crowd_outcome(seed, grade) for seed in range(seeds // SEEDS_A_CROWD))
    yield "handlers", _digest(handler_outcome(seed) for seed in range(seeds // 2))


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    with quiet():
        for name, digest in outcomes(parser.parse_args().seeds):
            print(name, digest)
