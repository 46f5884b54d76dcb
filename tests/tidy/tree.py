"""Reads the repository for the tidy checks: its Python modules as syntax trees, and its text files."""

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("src", "tests", "examples", "benchmarks")
MADE_FOLDERS = {"build", "dist", "htmlcov", "__pycache__"}
HIDDEN_BUT_OURS = {".ci"}


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file; a check gets it as an argument, so that a bad sample can be handed in as text."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: str, text: str) -> "Module":
        return cls(path, text, ast.parse(text, path))


def modules(*folders: str) -> list[Module]:
    """Every Python file under these folders; raises if there is none, since a check of nothing proves nothing."""
    found = [module for module in _all_modules() if module.path.split("/")[0] in folders]
    assert found, f"no Python file in {folders}"
    return found


def texts() -> dict[str, str]:
    """Every text file that is ours, by its path; what make or a tool made is left out."""
    contents = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in _walk(ROOT)}
    return {path: content.decode("utf-8") for path, content in contents.items() if b"\0" not in content}


def expect_none(faults: Iterable[str]) -> None:
    """Fail with every fault on a line of its own."""
    found = list(faults)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@functools.cache
def _all_modules() -> list[Module]:
    """Parsed once for all checks, which only look at them."""
    paths = [(path.relative_to(ROOT).as_posix(), path) for path in _walk(ROOT) if path.suffix == ".py"]
    return [Module.of(name, path.read_text("utf-8")) for name, path in sorted(paths)]


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        # In a second work tree of git, .git is a file that names the first one.
        if path.is_symlink() or path.name == ".git":
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and _is_ours(path.name):
            yield from _walk(path)


def _is_ours(folder_name: str) -> bool:
    if folder_name.startswith("."):
        return folder_name in HIDDEN_BUT_OURS
    return folder_name not in MADE_FOLDERS
