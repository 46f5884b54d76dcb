"""Runs simulated worlds, many seeds in a row or side by side."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

import msgspec

from keywise.core.sink import Grade
from keywise.flow.strategy import CommitStrategy
from keywise.testing.simulated_world import SimulatedWorld
from keywise.testing.simulator.crowd import CrowdWorld
from keywise.testing.simulator.objects.world import ObjectsWorld
from keywise.testing.simulator.world import World

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

T = TypeVar("T")
W = TypeVar("W", bound=SimulatedWorld)

SEEDS_A_CHUNK = 25
SEEDS_A_COLLECTION = 50
SEEDS_A_CROWD = 3
"""One seed in this many also runs a `CrowdWorld`. An atomic sink has none: its handlers run one at a time."""
SEEDS_AN_OBJECTS = 3
"""One seed in this many also runs an `ObjectsWorld`."""
FAILURES_KEPT = 3
TRACE_LINES_KEPT = 40


class Run(msgspec.Struct, frozen=True):
    """What one seed showed."""

    seed: int
    grade: Grade
    variant: str
    violations: list[str]
    faults: dict[str, int]
    trace: list[str]


class SeedFailure(msgspec.Struct, frozen=True):
    """A seed that broke a promise: its first violation, and the end of its trace."""

    grade: Grade
    seed: int
    violation: str
    trace: list[str]


class Tally(msgspec.Struct):
    """What many seeds of one grade showed together."""

    grade: Grade
    seeds: int = 0
    violations: int = 0
    failing_seeds: list[int] = []
    seconds: float = 0.0
    """Of the processor, so it is more than the clock shows when seeds ran side by side."""
    variants: dict[str, int] = {}
    faults: dict[str, int] = {}
    failures: list[SeedFailure] = []
    """The first few of them."""

    def add(self, other: "Tally") -> None:
        """Take in what other seeds of the same grade showed."""
        self.seeds += other.seeds
        self.violations += other.violations
        self.failing_seeds = sorted(self.failing_seeds + other.failing_seeds)
        self.seconds += other.seconds
        self.variants = dict(Counter(self.variants) + Counter(other.variants))
        self.faults = dict(Counter(self.faults) + Counter(other.faults))
        found = sorted(self.failures + other.failures, key=lambda failure: failure.seed)
        self.failures = found[:FAILURES_KEPT]


def run_seed(seed: int, grade: Grade) -> Run:
    """Run one flow, and with some seeds also a crowd, or objects of a store."""
    world, violations = run_world(World, seed, grade)
    if world is None:
        return Run(seed, grade, "not built", violations, {}, [])
    run = Run(seed, grade, _variant(world), violations, dict(world.faults.injected), list(world.auditor.trace))
    if grade is not Grade.ATOMIC and seed % SEEDS_A_CROWD == 0:
        _add(run, "in a crowd", *run_world(CrowdWorld, seed, grade))
    if seed % SEEDS_AN_OBJECTS == 1:
        _add(run, "of objects", *run_world(ObjectsWorld, seed, grade))
    return run


def _add(run: Run, where: str, world: SimulatedWorld | None, violations: list[str]) -> None:
    """Take in what another world of the same seed showed."""
    run.violations.extend(f"{where}: {violation}" for violation in violations)
    run.trace.extend(f"{where}: {line}" for line in (world.auditor.trace if world is not None else ()))


def run_world(kind: Callable[[int, Grade], W], seed: int, grade: Grade) -> tuple[W | None, list[str]]:
    """Build and run a world; return it, if it could be built, and all violations. An error that it raises is one."""
    world, raised = None, []
    try:
        world = kind(seed, grade)
        world.run()
    except Exception as error:
        raised.append(f"the run ended with {type(error).__name__}: {error}")
    # A copy, because what is left of killed processes may still speak when it is collected.
    return world, [*(world.auditor.violations if world is not None else ()), *raised]


def run_seeds(grade: Grade, seeds: Sequence[int], run: Callable[[int, Grade], Run] = run_seed) -> Tally:
    """Worlds one after another, in this process."""
    tally, started = Tally(grade), time.process_time()
    with quiet():
        for number, seed in enumerate(seeds, start=1):
            tally.add(_tally_of(run(seed, grade)))
            if number % SEEDS_A_COLLECTION == 0:
                gc.collect()
        gc.collect()  # While errors of killed processes are still kept quiet.
    tally.seconds = time.process_time() - started
    return tally


def simulate(
    grades: Sequence[Grade], seeds: Sequence[int], jobs: int, work: Callable[..., Tally] = run_seeds
) -> Iterator[Tally]:
    """Many worlds on several processes: the tally of each stretch of seeds, as it ends."""
    chunks = [seeds[start : start + SEEDS_A_CHUNK] for start in range(0, len(seeds), SEEDS_A_CHUNK)]
    return side_by_side(work, [(grade, chunk) for grade in grades for chunk in chunks], jobs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the collector from running inside a world, and silent about coroutines of killed processes.

    Such a coroutine stays suspended for ever, as its process does, so Python complains when it is collected.
    """
    before, was_enabled = sys.unraisablehook, gc.isenabled()

    def hook(unraisable: "UnraisableHookArgs") -> None:
        if not any(word in str(unraisable.exc_value) for word in ("ignored GeneratorExit", "no running event loop")):
            before(unraisable)

    gc.disable()
    sys.unraisablehook = hook
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
        try:
            yield
        finally:
            # Nothing of a world may be left for a later collection, which would not be silent.
            gc.collect()
            sys.unraisablehook = before
            if was_enabled:
                gc.enable()


def _variant(world: World) -> str:
    """Which way the batches of a world went, and what else was drawn for it."""
    if world.grade is Grade.CONDITIONAL:
        return f"{CommitStrategy.LEASED}, {'forgets' if world.has_suspects else 'remembers'} deletions"
    if world.grade is Grade.PLAIN:
        return CommitStrategy.LEASED.value
    if world.runs_user_code:
        return CommitStrategy.CLAIMED_TRANSACTION.value
    same = world.queue_database is world.database
    return (CommitStrategy.QUEUE_TRANSACTION if same else CommitStrategy.LEDGER_TRANSACTION).value


def _tally_of(run: Run) -> Tally:
    tally = Tally(run.grade, seeds=1, violations=len(run.violations), variants={run.variant: 1}, faults=run.faults)
    if run.violations:
        tally.failing_seeds = [run.seed]
        tally.failures = [SeedFailure(run.grade, run.seed, run.violations[0], run.trace[-TRACE_LINES_KEPT:])]
    return tally


def side_by_side(work: Callable[..., T], arguments: Sequence[tuple[object, ...]], jobs: int) -> Iterator[T]:
    """Call a function with many arguments on several processes, and hand out the results as they come."""
    if jobs == 1:
        for one in arguments:
            yield work(*one)
        return
    # A fresh interpreter each, because a copy of this one would hold its threads' locks.
    context = multiprocessing.get_context("spawn")
    processes = min(jobs, len(arguments) or 1)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_follow_parent) as pool:
        futures = [pool.submit(work, *one) for one in arguments]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _follow_parent() -> None:
    """End with the process that was started by hand, however it ends, and let it speak for all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a process of a pool"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def cores() -> int:
    """How many processes can really run side by side here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
