"""The promises hold in simulated worlds full of faults, and the simulator sees what is broken on purpose."""

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from keywise.core.sink import Grade
from keywise.flow.strategy import CommitStrategy
from keywise.testing import World, run_seed, run_seeds
from keywise.testing.simulated_world import SimulatedWorld
from keywise.testing.simulator.faults import KINDS
from keywise.testing.simulator.seeds import SEEDS_A_CHUNK, Run, Tally, quiet, simulate
from mutants import MUTANTS, Mutant
from mutants.hunt import hunt

FIRST_SEEDS = range(60)
REMEMBERED = Path(__file__).with_name("seeds.txt")

# Each is found within so many seeds; `make mutants` hunts for all of them.
QUICK_MUTANTS = {
    "looks first and takes later": 20,
    "a takeover keeps the old token": 40,
    "a deletion leaves no tombstone": 20,
    "a transaction takes two changes of one key": 40,
    "followers are acked at the claim": 20,
    "acked before the commit": 20,
    "acked before the transaction": 60,
    "a failed change is just acked": 20,
    "a bad change takes its batch along": 40,
    "an unknown outcome is released": 60,
    "suspects are not repaired": 20,
    "a lost transaction counts as done": 30,
    "a change that failed takes others along": 60,
    "new work begins after the stop": 60,
    "a rate is not heeded": 20,
    "a debounce acks what it gathers": 20,
    "a paused key still runs": 20,
    "a reset forgets the mark": 30,
    "a forced write hides the next version": 20,
    "a drain gives nothing back": 20,
    "held messages are not kept hidden": 20,
    "a key is noted after it is written": 20,
    "notes go before their keys are suspect": 20,
    "a sink that is away counts as untouched": 20,
    "a sink that is away costs an attempt": 60,
    "a takeover loses the position": 10,
    "progress does not forgive crashes": 20,
    "a missing object is gone at once": 20,
    "an announced deletion is believed": 60,
}


def remembered() -> list[tuple[Grade, int]]:
    lines = [line.split() for line in REMEMBERED.read_text().splitlines() if line and not line.startswith("#")]
    return [(Grade(grade), int(seed)) for grade, seed in lines]


def expect_no_violation(tally: Tally) -> None:
    failures = [
        "\n".join((*one.trace, f"keywise simulate --replay {one.seed} --grade {one.grade}: {one.violation}"))
        for one in tally.failures
    ]
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


@pytest.mark.parametrize(("grade", "seed"), remembered())
def test_a_seed_that_failed_once_never_fails_again(grade, seed):
    expect_no_violation(run_seeds(grade, [seed]))


@pytest.fixture(scope="module")
def tallies() -> dict[Grade, Tally]:
    """What the first seeds of each grade showed."""
    return {grade: run_seeds(grade, FIRST_SEEDS) for grade in Grade}


@pytest.mark.parametrize("grade", list(Grade))
def test_the_promises_of_a_grade_hold_under_all_faults(tallies, grade):
    tally = tallies[grade]
    expect_no_violation(tally)
    assert tally.seeds == sum(tally.variants.values()) == len(FIRST_SEEDS)


def test_every_kind_of_fault_was_really_injected(tallies):
    injected = Counter[str]()
    for tally in tallies.values():
        injected.update(tally.faults)
    assert set(injected) == set(KINDS)


def test_every_way_of_an_atomic_batch_was_gone(tallies):
    assert tallies[Grade.ATOMIC].variants.keys() == {
        way.value for way in CommitStrategy if way is not CommitStrategy.LEASED
    }


@pytest.mark.parametrize(("name", "seeds"), QUICK_MUTANTS.items())
def test_a_broken_rule_is_noticed(name, seeds):
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    found = hunt(mutant, range(seeds))
    assert found.violation is not None, found.error or f"not noticed in {seeds} seeds"


def _takes_nothing() -> None:
    """Has not the signature of what it replaces."""


def _raises(*arguments: object) -> None:
    raise ValueError("not today")


async def _raises_later(*arguments: object) -> None:
    raise LookupError("nobody sees it")


class Product:
    """What some mutants replace a part of, and a world that swallows its errors."""

    def act(self, much: int) -> None: ...

    async def act_later(self) -> None: ...

    def run(self, seed: int, grade: Grade) -> Run:
        for act in (lambda: self.act(1), lambda: asyncio.run(self.act_later())):
            with suppress(Exception):
                act()
        is_broken = Product.act is not SOUND_ACT or Product.act_later is not SOUND_ACT_LATER
        return Run(seed, grade, "", ["a promise is broken"] if is_broken else [], {}, [])


