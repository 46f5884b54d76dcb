"""One word, one meaning: names that the glossary replaces are refused, and every module says what it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tidy.tree import PYTHON_FOLDERS, Module, expect_none, modules

# A file is named after its one noun.
VAGUE_MODULES = {"util", "utils", "helper", "helpers", "common", "base", "misc", "manager"}

# The word that is refused in a name of ours, and the word to use.
SYNONYMS = {
    "payload": "body",
    "partition": "key",
    "revision": "version",
    "high_water": "mark",
    "highwater": "mark",
    "watermark": "mark",
    "lock_info": "claim",
    "fencing": "token",
    "finalize": "settle",
    "garbage": "prune",
    "max_retries": "attempts_max",
}


def module_name_faults(module: Module) -> list[str]:
    name = PurePosixPath(module.path).stem.strip("_")
    return [f"{module.path}: named {name}; name it after its one noun"] if name in VAGUE_MODULES else []


def synonym_faults(module: Module) -> list[str]:
    return [
        f"{module.path}:{line}: {name} says {word}; the word is {SYNONYMS[word]}"
        for name, line in _names_of_ours(module.tree)
        for word in SYNONYMS
        if f"_{word}_" in f"_{_snake(name)}_"
    ]


def docstring_faults(module: Module) -> list[str]:
    docstring = ast.get_docstring(module.tree)
    if docstring is None:
        return [f"{module.path}: no docstring"]
    first = docstring.splitlines()[0]
    if not first.endswith((".", "?")) or re.search(r"[.?!] [A-Z]", first):
        return [f"{module.path}: the docstring's first line is not one sentence: {first}"]
    return []


def _names_of_ours(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are defined here; those that are only used may be somebody else's, as in `text.partition()`."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_no_module_has_a_vague_name():
    expect_none(fault for module in modules(*PYTHON_FOLDERS) for fault in module_name_faults(module))


def test_names_are_the_words_of_the_glossary():
    expect_none(fault for module in modules("src") for fault in synonym_faults(module))


def test_every_module_opens_with_one_sentence():
    expect_none(fault for module in modules(*PYTHON_FOLDERS) for fault in docstring_faults(module))


def test_a_vague_module_name_is_reported():
    for path in ("src/keywise/utils.py", "src/keywise/sinks/_base.py", "tests/helpers.py"):
        assert len(module_name_faults(Module.of(path, ""))) == 1, path
    assert module_name_faults(Module.of("src/keywise/adapters/sqlite/database.py", "")) == []


def test_a_synonym_is_reported_wherever_a_name_is_made():
    for text in (
        "class PayloadReader: ...",
        "def finalize_all(): ...",
        "async def read(payload): ...",
        "def read(*, high_water: int): ...",
        "partition = 1",
        "lock_info: dict = {}",
        "self.max_retries = 3",
        "for revision in (): ...",
    ):
        assert len(synonym_faults(Module.of("src/a.py", text))) == 1, text


def test_a_name_that_is_only_used_is_not_reported():
    assert synonym_faults(Module.of("src/a.py", "head, _, tail = text.partition('/')")) == []


def test_a_module_without_one_sentence_is_reported():
    for text in ("x = 1", '"""Values"""', '"""Reads. And writes."""', '"""A sentence that goes on\nhere."""'):
        assert len(docstring_faults(Module.of("src/a.py", text))) == 1, text
    assert docstring_faults(Module.of("src/a.py", '"""Reads e.g. a file.\n\nAnd more. So much."""')) == []
