"""From a URL to its adapter: each file in a plug folder names its schemes, and other packages use entry points."""

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keywise.address import Address, shown
from keywise.errors import AddressError, MissingExtraError, SettingsError

ROLES = ("sources", "ledgers", "sinks", "turns")


def connect(role: str, address: Address, *arguments: Any) -> Any:
    """Make the adapter for an address; it is opened later, by `async with`."""
    try:
        return _finder(role, address)(address, *arguments)
    except SettingsError as error:
        if (message := address.discreet(str(error))) == str(error):
            raise
        raise type(error)(message) from None


def schemes(role: str) -> dict[str, str]:
    """All schemes of a role, with the module that serves each."""
    found: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / role).glob("*.py")):
        for scheme in _schemes_of(path):
            found[scheme] = f"keywise.{role}.{path.stem}"
    for point in importlib.metadata.entry_points(group=f"keywise.{role}"):
        found[point.name] = point.value
    return found


def _finder(role: str, address: Address) -> Callable[..., Any]:
    known = schemes(role)
    module = known.get(address.scheme)
    if module is None:
        near = difflib.get_close_matches(address.scheme, known, 1)
        hint = f"did you mean {near[0]}://?" if near else f"known are: {', '.join(sorted(known))}"
        raise AddressError(f"no {role[:-1]} understands {address.scheme}:// in {shown(address.url)}; {hint}")
    return load(module)


def load(module: str) -> Callable[..., Any]:
    """Import a plug and return its `connect`; a library that it lacks is named with the extra that brings it."""
    try:
        plug = importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = module.rpartition(".")[2]
        raise MissingExtraError(
            f"{module} needs {error.name}, which is not installed; run: pip install 'keywise[{extra}]'"
        ) from error
    connect: Callable[..., Any] = plug.connect
    return connect


@functools.cache
def _schemes_of(path: Path) -> tuple[str, ...]:
    """Read SCHEMES without importing the file, because its library may be missing."""
    written = re.search(r"^SCHEMES = \(([^)]*)\)", path.read_text(), re.MULTILINE)
    return tuple(re.findall(r'"([^"]+)"', written[1])) if written is not None else ()
