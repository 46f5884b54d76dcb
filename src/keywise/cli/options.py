"""Options of commands: a decorator for groups of shared options, and checks of the values that the user has given."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass

from keywise.cli.output import refuse
from keywise.core.errors import SettingsError
from keywise.core.settings import seconds


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose parameters may be dataclasses of options.

    Typer sees one option for each of their fields, at the place of the parameter.
    """
    groups, parameters = {}, list[inspect.Parameter]()
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += inspect.signature(kind).parameters.values()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**given: object) -> None:
        values = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        function(**given, **values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parse_duration(text: str, option: str) -> float:
    """Return the seconds; exit with status 2 if the text is no duration."""
    try:
        return seconds(text)
    except SettingsError as error:
        refuse(f"{option}: {error}")


def require_valid_key(key: str) -> str:
    """Return the key; exit with status 2 if it is empty or cannot be stored."""
    if not key:
        refuse("the key is empty; name one, as in page-17")
    return require_storable(key, "a key")


def require_storable(text: str, what: str) -> str:
    """Return the text; exit with status 2 if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(f"{text!r} is no UTF-8 text, so it cannot be {what}")
    return text


def suggestion(name: str, known: Collection[str], otherwise: str) -> str:
    """Return the known name that is closest to `name`, as a question; without a close one, return `otherwise`."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else otherwise
