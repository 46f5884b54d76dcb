"""`keywise simulate`: runs real consumers on virtual time with simulated faults."""

import enum
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keywise.cli.app_loader import JsonOption
from keywise.cli.options import grouped
from keywise.cli.output import count, fail, print_error, print_json, print_line, print_table, progress, refuse
from keywise.cli.simulate_handler import SEEDS as HANDLER_SEEDS
from keywise.cli.simulate_handler import TrialOptions, simulate_handler
from keywise.core.sink import Grade

if TYPE_CHECKING:
    from keywise.testing.simulator.seeds import Tally

SEEDS = 200
NUMBERS = ("seeds", "violations", "cpu s")
HANDLER_USAGE = (
    "a handler is simulated without --serial, --reindex, --replay, --jobs and --grade; --seed 17 shows one seed"
)


class Worlds(enum.Enum):
    """What is simulated; the value is the option that asks for it."""

    FLOWS = ""
    SERIAL = " --serial"
    REINDEX = " --reindex"


class GradeChoice(enum.StrEnum):
    """The grades to simulate."""

    ATOMIC = "atomic"
    CONDITIONAL = "conditional"
    PLAIN = "plain"
    ALL = "all"


@grouped
def simulate(  # noqa: PLR0913 - one parameter per option
    app: Annotated[
        str | None,
        typer.Argument(
            metavar="APP", help="Simulate a handler of this app, as shop:app, shop.py:app or pipeline.toml."
        ),
    ] = None,
    *,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many seeds: {SEEDS} per grade, or {HANDLER_SEEDS} for a handler."),
    ] = None,
    first_seed: Annotated[int, typer.Option(metavar="SEED", min=0, help="The first seed.")] = 0,
    grade: Annotated[GradeChoice, typer.Option(help="The grade of the simulated sink.")] = GradeChoice.ALL,
    jobs: Annotated[int | None, typer.Option(min=1, help="How many processes; one per core without it.")] = None,
    replay: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="Print the trace of one seed; needs --grade.")
    ] = None,
    serial: Annotated[bool, typer.Option("--serial", help="Simulate serial functions only.")] = False,
    reindex: Annotated[bool, typer.Option("--reindex", help="Simulate reindexes, swaps and rollbacks only.")] = False,
    trial: TrialOptions,
    json: JsonOption = False,
) -> None:
    """Test every promise, or your handler, under simulated faults.

    Real consumers run on virtual time, with crashes, pauses, lost calls and more.
    With APP, they run its handler, and its store has to end up as it does without faults.
    Without the options, the messages and functions are messages, state and reset in the module of the app.

    Exits with status 1 if a promise was broken, or if the store did not end up right.

    \b
    Example:
      keywise simulate shop:app
      keywise simulate shop:app --seed 17
      keywise simulate --seeds 500
      keywise simulate --replay 17 --grade plain
      keywise simulate --serial
      keywise simulate --reindex
    """
    if serial and reindex:
        refuse("choose one of --serial and --reindex")
    worlds = Worlds.SERIAL if serial else Worlds.REINDEX if reindex else Worlds.FLOWS
    grades = _grades(grade, worlds)
    if app is not None:
        if worlds is not Worlds.FLOWS or replay is not None or jobs is not None or len(grades) == 1:
            refuse(HANDLER_USAGE)
        first, number = (first_seed, seeds or HANDLER_SEEDS) if trial.seed is None else (trial.seed, 1)
        simulate_handler(app, trial, range(first, first + number), json)
        return
    if trial != TrialOptions():
        refuse("--pipeline, --seed, --messages, --state, --reset and --zombies need an APP: keywise simulate shop:app")
    if replay is not None:
        if len(grades) > 1:
            refuse("a seed is replayed on one grade; add --grade atomic, --grade conditional or --grade plain")
        _replay(replay, grades[0], json, worlds)
    else:
        _simulate(grades, range(first_seed, first_seed + (seeds or SEEDS)), jobs, json, worlds)


def _grades(grade: GradeChoice, worlds: Worlds) -> list[Grade]:
    serial = worlds is Worlds.SERIAL
    if serial and grade is GradeChoice.CONDITIONAL:
        refuse("serial functions have the grades plain and atomic; write --grade plain, or --grade atomic")
    known = [one for one in Grade if not serial or one is not Grade.CONDITIONAL]
    return [one for one in known if grade in (GradeChoice.ALL, one.value)]


