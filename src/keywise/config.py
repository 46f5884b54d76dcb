"""Reads an app from a TOML file: the words are those of `App`, and URLs may hold `${VARIABLES}` of the environment."""

import difflib
import importlib
import inspect
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keywise.app import App
from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.limits import Debounce, Rate
from keywise.core.settings import unknown_setting
from keywise.core.url import filled
from keywise.options import PIPELINE_WORDS, ObjectOptions, PipelineOptions, Retry

TABLES = {
    "retry": (Retry, 'retry = { attempts = 5, backoff = "500ms", max = "1m" }'),
    "debounce": (Debounce, 'debounce = { quiet = "500ms", max_wait = "5s" }'),
    "rate": (Rate, 'rate = { n = 1, per = "1s" }'),
}
"""Words whose value is a table: what becomes of it, and what to write."""
FUNCTIONS = ("read", "apply", "refetch", "lookup")
WORDS = {"sources", "sink", "origin", *PIPELINE_WORDS, *FUNCTIONS, *PipelineOptions.__annotations__}
OBJECT_WORDS = {"store", *WORDS, *ObjectOptions.__annotations__}


def load(path: str | os.PathLike[str]) -> App:
    """Make the app that a TOML file describes; a mistake raises `SettingsError`, with its place in the file.

    Functions are named as `module:function`, and found beside the file too.
    """
    file = Path(path)
    document = _parsed(file)
    with _at(str(path)):
        _check_words(document, ("ledger", "pipeline", "objects"))
        if "ledger" not in document:
            raise SettingsError('there is no ledger; write ledger = "sqlite:///shop.db" at the top')
        app = App(_url("ledger", document["ledger"]))
        for kind in ("pipeline", "objects"):
            for name, table in _table(kind, document.get(kind, {}), f"[{kind}.NAME]").items():
                with _at(f"[{kind}.{_quoted(name)}]"):
                    given = _table(f"{kind}.{name}", table, f"[{kind}.NAME] above it")
                    _define(app, name, given, file.resolve().parent, has_objects=kind == "objects")
    return app


def _define(app: App, name: str, table: Mapping[str, Any], folder: Path, *, has_objects: bool) -> None:
    """Define the pipeline, or the object pipeline, that the table describes."""
    _check_words(table, OBJECT_WORDS if has_objects else WORDS)
    sources = _sources(table.get("sources", []), folder, has_objects=has_objects)
    functions = {word: _function(word, table[word], folder) for word in FUNCTIONS if word in table}
    made = {word: _made(word, table[word]) for word in TABLES if word in table}
    if "format" in table:
        made["format"] = _name_or_function("format", table["format"], folder)
    own = {"sources", "sink", "origin", "store", *FUNCTIONS, *TABLES, *made}
    rest = {word: value for word, value in table.items() if word not in own}
    if not has_objects:
        pipeline = app.pipeline(name, read=functions.get("read"), **made, **rest)
    elif "store" in table:
        store = _url("store", table["store"])
        pipeline = app.objects(name, store=store, read=functions.get("read"), **made, **rest)
    else:
        raise SettingsError('store is missing; write for example store = "s3://uploads"')
    for url, options in sources:
        pipeline.source(url, **options)
    if "sink" in table:
        pipeline.sink(_url("sink", table["sink"]))
    if "origin" in table:
        pipeline.origin(_url_or_object("origin", table["origin"], folder))
    for decorate in (pipeline.apply, pipeline.refetch, pipeline.lookup):
        if decorate.__name__ in functions:
            decorate(functions[decorate.__name__])


def _sources(entries: Any, folder: Path, *, has_objects: bool) -> list[tuple[str, dict[str, Any]]]:
    words = ("url", "lane", "dialect") if has_objects else ("url", "lane")
    example = '{ url = "sqlite:///shop.db", dialect = "s3" }' if has_objects else '"sqlite:///shop.db"'
    if not isinstance(entries, list):
        raise SettingsError(f"sources is no list; write sources = [{example}]")
    sources = [_source(entry, words) for entry in entries]
    for _, options in sources:
        if "dialect" in options:
            with _at("sources"):
                options["dialect"] = _name_or_function("dialect", options["dialect"], folder)
    return sources


