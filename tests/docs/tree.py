"""Draws the tree of src/keywise for docs/architecture.md: each line has what its module says of itself.

`PYTHONPATH=tests .venv/bin/python -m docs.tree` renews the drawing on the page.
"""

import ast
import subprocess
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "src/keywise"
ARCHITECTURE = ROOT / "docs/architecture.md"
OPENING, CLOSING = f"```text\n{PACKAGE}/\n", "```\n"

# Folders below the first level whose modules have a line each. Of all others, only the names are drawn.
OPENED = {
    "adapters/postgres/",
    "core/serial/",
    "flow/degraded/",
    "flow/leased/",
    "testing/conformance/",
    "testing/handlers/",
    "testing/simulator/",
}
NAMES_WIDTH = 100


def drawing() -> str:
    """The tree as it is now, from the files that git knows."""
    listed = subprocess.run(["git", "ls-files", PACKAGE], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path.removeprefix(f"{PACKAGE}/") for path in listed.stdout.splitlines()]
    lines = list(_lines(paths, "", "  "))
    width = max(len(name) for name, _ in lines)
    return OPENING.splitlines()[1] + "\n" + "".join(f"{name:<{width}}  {summary}\n" for name, summary in lines)


def _lines(paths: list[str], folder: str, indent: str) -> Iterator[tuple[str, str]]:
    for name in _children(paths, folder):
        yield f"{indent}{name}", _summary(folder + name)
        if not name.endswith("/"):
            continue
        if folder == "" or folder + name in OPENED:
            yield from _lines(paths, folder + name, f"{indent}  ")
        else:
            yield from (("", line) for line in textwrap.wrap(", ".join(_names(paths, folder + name)), NAMES_WIDTH))


def _children(paths: Iterable[str], folder: str) -> list[str]:
    """The modules of a folder, then its packages, each in the order of the alphabet."""
    below = [path.removeprefix(folder) for path in paths if path.startswith(folder)]
    packages = {f"{path.split('/')[0]}/" for path in below if path.endswith(".py") and "/" in path}
    return sorted(
        path for path in below if path.endswith(".py") and "/" not in path and path != "__init__.py"
    ) + sorted(packages)


def _names(paths: Iterable[str], folder: str) -> list[str]:
    """All files and folders in a folder."""
    below = {path.removeprefix(folder).partition("/") for path in paths if path.startswith(folder)}
    return sorted({name + slash for name, slash, _ in below} - {"__init__.py"})


def _summary(name: str) -> str:
    """The first line of a module's docstring."""
    path = ROOT / PACKAGE / (f"{name}__init__.py" if name.endswith("/") else name)
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def _renew() -> None:
    before, opening, rest = ARCHITECTURE.read_text("utf-8").partition(OPENING)
    assert opening, f"{ARCHITECTURE} has no block that begins with {PACKAGE}/"
    _, closing, after = rest.partition(CLOSING)
    ARCHITECTURE.write_text(f"{before}```text\n{drawing()}{closing}{after}", "utf-8")


if __name__ == "__main__":
    _renew()
