"""SQL lies in files beside the code: each statement has a name, and what the code asks for is what the file has."""

import re
import sys
from pathlib import Path

import pytest

import keywise
from keywise.core.statements import read_statements

SOURCE = Path(keywise.__file__).parent
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if "read_statements(__name__)" in path.read_text()]


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package that can be imported."""
    folder = tmp_path / "with_statements"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder


def test_statements_are_found_by_name_without_comments(package):
    (package / "queue.sql").write_text(
        "-- Of all.\n\n-- name: first\nselect 1\n-- why\nwhere true;\n\n-- Of second.\n-- name: second\nselect 2;\n"
    )
    assert read_statements("with_statements.queue") == {"first": "select 1\nwhere true", "second": "select 2"}


def test_two_statements_of_one_name_are_refused(package):
    (package / "queue.sql").write_text("-- name: first\nselect 1;\n-- name: first\nselect 2;\n")
    with pytest.raises(AssertionError, match="two statements named first"):
        read_statements("with_statements.queue")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_uses_every_statement_of_its_file_and_no_other(path):
    text = path.read_text()
    there = read_statements(".".join(("keywise", *path.relative_to(SOURCE).with_suffix("").parts)))
    used = set(re.findall(r'_SQL\["(\w+)"\]', text))
    for prefix in re.findall(r'_SQL\[f"(\w+)\{', text):
        used |= {name for name in there if name.startswith(prefix)}
    assert used == set(there)


def test_modules_with_statements_are_found():
    assert len(MODULES) > 8