def _replay(seed: int, grade: Grade, json: bool, worlds: Worlds) -> None:
    from keywise.testing.simulator.reindex.seeds import run_reindex_seed
    from keywise.testing.simulator.seeds import quiet, run_seed
    from keywise.testing.simulator.serial.seeds import run_serial_seed

    runs = {Worlds.FLOWS: run_seed, Worlds.SERIAL: run_serial_seed, Worlds.REINDEX: run_reindex_seed}
    with quiet():
        run = runs[worlds](seed, grade)
    if json:
        result = {"violations": run.violations, "variant": run.variant, "faults": run.faults, "trace": run.trace}
        print_json({"grade": grade.value, "seed": seed} | result)
    else:
        for line in run.trace:
            print(line)
        print(f"{grade} seed {seed} ({run.variant}): {count(len(run.violations), 'violation')}")
    if run.violations:
        fail(run.violations[0])


def _simulate(grades: Sequence[Grade], seeds: range, jobs: int | None, json: bool, worlds: Worlds) -> None:
    from keywise.testing.simulator.reindex.seeds import run_reindex_seeds
    from keywise.testing.simulator.seeds import Tally, cores, run_seeds
    from keywise.testing.simulator.seeds import simulate as run_side_by_side
    from keywise.testing.simulator.serial.seeds import run_serial_seeds

    runs = {Worlds.FLOWS: run_seeds, Worlds.SERIAL: run_serial_seeds, Worlds.REINDEX: run_reindex_seeds}
    started = time.monotonic()
    by_grade = {grade: Tally(grade) for grade in grades}
    with progress() as bar:
        task = bar.add_task("seeds", total=len(seeds) * len(grades))
        for part in run_side_by_side(grades, seeds, jobs or cores(), runs[worlds]):
            by_grade[part.grade].add(part)
            bar.advance(task, part.seeds)
    tallies = list(by_grade.values())
    if json:
        print_json(_tallies_json(tallies, time.monotonic() - started, worlds))
    else:
        _print_tallies(tallies, time.monotonic() - started, worlds)
    if any(tally.violations for tally in tallies):
        raise typer.Exit(1)


def _print_tallies(tallies: Sequence["Tally"], seconds: float, worlds: Worlds) -> None:
    rows = []
    for tally in tallies:
        strategies = "; ".join(f"{seeds} × {variant}" for variant, seeds in sorted(tally.variants.items()))
        rows.append((tally.grade.value, tally.seeds, tally.violations, f"{tally.seconds:.1f}", strategies))
    print_table(("grade", *NUMBERS, "strategy"), rows, numbers=NUMBERS, fold=("strategy",))
    faults = _faults(tallies, worlds)
    print_line(f"injected {sum(faults.values()):,} faults: {', '.join(f'{kind} {n:,}' for kind, n in faults.items())}")
    violations = sum(tally.violations for tally in tallies)
    print_line(f"{count(violations, 'violation')} in {count(sum(t.seeds for t in tallies), 'seed')}, {seconds:.1f} s")
    for failure in (failure for tally in tallies for failure in tally.failures):
        print()
        for line in failure.trace:
            print_line(line)
        print_error(
            f"{failure.grade} seed {failure.seed}: {failure.violation}; {_command(failure.grade, failure.seed, worlds)}"
        )


def _tallies_json(tallies: Sequence["Tally"], seconds: float, worlds: Worlds) -> dict[str, Any]:
    failures = [failure for tally in tallies for failure in tally.failures]
    return {
        "violations": sum(tally.violations for tally in tallies),
        "seeds": sum(tally.seeds for tally in tallies),
        "seconds": round(seconds, 3),
        "faults": _faults(tallies, worlds),
        "grades": {
            tally.grade.value: {
                "violations": tally.violations,
                "seeds": tally.seeds,
                "failing_seeds": tally.failing_seeds,
                "cpu_seconds": round(tally.seconds, 3),
                "strategies": tally.variants,
                "faults": tally.faults,
            }
            for tally in tallies
        },
        "failures": [
            msgspec.to_builtins(failure) | {"replay": _command(failure.grade, failure.seed, worlds)}
            for failure in failures
        ],
    }


def _command(grade: Grade, seed: int, worlds: Worlds) -> str:
    return f"keywise simulate{worlds.value} --replay {seed} --grade {grade}"


def _faults(tallies: Iterable["Tally"], worlds: Worlds) -> dict[str, int]:
    """Return the number of faults of every kind, including kinds that were never injected."""
    from keywise.testing.simulator.faults import KINDS
    from keywise.testing.simulator.reindex.faults import KINDS as REINDEX_KINDS
    from keywise.testing.simulator.serial.faults import KINDS as SERIAL_KINDS

    kinds = {Worlds.FLOWS: KINDS, Worlds.SERIAL: SERIAL_KINDS, Worlds.REINDEX: REINDEX_KINDS}
    together = sum((Counter(tally.faults) for tally in tallies), Counter[str]())
    return {kind: together.pop(kind, 0) for kind in kinds[worlds]} | dict(together)