def _source(entry: Any, words: Collection[str]) -> tuple[str, dict[str, Any]]:
    """A URL alone, or a table with the URL and more."""
    if not isinstance(entry, dict):
        return _url("sources", entry), {}
    with _at("sources"):
        _check_words(entry, words)
        if "url" not in entry:
            raise SettingsError(f'url is missing in {entry}; write {{ url = "sqlite:///shop.db" }}')
    return _url("sources", entry["url"]), {word: value for word, value in entry.items() if word != "url"}


def _name_or_function(word: str, value: Any, folder: Path) -> Any:
    """The name of something that keywise has, or a function, named as `module:function`."""
    return _function(word, value, folder) if isinstance(value, str) and ":" in value else value


def _made(word: str, table: Any) -> Any:
    """A value of the app's own, from the table with its parameters."""
    kind, example = TABLES[word]
    given = _table(word, table, example)
    with _at(word):
        parameters = inspect.signature(kind).parameters
        _check_words(given, parameters)
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise SettingsError(f"{name} is missing; write {example}")
        return kind(**given)


def _url(word: str, url: Any) -> str:
    """The URL with its variables filled in; `$${` is a literal `${`."""
    if not isinstance(url, str):
        raise SettingsError(f'{word}: {url!r} is no URL; write for example "sqlite:///shop.db"')
    with _at(word):
        return filled(url)


def _url_or_object(word: str, value: Any, folder: Path) -> Any:
    """A URL, or an object of the user's, named as `module:object`."""
    if isinstance(value, str) and ":" in value and "://" not in value:
        return _found(word, value, folder, "object")
    return _url(word, value)


def _function(word: str, target: Any, folder: Path) -> Callable[..., Any]:
    """Import a function, also from a module that lies beside the file."""
    function = _found(word, target, folder, "function")
    if not callable(function):
        raise SettingsError(f"{word}: {target} is no function but {type(function).__name__}; name a function")
    return function  # type: ignore[no-any-return]


def _found(word: str, target: Any, folder: Path, kind: str) -> Any:
    """Import what `module:name` names; `kind` is what the user is asked for."""
    module, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not module or not name:
        raise SettingsError(f'{word}: {target!r} names no {kind}; write {word} = "module:{kind}"')
    if str(folder) not in sys.path:
        # As if Python had been started with a file of that folder, which may import its neighbours later, too.
        sys.path.insert(0, str(folder))
    with _at(word):
        imported = _imported(module, folder)
        found = getattr(imported, name, None)
        if found is None:
            near = difflib.get_close_matches(name, vars(imported), 1)
            hint = f"did you mean {module}:{near[0]}?" if near else "define it there"
            raise SettingsError(f"{module} has no {kind} {name!r}; {hint}")
    return found


def _imported(module: str, folder: Path) -> Any:
    try:
        return importlib.import_module(module)
    except KeywiseError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise SettingsError(
                f"no module is called {module!r}, looked for in {folder} and the installed packages"
            ) from None
        raise SettingsError(import_fault(module, error, frames=1)) from error


def import_fault(module: str, error: BaseException, frames: int) -> str:
    """Describe where a user's module is broken, without the frames of the import machinery.

    `frames` is how many frames of ours the traceback begins with.
    """
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({found[-1].filename}, line {found[-1].lineno})" if len(found) > frames else ""
    return f"{module} cannot be imported: {type(error).__name__}: {error}{where}"


def _parsed(file: Path) -> dict[str, Any]:
    text = ""
    try:
        text = file.read_text("utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise SettingsError(f"there is no file {str(file)!r}, seen from {os.getcwd()}; write its path") from None
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}; name a TOML file") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is no UTF-8 text at byte {error.start}; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        cause = str(error).replace("end of document", f"line {len(text.splitlines())}, the last one")
        raise SettingsError(f"{file} is no TOML: {cause}; mend it there") from None
    except RecursionError:
        raise SettingsError(f"{file} has values inside of values without end; keep it flat") from None


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Say where a mistake stands."""
    try:
        yield
    except SettingsError as error:
        raise type(error)(f"{place}: {error}") from error.__cause__


def _table(word: str, value: Any, example: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{word} is no table; write {example}")
    return value


def _check_words(given: Mapping[str, Any], known: Collection[str]) -> None:
    for word in given:
        if word not in known:
            raise unknown_setting(word, known)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else f'"{name}"'
