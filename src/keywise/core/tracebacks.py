"""Tracebacks of exceptions in user code: as text for a dead letter, and the line of user code that raised it."""

import os
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

from keywise.core.errors import PermanentError, UnavailableError
from keywise.core.url import without_secrets

TRACEBACK_MAX = 20_000
"""How many characters of a traceback are kept: of a longer one the beginning, and most of the end."""
BEGIN_MAX = 4000

_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHONS = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_CALL_USER_CODE = tuple(_OURS + part for part in ("adapters/function/", "flow/intake", "flow/refetch", "operate/"))
"""Our modules that call user functions."""


class _Call(NamedTuple):
    file: str
    line: int
    function: str


def traceback_of(error: BaseException) -> str:
    """Return the traceback, from the user's code on, as text that every store accepts.

    It is empty for `UnavailableError`, which says itself what is away, and for a change that a sink of ours refuses.
    """
    calls = _calls(error)
    first = _first_foreign(calls)
    if isinstance(error, UnavailableError) or (isinstance(error, PermanentError) and first == len(calls)):
        return ""
    described = traceback.TracebackException.from_exception(error)
    described.stack[:] = described.stack[first:] or described.stack
    text = escaped(without_secrets("".join(described.format()).rstrip("\n")))
    if len(text) <= TRACEBACK_MAX:
        return text
    note = f"\n… {len(text) - TRACEBACK_MAX:,} characters left out …\n"
    return text[:BEGIN_MAX] + note + text[BEGIN_MAX + len(note) - TRACEBACK_MAX :]


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code as ` (shop.py, line 3, in index)`; empty if there is none."""
    calls = _calls(error)
    own = [call for call in calls if not (_is_library(call.file) or _is_installed(call.file))]
    own = own or _of_installed_app(calls)
    if not own:
        return ""
    file, line, function = own[-1]
    shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f" ({shown}, line {line}, in {function})"


def escaped(text: str) -> str:
    """Return text without NUL and lone surrogates, which stores refuse."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _calls(error: BaseException) -> list[_Call]:
    """Return the calls of a traceback, the outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [_Call(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def _first_foreign(calls: list[_Call]) -> int:
    """Return the index of the first call that is neither ours nor Python's own: the function that we called."""
    return next((index for index, call in enumerate(calls) if not _is_library(call.file)), len(calls))


def _of_installed_app(calls: list[_Call]) -> list[_Call]:
    """Return the calls inside an app that is an installed package: those in the folder of the function that we called.

    A client library of one of our adapters is an installed package too, and no code of the user's.
    """
    first = _first_foreign(calls)
    callers = [call.file for call in calls[:first] if call.file.startswith(_OURS)]
    if first == len(calls) or not callers or not callers[-1].startswith(_CALL_USER_CODE):
        return []
    folder = os.path.dirname(calls[first].file) + os.sep
    return [call for call in calls if call.file.startswith(folder)]


def _is_library(file: str) -> bool:
    """Whether a file is ours, or Python's own."""
    is_pythons = file.startswith(_PYTHONS) and not _is_installed(file)
    return is_pythons or file.startswith((_OURS, "<frozen "))


def _is_installed(file: str) -> bool:
    return any(part in _INSTALLED for part in Path(file).parts)
