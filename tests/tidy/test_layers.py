"""Imports go towards core only, folder by folder, and what decides never awaits."""

import ast
from collections.abc import Iterator

from tidy.tree import Module, expect_none, modules

FRONT = {"__init__", "app", "config", "options"}
ROOMS = {"core", "flow", "operate", "observe", "serial", "ingest", "reindex", "adapters"}
DOORS = {"__main__", "cli", "dashboard", "testing"}

# What each folder of src/keywise may import besides itself. A new folder is added here.
MAY_IMPORT = {
    "core": set(),
    "flow": {"core"},
    "serial": {"core"},
    "observe": {"core"},
    "adapters": {"core"},
    "operate": {"core", "flow"},
    "ingest": {"core", "flow"},
    "reindex": {"core", "flow", "operate", "ingest"},
    **dict.fromkeys(FRONT, FRONT | ROOMS),
    "testing": FRONT | ROOMS,
    "dashboard": FRONT | ROOMS,
    "cli": FRONT | ROOMS | DOORS,
    "__main__": FRONT | ROOMS | DOORS,
}

# Each technology stands alone, except that one may build on another one's client.
SHARED_ADAPTERS = {("opensearch", "http"), ("sqs", "aws"), ("dynamodb", "aws")}

# They decide, and others act.
PURE = {
    "core/rules.py",
    "core/serial/rules.py",
    "core/serial/steps.py",
    "core/ledger_steps.py",
    "flow/coalesce.py",
    "flow/lanes.py",
    "ingest/dialects/__init__.py",
    "ingest/dialects/function.py",
    "ingest/dialects/gcs.py",
    "ingest/dialects/s3.py",
    "ingest/dialects/uri.py",
    "ingest/keys.py",
    "ingest/notification.py",
    "ingest/versions.py",
    "serial/mode_transitions.py",
}


def layer_faults(module: Module) -> list[str]:
    part = _part(module.path)
    if part not in MAY_IMPORT:
        return [f"{module.path}: {part} is no folder of the house; add it to MAY_IMPORT in tests/tidy/test_layers.py"]
    return [
        f"{module.path}:{line}: {part} imports {imported}"
        for imported, line in _imports(module)
        if not _is_allowed(module.path, part, imported)
    ]


def waiting_faults(module: Module) -> list[str]:
    if module.path.removeprefix("src/keywise/") not in PURE:
        return []
    waits = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
    return [
        f"{module.path}:{node.lineno}: decides purely, so it never awaits"
        for node in ast.walk(module.tree)
        if isinstance(node, waits)
    ]


def _is_allowed(path: str, part: str, imported: str) -> bool:
    first, _, rest = imported.partition(".")
    if first not in MAY_IMPORT:
        first = "__init__"  # `from keywise import Change` asks the front.
    if part == first == "adapters":
        ours, theirs = path.split("/")[3], rest.split(".")[0]
        return ours == theirs or (ours, theirs) in SHARED_ADAPTERS
    return first == part or first in MAY_IMPORT[part]


def _part(path: str) -> str:
    """The file or folder of src/keywise that a path is in."""
    return path.removeprefix("src/keywise/").split("/")[0].removesuffix(".py")


def _imports(module: Module) -> Iterator[tuple[str, int]]:
    """What is imported of keywise, without that word: `core.rules`, or `Change`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module.path, node)
            is_folder = origin in {"keywise", "keywise.adapters"}
            names = [f"{origin}.{alias.name}" for alias in node.names] if is_folder else [origin]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "keywise":
                yield rest or "__init__", node.lineno


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.removeprefix("src/").split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def test_imports_go_towards_core_only():
    expect_none(fault for module in modules("src") for fault in layer_faults(module))


def test_what_decides_never_awaits():
    decided = [module for module in modules("src") if module.path.removeprefix("src/keywise/") in PURE]
    assert len(decided) == len(PURE)
    expect_none(fault for module in decided for fault in waiting_faults(module))


def test_an_import_outwards_is_reported_however_it_is_written():
    for path, line in {
        "src/keywise/core/rules.py": "import keywise.flow.consumer",
        "src/keywise/flow/lanes.py": "from keywise.adapters.memory.source import connect",
        "src/keywise/flow/consumer.py": "def f():\n    from keywise.observe import history",
        "src/keywise/adapters/sqlite/sink.py": "from keywise import Change",
        "src/keywise/adapters/redis/source.py": "from ..memory import database",
        "src/keywise/adapters/http/sink.py": "from keywise.adapters.opensearch import sink",
        "src/keywise/adapters/__init__.py": "from keywise.adapters.memory.source import connect",
        "src/keywise/serial/client.py": "from keywise import flow",
        "src/keywise/app.py": "from .cli import main",
        "src/keywise/testing/world.py": "import keywise.cli",
    }.items():
        assert len(layer_faults(Module.of(path, line))) == 1, (path, line)


def test_an_import_inwards_is_not_reported():
    for path, line in {
        "src/keywise/adapters/sqlite/sink.py": "from keywise.adapters.sqlite.database import open_database",
        "src/keywise/adapters/opensearch/sink.py": "from keywise.adapters.http.client import HttpClient",
        "src/keywise/operate/force.py": "from keywise.flow import repair",
        "src/keywise/app.py": "from .adapters.memory.source import connect",
        "src/keywise/cli/commands/run.py": "from keywise import App",
        "src/keywise/core/rules.py": "import sqlite3",
    }.items():
        assert layer_faults(Module.of(path, line)) == [], (path, line)


def test_a_module_outside_the_house_is_reported_with_the_table_to_edit():
    (fault,) = layer_faults(Module.of("src/keywise/misc.py", ""))
    assert "MAY_IMPORT in tests/tidy/test_layers.py" in fault


def test_an_await_where_things_are_decided_is_reported():
    text = "async def claim():\n    await other()"
    assert len(waiting_faults(Module.of("src/keywise/core/rules.py", text))) == 2
    assert waiting_faults(Module.of("src/keywise/flow/consumer.py", text)) == []