SOUND_ACT, SOUND_ACT_LATER = Product.act, Product.act_later


@pytest.mark.parametrize(
    ("attribute", "broken", "error"),
    [
        ("act", _takes_nothing, "TypeError"),
        ("act", _raises, "ValueError: not today"),
        ("act_later", _raises_later, "LookupError"),
    ],
    ids=["a wrong signature", "an error", "an error of a coroutine"],
)
def test_a_mutant_that_raises_by_itself_is_an_error_and_not_found(attribute, broken, error):
    """Whatever follows from that says nothing about the auditor, even if the error is swallowed."""
    found = hunt(Mutant("raises", 0, Product, attribute, broken), range(5), Product().run)
    assert (found.violation, found.seeds) == (None, 1)
    assert found.error is not None and error in found.error


def test_a_mutant_that_breaks_a_promise_is_found():
    found = hunt(Mutant("silent", 0, Product, "act", lambda self, much: None), range(5), Product().run)
    assert (found.violation, found.error) == ("a promise is broken", None)


@pytest.mark.parametrize(
    "error",
    [
        "w0 died of ExceptionGroup('unhandled errors in a TaskGroup', [KeyError('a')])",
        "the run ended with ValueError: odd",
        "an unhandled error: AssertionError()",
    ],
)
def test_a_world_that_ended_with_an_error_does_not_show_a_mutant(error):
    """No promise was seen to be broken; what is found after that may follow from the error."""

    def run(seed: int, grade: Grade) -> Run:
        return Run(seed, grade, "", [error, "not drained"] if seed < 2 else [], {}, [])

    found = hunt(Mutant("breaks off", 0, Product, "act", SOUND_ACT), range(5), run)
    assert (found.violation, found.error, found.seeds) == (None, error, 5)


def test_a_promise_that_was_broken_before_an_error_shows_a_mutant():
    def run(seed: int, grade: Grade) -> Run:
        is_alive = Product.act is not SOUND_ACT
        return Run(seed, grade, "", ["two at once", "w0 died of KeyError('a')"] if is_alive else [], {}, [])

    found = hunt(Mutant("breaks off later", 0, Product, "act", SOUND_ACT), range(5), run)
    assert (found.violation, found.error, found.seeds) == ("two at once", None, 1)


def test_each_mutant_has_a_name_of_its_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("grade", list(Grade))
def test_the_same_seed_gives_the_same_trace(grade):
    with quiet():
        first, second = run_seed(7, grade), run_seed(7, grade)
    assert first.trace == second.trace != []
    assert first.faults == second.faults


def test_seeds_in_stretches_add_up_to_the_same_as_in_a_row():
    seeds = range(SEEDS_A_CHUNK + 3)
    together = Tally(Grade.ATOMIC)
    for part in simulate([Grade.ATOMIC], seeds, jobs=1):
        together.add(part)
    in_a_row = run_seeds(Grade.ATOMIC, seeds)
    assert (together.seeds, together.faults, together.variants) == (len(seeds), in_a_row.faults, in_a_row.variants)


def test_an_error_inside_a_world_is_a_violation_of_its_seed():
    def refuse(self: SimulatedWorld) -> None:
        raise RuntimeError("no world today")

    with Mutant("no world runs", 0, SimulatedWorld, "run", refuse).alive():
        run = run_seed(2, Grade.PLAIN)
    assert run.violations == ["the run ended with RuntimeError: no world today"]


def test_a_world_that_cannot_be_built_is_a_violation_of_its_seed():
    def refuse(self: World, seed: int, grade: Grade) -> None:
        raise ValueError("no such world")

    with Mutant("no world exists", 0, World, "__init__", refuse).alive():
        tally = run_seeds(Grade.PLAIN, [1, 2])
    assert (tally.violations, tally.failing_seeds) == (2, [1, 2])
    assert tally.failures[0].violation == "the run ended with ValueError: no such world"


def test_only_what_killed_processes_leave_behind_is_silent(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: heard.append(str(unraisable.exc_value)))
    with quiet():
        assert not gc.isenabled()
        suspended = stubborn()
        suspended.send(None)
        del suspended
        stubborn()  # Never awaited, as a call that a killed process was about to make.
        Broken()
    assert gc.isenabled()
    assert heard == ["this one is heard"]


async def stubborn() -> None:
    """Waits for ever, and waits again when it is told to end."""
    try:
        await Forever()
    finally:
        await Forever()


class Forever:
    def __await__(self) -> Iterator[None]:
        yield


class Broken:
    def __del__(self) -> None:
        raise ValueError("this one is heard")
