"""Functions and protocols stay as small as one reader holds in mind."""

import ast

from tidy.tree import PYTHON_FOLDERS, Module, expect_none, modules

FUNCTION_LINES_MAX = 60
PROTOCOL_METHODS_MAX = 9

Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_faults(module: Module) -> list[str]:
    return [
        f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def protocol_faults(module: Module) -> list[str]:
    classes = {node.name: node for node in module.tree.body if isinstance(node, ast.ClassDef)}
    protocols = {name: node for name, node in classes.items() if _is_protocol(node)}
    return [
        f"{module.path}:{node.lineno}: {name} has {len(methods)} public methods, at most {PROTOCOL_METHODS_MAX}"
        for name, node in protocols.items()
        if len(methods := _public_methods(node, classes)) > PROTOCOL_METHODS_MAX
    ]


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def _public_methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Those of the bases in the same file count too: an adapter has to write them all. A property is an attribute."""
    functions = [item for item in node.body if isinstance(item, Function) and not _is_property(item)]
    own = {item.name for item in functions if not item.name.startswith("_")}
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return own.union(*(_public_methods(base, classes) for base in bases))


def _is_property(node: Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)


def test_functions_are_short():
    expect_none(fault for module in modules(*PYTHON_FOLDERS) for fault in function_faults(module))


def test_protocols_are_narrow():
    protocols = [module for module in modules("src") if module.path == "src/keywise/core/ledger.py"]
    assert protocols, "src/keywise/core/ledger.py is missing"
    expect_none(fault for module in protocols for fault in protocol_faults(module))


def test_a_long_function_is_reported_also_inside_a_class():
    body = "        x = 1\n"
    assert function_faults(Module.of("src/a.py", "class A:\n    def f(self):\n" + body * 59)) == []
    assert len(function_faults(Module.of("src/a.py", "class A:\n    async def f(self):\n" + body * 60))) == 1


def test_a_wide_protocol_is_reported_also_when_it_is_wide_by_its_base():
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(9))
    hidden = "    def _hidden(self): ...\n    @property\n    def shown(self): ...\n"
    narrow = f"class A(Protocol):\n{methods}{hidden}"
    assert protocol_faults(Module.of("src/a.py", narrow)) == []
    wide = f"{narrow}class B(A, Protocol):\n    async def more(self): ...\n"
    assert protocol_faults(Module.of("src/a.py", wide)) == ["src/a.py:14: B has 10 public methods, at most 9"]
