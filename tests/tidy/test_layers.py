"""Imports go towards the language only, and what decides never awaits."""

import ast
from collections.abc import Iterator

from tidy.tree import Module, expect_none, modules

# Each name is a file or a folder of src/keywise, and belongs to one layer. A new one is added here.
LAYERS = {
    "language": {
        "change",
        "protocols",
        "rules",
        "entry",
        "standing",
        "limits",
        "settings",
        "events",
        "errors",
        "clock",
        "address",
        "turn",
        "turn_rules",
    },
    "mechanisms": {
        "lanes",
        "fold",
        "heartbeat",
        "backoff",
        "threads",
        "envelope",
        "jobs",
        "news",
        "causes",
        "models",
        "alarm",
        "outage",
        "spool",
        "shelf",
        "late",
        "serial",
        "call",
        "modes",
        "settling",
    },
    "databases": {"databases"},
    "plugs": {"sources", "ledgers", "sinks", "origins", "turns"},
    "programs": {
        "pipeline",
        "consumer",
        "leased",
        "first_wins",
        "work",
        "transacted",
        "repair",
        "status",
        "history",
        "chores",
        "acts",
        "force",
        "patience",
        "reconcile",
        "replay",
        "truth",
        "moving",
        "ingest",
        "reindex",
        "merge",
        "held",
        "listener",
        "pulse",
        "sending",
        "runner",
    },
    "adapters": {"adapters"},
    "front": {"__init__", "app", "calling", "configuration", "options"},
    "doors": {"__main__", "cli", "testing", "dashboard"},
}

MAY_IMPORT = {
    "language": {"language"},
    "mechanisms": {"language", "mechanisms"},
    "databases": {"language", "databases"},
    "plugs": {"language", "databases"},
    "programs": {"language", "mechanisms", "programs"},
    "adapters": {"language"},
    "front": set(LAYERS) - {"doors"},
    "doors": set(LAYERS),
}

# They decide, and others act.
PURE = {"lanes", "fold", "rules", "turn_rules", "settling"}

LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}


def layer_faults(module: Module) -> list[str]:
    part = _part(module.path)
    if part not in LAYER_OF:
        return [f"{module.path}: {part} is in no layer; add it to LAYERS in tests/tidy/test_layers.py"]
    layer = LAYER_OF[part]
    return [
        f"{module.path}:{line}: {part} ({layer}) imports {imported} ({LAYER_OF.get(imported, 'no layer')})"
        for imported, line in _imported_parts(module)
        if LAYER_OF.get(imported) not in MAY_IMPORT[layer]
    ]


def waiting_faults(module: Module) -> list[str]:
    if _part(module.path) not in PURE:
        return []
    waits = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
    return [
        f"{module.path}:{node.lineno}: decides purely, so it never awaits"
        for node in ast.walk(module.tree)
        if isinstance(node, waits)
    ]


def _part(path: str) -> str:
    """The file or folder of src/keywise that a path is in."""
    return path.removeprefix("src/keywise/").split("/")[0].removesuffix(".py")


def _imported_parts(module: Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module.path, node)
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == "keywise" else [origin]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "keywise":
                yield _known_part(rest), node.lineno


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.removeprefix("src/").split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _known_part(dotted: str) -> str:
    """`from keywise import Change` asks the front; `from keywise import lanes` asks the module itself."""
    first = dotted.split(".", maxsplit=1)[0]
    return first if "." in dotted or first in LAYER_OF else "__init__"


def test_imports_go_towards_the_language_only():
    expect_none(fault for module in modules("src") for fault in layer_faults(module))


def test_lanes_and_rules_never_await():
    expect_none(fault for module in modules("src") for fault in waiting_faults(module))


def test_an_import_outwards_is_reported_however_it_is_written():
    for path, line in {
        "src/keywise/rules.py": "import keywise.consumer",
        "src/keywise/lanes.py": "from keywise.sources.memory import connect",
        "src/keywise/sinks/table.py": "from keywise import Change",
        "src/keywise/sources/queue.py": "from ..ledgers import memory",
        "src/keywise/ledgers/other.py": "from .memory import connect",
        "src/keywise/databases/sqlite.py": "from keywise import lanes",
        "src/keywise/consumer.py": "def f():\n    from keywise.ledgers import memory",
        "src/keywise/adapters.py": "from keywise.sources import memory",
        "src/keywise/app.py": "from .cli import main",
    }.items():
        assert len(layer_faults(Module.of(path, line))) == 1, (path, line)


def test_an_import_inwards_is_not_reported():
    for path, line in {
        "src/keywise/sinks/table.py": "from keywise.databases.sqlite import open_database",
        "src/keywise/consumer.py": "from keywise import lanes",
        "src/keywise/app.py": "from .sources.memory import connect",
        "src/keywise/cli/run.py": "from keywise import App",
        "src/keywise/rules.py": "import sqlite3",
    }.items():
        assert layer_faults(Module.of(path, line)) == [], (path, line)


def test_a_module_in_no_layer_is_reported_with_the_table_to_edit():
    (fault,) = layer_faults(Module.of("src/keywise/misc.py", ""))
    assert "LAYERS in tests/tidy/test_layers.py" in fault


def test_an_await_where_things_are_decided_is_reported():
    text = "async def claim():\n    await other()"
    assert len(waiting_faults(Module.of("src/keywise/rules.py", text))) == 2
    assert waiting_faults(Module.of("src/keywise/consumer.py", text)) == []
