"""`keywise simulate shop:app`: runs the user's handler under simulated faults, with a freshly loaded app per run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keywise.cli.app_loader import choose_pipelines, import_place, load
from keywise.cli.output import fail, print_json, print_line, progress, refuse

if TYPE_CHECKING:
    from keywise.testing.handlers.world import Trial

SEEDS = 100


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The options of a simulation of the user's handler."""

    pipeline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of APP: the pipeline, if there are several.")
    ] = None
    seed: Annotated[int | None, typer.Option(metavar="SEED", min=0, help="Of APP: run this seed only.")] = None
    messages: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of APP: sample bodies, a list or function, or a file of lines.")
    ] = None
    state: Annotated[str | None, typer.Option(metavar="NAME", help="Of APP: the function that reads the store.")] = None
    reset: Annotated[str | None, typer.Option(metavar="NAME", help="Of APP: the function that empties the store.")] = (
        None
    )
    zombies: Annotated[bool, typer.Option("--zombies", help="Of APP: also stop workers just before the handler.")] = (
        False
    )


def simulate_handler(target: str, options: TrialOptions, seeds: Sequence[int], json: bool) -> None:
    """Simulate the handler, print the report, and exit with status 1 if something was found."""
    from keywise.testing.handlers.simulate import run_trials

    loading = _TrialLoader(target, options)
    loading.trial()
    with progress() as bar:
        task = bar.add_task("seeds", total=len(seeds))
        report = run_trials(loading.trial, seeds, lambda seed: bar.advance(task))
    again = _replay_command(target, options, report.findings[0].seed) if report.findings else None
    if json:
        print_json(msgspec.to_builtins(report) | {"ok": not report.findings, "replay": again})
        raise typer.Exit(1 if report.findings else 0)
    for line in str(report).split("\n"):
        print_line(line)
    if report.findings:
        fail(f"the store of pipeline {report.pipeline!r} does not end up right; see it again with: {again}")


class _TrialLoader:
    """Loads the app and the functions that the options name; imports the user's own modules again for each trial."""

    def __init__(self, target: str, options: TrialOptions) -> None:
        self._target = target
        self._options = options
        self._before = set(sys.modules)

    def trial(self) -> "Trial":
        from keywise.testing.handlers.simulate import trial_of

        self._forget()
        options = self._options
        app = load(self._target)
        sys.path[:] = dict.fromkeys(sys.path)
        pipeline = choose_pipelines(app, [options.pipeline])[0] if options.pipeline is not None else None
        return trial_of(
            app,
            pipeline=pipeline,
            messages=self._messages(),
            state=self._function(options.state, "state"),
            reset=self._function(options.reset, "reset"),
            zombies=options.zombies,
        )

    def _forget(self) -> None:
        """Unload the user's modules, so that a run does not see the state of an earlier one; packages stay."""
        here = {Path.cwd(), Path(self._target.rpartition(":")[0] or self._target).resolve().parent}
        for name in set(sys.modules) - self._before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and here & set(Path(file).resolve().parents) and "site-packages" not in file:
                del sys.modules[name]

    def _messages(self) -> Any:
        given = self._options.messages
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
        """Return the object that an option names, in the module of the app or in another one.

        Without the option it is the object of the option's own name, or None.
        """
        place, _, name = (given or default).rpartition(":")
        module = self._module(place)
        if module is None:
            return None if given is None else refuse(f"--{default} {given}: say in which module, as shop:{given}")
        if given is not None and not hasattr(module, name):
            refuse(f"--{default}: {module.__name__} has no {name!r}")
        return getattr(module, name, None)

    def _module(self, place: str) -> ModuleType | None:
        own = self._target.rpartition(":")[0]
        loaded = sys.modules.get(Path(own).stem if own.endswith(".py") else own)
        return import_place(place) if place and place != own else loaded


def _replay_command(target: str, options: TrialOptions, seed: int | None) -> str:
    """Return the command that reproduces a finding."""
    named = {name: value for name, value in asdict(options).items() if name not in {"seed", "zombies"}}
    parts = [f"--{name} {value}" for name, value in named.items() if value is not None]
    parts += ["--zombies"] if options.zombies else []
    parts += [f"--seed {seed}"] if seed is not None else []
    return " ".join(["keywise simulate", target, *parts])
