"""Counts lines of code by folder: Python, SQL and Lua without blanks, comments and docstrings.

python benchmarks/code_lines.py            # this tree
python benchmarks/code_lines.py v0.1.0     # a commit
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import PurePosixPath

ROOT = "src/keywise/"
COMMENTS = {".sql": "--", ".lua": "--"}
SERIAL = ("serial", "turn", "merge", "calling.py", "held.py", "pulse.py", "settling.py", "modes.py", "sending.py")
SERIAL_FILES = ("call.py", "runner.py", "threads.py", "listener.py")
NOTHING = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(text: str) -> int:
    """Lines that hold a token of code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOTHING:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def other_lines(text: str, comment: str) -> int:
    stripped = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in stripped)


def group_of(path: PurePosixPath) -> str:
    """Serial functions, and what is there for tests, are counted apart."""
    parts = path.parts
    if parts[0] == "testing":
        return "testing"
    is_serial = any(word in part for part in parts for word in SERIAL) or path.name in SERIAL_FILES
    return "serial" if is_serial else "product"


def read_all(commit: str | None) -> dict[str, str]:
    listed = ["git", "ls-files", ROOT] if commit is None else ["git", "ls-tree", "-r", "--name-only", commit, ROOT]
    paths = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    kept = [path for path in paths if PurePosixPath(path).suffix in {".py", *COMMENTS}]
    return {path: _read(commit, path) for path in kept}


def _read(commit: str | None, path: str) -> str:
    if commit is None:
        with open(path, encoding="utf-8") as file:
            return file.read()
    return subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True).stdout


def main() -> None:
    counts = Counter[str]()
    for path, text in read_all(sys.argv[1] if len(sys.argv) > 1 else None).items():
        suffix = PurePosixPath(path).suffix
        lines = python_lines(text) if suffix == ".py" else other_lines(text, COMMENTS[suffix])
        counts[group_of(PurePosixPath(path.removeprefix(ROOT)))] += lines
    for group, lines in sorted(counts.items()):
        print(f"{group:<8} {lines:>7,}")
    print(f"{'all':<8} {counts.total():>7,}")


if __name__ == "__main__":
    main()
