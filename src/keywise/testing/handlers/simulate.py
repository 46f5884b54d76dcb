"""Simulates a handler under duplicated and reordered messages and crashes, and compares what the store holds."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from keywise.adapters.function.sink import signature_of
from keywise.app import App, PipelineDefinition
from keywise.core.errors import SettingsError
from keywise.core.sink import Grade
from keywise.testing.handlers.messages import samples_of
from keywise.testing.handlers.report import Finding, SimulationReport, differences, explain_difference
from keywise.testing.handlers.world import HandlerWorld, Trial
from keywise.testing.simulator.seeds import quiet

SEEDS = 100

NO_NETWORK = (
    "A simulated handler runs on virtual time, without network and threads; let it write to a store in memory, "
    "or ask for the Transaction to get a scratch database."
)


def simulate(  # noqa: PLR0913 - all options of a simulation
    app: App | Callable[[], App],
    *,
    pipeline: str | None = None,
    messages: Callable[[], Iterable[Any]] | Iterable[Any] | None = None,
    state: Callable[..., Any] | None = None,
    reset: Callable[..., Any] | None = None,
    seeds: int | Sequence[int] = SEEDS,
    zombies: bool = False,
    on_seed: Callable[[int], None] | None = None,
) -> SimulationReport:
    """Run the handler of a pipeline on virtual time, first without faults and then once per seed with them.

    `messages` are sample bodies, or a function that makes them; by default they are made from `key=` and `version=`.
    `state` returns what the store holds, as a value that can be compared; `reset` empties the store.
    Without `state`, the results of `@pipeline.lookup` are compared for each key.
    A handler that asks for the transaction gets a scratch SQLite database. `reset` may take its connection to create
    tables, and `state` may take it too; without `state`, all rows are compared.
    With an app, all workers share it and its memory; with a function that makes the app, each worker has its own.
    `zombies` also stops workers just before the handler, until long after their claim has expired.
    `on_seed` is called after each seed.
    """
    trial = trial_of(app, pipeline=pipeline, messages=messages, state=state, reset=reset, zombies=zombies)
    return run_trials(lambda: trial, range(seeds) if isinstance(seeds, int) else seeds, on_seed)


def trial_of(
    app: App | Callable[[], App],
    *,
    pipeline: str | None = None,
    messages: Callable[[], Iterable[Any]] | Iterable[Any] | None = None,
    state: Callable[..., Any] | None = None,
    reset: Callable[..., Any] | None = None,
    zombies: bool = False,
) -> Trial:
    """Check what is to be simulated; raise `SettingsError` if something is missing."""
    make = app if callable(app) else lambda: app
    name, definition = _pipeline_of(make(), pipeline)
    samples = samples_of(definition, messages)
    return Trial(
        make=make,
        pipeline=name,
        samples=samples,
        state=state or _default_state(definition, samples.keys),
        reset=reset or _default_reset(definition),
        zombies=zombies,
    )


def run_trials(
    fresh: Callable[[], Trial], seeds: Sequence[int], on_seed: Callable[[int], None] | None = None
) -> SimulationReport:
    """Simulate a trial. `fresh` is called before each run, so it can load the app again with fresh memory."""
    _refuse_inside_a_loop()
    with quiet():
        return _Simulation(fresh).run(seeds, on_seed or (lambda seed: None))


class _Simulation:
    """Runs the worlds of one trial, and compares the states of the store at the end."""

    def __init__(self, fresh: Callable[[], Trial]) -> None:
        self._fresh = fresh
        trial = fresh()
        self._samples = trial.samples
        handler = trial.definition()._handler
        assert handler is not None
        grade = Grade.ATOMIC if signature_of(handler).wants_transaction else Grade.PLAIN
        self._report = SimulationReport(
            trial.pipeline, grade.value, len(self._samples.ordered), len(self._samples.keys)
        )

    def run(self, seeds: Sequence[int], on_seed: Callable[[int], None]) -> SimulationReport:
        report, faults = self._report, Counter[str]()
        wanted, finding = self._ideal()
        if finding is not None:
            report.findings.append(finding)
            return report
        for seed in seeds:
            if (finding := self._seed(seed, wanted, faults)) is not None:
                report.findings.append(finding)
            report.seeds += 1
            on_seed(seed)
        report.faults = dict(faults)
        report.findings.sort(key=lambda one: (one.length, one.seed))
        return report

    def _ideal(self) -> tuple[Any, Finding | None]:
        """Find what the store should hold in the end; run twice, because a handler may keep state between runs."""
        wanted, world = self._run(None)
        if world.watch.failed:
            first = world.watch.failed[0]
            label = "the change" if first.version is None else f"version {first.version}"
            what = f"the handler raises for {label} of {first.key!r}: {first.cause}"
            return wanted, Finding(None, what, advice=NO_NETWORK if "NotImplementedError" in first.cause else "")
        if not world.is_drained:
            what = f"some changes are never settled: {', '.join(map(repr, world.waiting()))}"
            return wanted, Finding(None, what)
        for letter in world.watch.dead_letters:
            self._report.set_aside.append(f"{letter.key!r} version {letter.version}: {letter.cause}")
        del world
        held, _ = self._run(None)
        if _is_same(held, wanted):
            return wanted, None
        what = "the same messages, each once and in the same order, lead to another state in a second run"
        advice = "The handler keeps state between calls, or reset does not empty the whole store."
        return wanted, Finding(None, what, differences(wanted, held), advice=advice)

    def _seed(self, seed: int, wanted: Any, faults: Counter[str]) -> Finding | None:
        held, world = self._run(seed)
        watch, keys = world.watch, self._samples.keys
        self._report.calls += watch.calls
        faults.update(world.faults.injected)
        if watch.broken:
            key, what = watch.broken[0]
            _, story, _ = explain_difference({key: 1}, {key: 2}, [key], watch)
            return Finding(seed, f"keywise itself broke a promise: {what}", key=key or None, story=story)
        if not world.is_drained:
            return Finding(seed, f"some changes are never settled: {', '.join(map(repr, world.waiting()))}")
        dead = {letter.key: letter for letter in watch.dead_letters}
        expected = {line.partition(" version ")[0] for line in self._report.set_aside}
        for key, letter in dead.items():
            if repr(key) not in expected:
                _, story, advice = explain_difference({key: 1}, {key: 2}, [key], watch)
                what = f"a change of {key!r} became a dead letter: {letter.cause}"
                return Finding(seed, what, key=key, story=story, advice=advice)
        if _is_same(held, wanted):
            return None
        whose, story, advice = explain_difference(wanted, held, keys, watch)
        what = "the store does not hold what it holds without faults"
        return Finding(seed, what, differences(wanted, held), whose, story, advice)

    def _run(self, seed: int | None) -> tuple[Any, HandlerWorld]:
        # Killed tasks run their cleanup when they are collected, which has to happen before the store is emptied.
        gc.collect()
        world = HandlerWorld(self._fresh(), seed)
        return world.run(), world


def _pipeline_of(app: App, name: str | None) -> tuple[str, PipelineDefinition]:
    handled = [one for one, definition in app.pipelines.items() if definition._handler is not None]
    if name is None:
        if len(handled) != 1:
            has = f"this app has: {', '.join(handled)}" if handled else "this app has none"
            raise SettingsError(f"name one pipeline that has a handler (pipeline=); {has}")
        [name] = handled
    definition = app._definition(name)
    if definition._handler is None:
        raise SettingsError(
            f"pipeline {name!r} has no handler to simulate; check a sink with keywise.testing.check_sink"
        )
    return name, definition


def _default_state(definition: PipelineDefinition, keys: Sequence[str]) -> Callable[..., Any]:
    assert definition._handler is not None
    lookup = definition._lookup
    if lookup is not None:
        return lambda: {key: lookup(key) for key in keys}
    if signature_of(definition._handler).wants_transaction:
        return _rows
    raise SettingsError(
        f"the simulation cannot see what the handler of pipeline {definition.name!r} has written; give state=, "
        "a function that returns what its store holds, or decorate one with .lookup"
    )


def _default_reset(definition: PipelineDefinition) -> Callable[..., Any]:
    assert definition._handler is not None
    if signature_of(definition._handler).wants_transaction:
        return lambda: None
    raise SettingsError(
        f"each run needs an empty store; give reset=, a function that empties the store of pipeline {definition.name!r}"
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal, apart from classes that are new because their module was loaded again."""
    if one == other:
        return True
    try:
        plain, other_plain = (msgspec.to_builtins(state, order="deterministic") for state in (one, other))
    except (TypeError, ValueError):
        return False
    return bool(plain == other_plain)


def _rows(connection: Any) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of a scratch database, by table."""
    tables = connection.execute("select name from sqlite_master where type = 'table' order by name").fetchall()
    statement = 'select * from "{}"'
    return {name: sorted(connection.execute(statement.format(name)).fetchall(), key=repr) for (name,) in tables}


def _refuse_inside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SettingsError("simulate runs an event loop of its own; call it from a plain function, not from an async one")
