"""Loads the app that a command works on: `shop:app`, `path/to/shop.py:app`, or `pipeline.toml`."""

import asyncio
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer

from keywise.app import App
from keywise.cli.options import suggestion
from keywise.cli.output import fail, refuse
from keywise.config import import_fault
from keywise.config import load as from_toml
from keywise.core.errors import KeywiseError
from keywise.flow.pipeline import OpenPipeline

T = TypeVar("T")
APP_VARIABLE = "KEYWISE_APP"

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="MODULE:NAME",
        envvar=APP_VARIABLE,
        help="The app, as shop:app, path/to/shop.py:app or pipeline.toml.",
    ),
]
PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="This pipeline only; all of them without it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def load(target: str | None, example: str = "--app shop:app") -> App:
    """Load the app; exit with status 2 if the target names none, and with 1 if its module or file is broken."""
    if not target:
        refuse(f"no app is named; say {example} (module:attribute, or a TOML file), or set {APP_VARIABLE}=shop:app")
    place, colon, name = target.rpartition(":")
    if target.endswith(".toml"):
        return _load_config(target)
    if place.endswith(".toml"):
        refuse(f"a TOML file is one app, which needs no name; write {place}")
    if not colon or not place or not name:
        refuse(
            f"{target!r} names no app; write module:attribute, for example shop:app or path/to/shop.py:app, "
            "or the path of a TOML file"
        )
    module = import_place(place)
    found = getattr(module, name, None)
    if isinstance(found, App):
        return found
    apps = [attribute for attribute, value in vars(module).items() if isinstance(value, App)]
    hint = f"it has: {', '.join(f'{place}:{app}' for app in apps)}" if apps else "it defines no keywise.App"
    refuse(f"{place} has no app called {name!r}; {hint}")


def choose_pipelines(app: App, names: Sequence[str | None]) -> list[str]:
    """Return the names of the chosen pipelines; all of them if none is given."""
    given = [name for name in names if name is not None]
    for name in given:
        if name not in app.pipelines:
            known = f"this app has: {', '.join(app.pipelines) or 'none'}"
            refuse(f"no pipeline is called {name!r}; {suggestion(name, app.pipelines, known)}")
    if not app.pipelines:
        fail("this app has no pipeline; define one with app.pipeline(...), or as [pipeline.NAME] in its TOML file")
    return given or list(app.pipelines)


def with_pipelines(
    target: str | None, name: str | None, act: Callable[[list[OpenPipeline]], Coroutine[Any, Any, T]]
) -> T:
    """Open the chosen pipelines without starting workers, and run an action on them."""
    loaded = load(target)
    names = choose_pipelines(loaded, [name])
    warn_if_in_memory(loaded)

    async def run() -> T:
        async with AsyncExitStack() as stack:
            return await act([await stack.enter_async_context(loaded.open(name, work=False)) for name in names])

    return asyncio.run(run())


def warn_if_in_memory(app: App) -> None:
    """Print a note if the ledger is in memory, because this process cannot see the ledger of another one."""
    if app.ledger_url.startswith("memory:"):
        print(
            "Note: the ledger is in memory (memory://), so only the process that runs the app can see it; "
            "with sqlite:///shop.db every command can",
            file=sys.stderr,
        )


def _load_config(path: str) -> App:
    if not Path(path).is_file():
        refuse(f"there is no file {path!r}; write path/to/pipeline.toml, seen from {os.getcwd()}")
    # The file may name functions in modules of the current folder.
    sys.path.insert(0, os.getcwd())
    return from_toml(path)


def import_place(place: str) -> ModuleType:
    """Import a module by its name or file; exit with status 2 if there is none, and with 1 if it is broken."""
    try:
        return _import_file(Path(place)) if place.endswith(".py") else _import_by_name(place)
    except KeywiseError as error:
        fail(f"{place}: {error}")
    except (typer.Exit, KeyboardInterrupt):
        raise
    except BaseException as error:
        fail(import_fault(place, error, frames=2))


def _import_by_name(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        refuse(
            f"no module is called {place!r}, looked for in {os.getcwd()} and the installed packages; "
            "change into the folder of your app, or write path/to/shop.py:app"
        )


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        refuse(f"there is no file {str(path)!r}; write path/to/shop.py:app, seen from {os.getcwd()}")
    # Like `python shop.py`: the file can import the modules in its own folder.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
