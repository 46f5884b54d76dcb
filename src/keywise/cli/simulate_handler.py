"""`keywise simulate shop:app`: a handler of the user's under faults, loaded anew for each run."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from keywise.cli.app_loader import choose_pipelines, import_place, load
from keywise.cli.output import cell, fail, plain_lines, print_json, progress, refuse, screen

if TYPE_CHECKING:
    from keywise.testing.handlers.report import SimulationReport
    from keywise.testing.handlers.world import Trial

SEEDS = 100

AppArgument = Annotated[
    str | None,
    typer.Argument(metavar="APP", help="Simulate a handler of this app, as shop:app, shop.py:app or pipeline.toml."),
]
WhichPipeline = Annotated[str | None, typer.Option(metavar="NAME", help="Of APP: whose handler; needed if many.")]
OneSeed = Annotated[int | None, typer.Option(metavar="SEED", min=0, help="Of APP: run this one only.")]
Messages = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of APP: sample bodies, a list or function, or a file of lines.")
]
State = Annotated[str | None, typer.Option(metavar="NAME", help="Of APP: the function that reads the store.")]
Reset = Annotated[str | None, typer.Option(metavar="NAME", help="Of APP: the function that empties it.")]
Zombies = Annotated[bool, typer.Option("--zombies", help="Of APP: also stop workers just before the handler.")]


class TrialOptions(msgspec.Struct, frozen=True):
    """What the command line says about a trial."""

    target: str
    pipeline: str | None
    messages: str | None
    state: str | None
    reset: str | None
    zombies: bool


def simulate_handler(wanted: TrialOptions, seeds: Sequence[int], json: bool) -> None:
    """Simulate, tell, and exit with status 1 if something was found."""
    from keywise.testing.handlers.simulate import run_trials

    loading = _TrialLoader(wanted)
    loading.trial()
    bar = progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bar:
        task = bar.add_task("seeds", total=len(seeds))
        report = run_trials(loading.trial, seeds, lambda seed: bar.advance(task))
    if json:
        print_json(_report_json(report, wanted))
        if report.findings:
            raise typer.Exit(1)
        return
    for line in plain_lines(str(report)).splitlines():
        screen().print(cell(line))
    if report.findings:
        again = _replay_command(report, wanted)
        fail(f"the store of pipeline {report.pipeline!r} does not end up right; see it again with: {again}")


class _TrialLoader:
    """Loads the app and what belongs to it; the modules of the user's own are imported anew each time."""

    def __init__(self, wanted: TrialOptions) -> None:
        self._wanted = wanted
        self._before = set(sys.modules)

    def trial(self) -> "Trial":
        from keywise.testing.handlers.simulate import trial_of

        self._forget()
        wanted = self._wanted
        app = load(wanted.target)
        sys.path[:] = dict.fromkeys(sys.path)
        pipeline = choose_pipelines(app, [wanted.pipeline])[0] if wanted.pipeline is not None else None
        return trial_of(
            app,
            pipeline=pipeline,
            messages=self._messages(),
            state=self._function(wanted.state, "state"),
            reset=self._function(wanted.reset, "reset"),
            zombies=wanted.zombies,
        )

    def _forget(self) -> None:
        """A run must not find what an earlier one left in a module. Installed packages stay."""
        here = {Path.cwd(), Path(self._wanted.target.rpartition(":")[0] or self._wanted.target).resolve().parent}
        for name in set(sys.modules) - self._before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and here & set(Path(file).resolve().parents) and "site-packages" not in file:
                del sys.modules[name]

    def _messages(self) -> Any:
        given = self._wanted.messages
        if given is not None and Path(given).is_file():
            return [line.encode() for line in Path(given).read_text("utf-8").splitlines() if line.strip()]
        found = self._found(given, "messages")
        if found is None or callable(found) or isinstance(found, list | tuple):
            return found
        refuse(f"messages is {found!r}; it has to be a list of bodies, or a function that returns one")

    def _function(self, given: str | None, default: str) -> Callable[..., Any] | None:
        found: Callable[..., Any] | None = self._found(given, default)
        if found is not None and not callable(found):
            refuse(f"{default} is {type(found).__name__}; it has to be a function")
        return found

    def _found(self, given: str | None, default: str) -> Any:
        """What an option names, in the module of the app or in another one; by default what has the option's name."""
        place, _, name = (given or default).rpartition(":")
        module = self._module(place)
        if module is None:
            return None if given is None else refuse(f"--{default} {given}: say in which module, as shop:{given}")
        if given is not None and not hasattr(module, name):
            refuse(f"--{default}: {module.__name__} has no {name!r}")
        return getattr(module, name, None)

    def _module(self, place: str) -> ModuleType | None:
        own = self._wanted.target.rpartition(":")[0]
        loaded = sys.modules.get(Path(own).stem if own.endswith(".py") else own)
        return import_place(place) if place and place != own else loaded


def _report_json(report: "SimulationReport", wanted: TrialOptions) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields | {"ok": not report.findings, "replay": _replay_command(report, wanted) if report.findings else None}


def _replay_command(report: "SimulationReport", wanted: TrialOptions) -> str:
    """The command that shows the first finding again."""
    words = ["keywise simulate", wanted.target]
    options = (
        ("pipeline", wanted.pipeline),
        ("messages", wanted.messages),
        ("state", wanted.state),
        ("reset", wanted.reset),
    )
    words += [f"--{name} {value}" for name, value in options if value is not None]
    words += ["--zombies"] if wanted.zombies else []
    seed = report.findings[0].seed
    return " ".join([*words, *([f"--seed {seed}"] if seed is not None else [])])
