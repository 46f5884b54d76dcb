"""What never appears: unfinished notes, stray prints, sleeping tests, mocks, unsafe calls, traces of one machine."""

import ast
import re
from collections.abc import Iterator

from tidy.tree import PYTHON_FOLDERS, Module, expect_none, modules, texts

# Put together here, so that this file does not hold what it forbids.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
REGISTRY_HOSTS = [
    name + ending
    for name, ending in (
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
        ("anaconda", ".org"),
        ("npmjs", ".org"),
        ("npmjs", ".com"),
        ("docker", ".io"),
        ("ghcr", ".io"),
        ("quay", ".io"),
    )
]
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/" + r"(?:work|root)/")
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve"}
MOCK_MODULES = {"unittest.mock", "mock", "pytest_mock"}
SLEEPS = {"time.sleep", "asyncio.sleep"}


def unfinished_faults(module: Module) -> list[str]:
    lines = enumerate(module.text.splitlines(), start=1)
    return [f"{module.path}:{number}: unfinished: {line.strip()}" for number, line in lines if UNFINISHED.search(line)]


def print_faults(module: Module) -> list[str]:
    if module.path.startswith("src/keywise/cli/"):
        return []
    return [f"{module.path}:{line}: print; only cli/ speaks" for name, line in _calls(module.tree) if name == "print"]


def sleep_faults(module: Module) -> list[str]:
    used = {*_uses(module.tree), *_imports(module.tree)}
    return [f"{module.path}:{line}: {name}; wait for a condition" for name, line in sorted(used) if name in SLEEPS]


def unsafe_faults(module: Module) -> list[str]:
    calls = [(name, line) for name, line in _calls(module.tree) if name in UNSAFE_CALLS]
    imports = [(name, line) for name, line in _imports(module.tree) if name.split(".")[0] in UNSAFE_MODULES]
    return [f"{module.path}:{line}: {name} runs what it is given" for name, line in calls + imports]


def mock_faults(module: Module) -> list[str]:
    return [
        f"{module.path}:{line}: {name}; use an adapter that passes the conformance suite"
        for name, line in _imports(module.tree)
        if name in MOCK_MODULES or name.rpartition(".")[0] in MOCK_MODULES
    ]


def trace_faults(path: str, text: str) -> list[str]:
    hosts = [f"{path}: names the registry host {host}" for host in REGISTRY_HOSTS if host in text]
    return hosts + [f"{path}: holds a path of one machine: {found}" for found in MACHINE_PATHS.findall(text)]


def _calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno


def _uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules by their name; what is imported from one as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_nothing_is_left_unfinished():
    expect_none(fault for module in modules("src") for fault in unfinished_faults(module))


def test_only_the_command_line_prints():
    expect_none(fault for module in modules("src") for fault in print_faults(module))


def test_no_test_sleeps():
    # A mutant is a broken product: it sleeps on the virtual loop, where that takes no time.
    judged = [module for module in modules("tests") if not module.path.startswith("tests/mutants/")]
    expect_none(fault for module in judged for fault in sleep_faults(module))


def test_nothing_unsafe_is_called():
    expect_none(fault for module in modules(*PYTHON_FOLDERS) for fault in unsafe_faults(module))


def test_nothing_is_mocked():
    expect_none(fault for module in modules(*PYTHON_FOLDERS) for fault in mock_faults(module))


def test_the_tree_holds_no_registry_host_and_no_path_of_one_machine():
    files = texts()
    assert "pyproject.toml" in files
    expect_none(fault for path, text in files.items() for fault in trace_faults(path, text))


def test_an_unfinished_note_is_reported():
    assert len(unfinished_faults(Module.of("src/a.py", "x = 1  # " + "TO" + "DO: more"))) == 1
    assert unfinished_faults(Module.of("src/a.py", "METHODOLOGY = 1")) == []


def test_a_print_is_reported_outside_the_command_line():
    assert len(print_faults(Module.of("src/keywise/flow/lanes.py", "print(1)"))) == 1
    assert print_faults(Module.of("src/keywise/cli/commands/run.py", "print(1)")) == []


def test_a_sleep_is_reported_however_it_is_reached():
    for text in ("import time\ntime.sleep", "from asyncio import sleep", "async def f(): await asyncio.sleep"):
        assert len(sleep_faults(Module.of("tests/a.py", text + "\n"))) == 1, text


def test_an_unsafe_call_is_reported():
    for text in ("eval('1')", "exec(text)", "import pickle", "from pickle import loads"):
        assert len(unsafe_faults(Module.of("src/a.py", text))) == 1, text
    assert unsafe_faults(Module.of("src/a.py", "redis.eval(script)")) == []


def test_a_mock_is_reported():
    package = "unittest"
    for text in (f"import {package}.mock", f"from {package} import mock", f"from {package}.mock import Mock"):
        assert len(mock_faults(Module.of("tests/a.py", text))) == 1, text


def test_a_trace_of_a_registry_or_a_machine_is_reported():
    for host in REGISTRY_HOSTS:
        assert trace_faults("a.md", f"see https://{host}/x")
    for folder in ("work", "root"):
        assert trace_faults("a.md", f"cd '/{folder}/main'"), folder
    assert trace_faults("a.md", "sources/work/list and https://example.net/work/list") == []
