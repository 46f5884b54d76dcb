"""The list in contracts.py is complete: every contract of core, and every class that serves one."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

import keywise.adapters
import keywise.core
from keywise import adapters
from tidy.tree import expect_none

NO_ADAPTERS = {
    "AsyncResource": "a part of the contracts of sources, ledgers, sinks and serial stores",
    "OutcomeSource": "served by the queue between two parts of one process",
    "Reporter": "served by observers of the package",
}
"""Contracts of core that no adapter is listed under, with the reason."""

SAME_NAMES = {
    ("QueueLimits", "AckTimeoutSource"): "it is a value that the source learns",
    ("Signature", "AsyncDatabase"): "it says whether a handler is a coroutine function",
    ("RedisEntries", "ReadableSink"): "it reads entries of the ledger",
    ("RedisScope", "LosesWrites"): "the ledger passes its count on",
    ("RedisTurnsStore", "LosesWrites"): "it counts the losses of serial requests",
}
"""Classes that have the names of a contract by chance, with the reason."""


WRITTEN_BY_STEPS = ("TurnBook",)
"""Contracts with attributes that the caller writes as well."""


def listed() -> dict[type, tuple[type, ...]]:
    """Contract by contract, the classes that contracts.py names."""
    # Loaded from its file: its folder has the name of a module of Python.
    spec = importlib.util.spec_from_file_location("contracts_under_test", Path(__file__).with_name("contracts.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    contracts = {name: get_args(get_args(hint)[0])[0] for name, hint in get_type_hints(module).items()}
    return {contract: vars(module)[name] for name, contract in contracts.items()}


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def classes_of(package: ModuleType) -> Iterator[type]:
    for module in modules_of(package):
        yield from (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)


def protocols_of(package: ModuleType) -> list[type]:
    return [one for one in classes_of(package) if vars(one).get("_is_protocol", False)]


def serves(kind: type, protocol: type) -> bool:
    """Whether a class has what a contract names: its attributes, and its methods with the same parameters."""
    return all(
        _takes(getattr(kind, name, None), member) if inspect.isfunction(member) else name in attributes(kind)
        for name, member in members(protocol).items()
    )


def members(protocol: type) -> dict[str, object]:
    """What a class has to have, that of inherited contracts included."""
    protocols = [base for base in protocol.__mro__ if vars(base).get("_is_protocol", False)]
    found = {name: one for base in protocols for name, one in (inspect.get_annotations(base) | vars(base)).items()}
    dunders = ("__aenter__", "__aexit__", "__call__")
    return {name: one for name, one in found.items() if not name.startswith("_") or name in dunders}


def _takes(method: object, contract: Callable[..., object]) -> bool:
    """Whether a method has the parameters of a contract; it may have more, if they can be left out."""
    if not inspect.isfunction(method):
        return False
    own, wanted = inspect.signature(method).parameters, list(inspect.signature(contract).parameters)
    more = (parameter for name, parameter in own.items() if name not in wanted)
    return list(own)[: len(wanted)] == wanted and all(one.default is not one.empty for one in more)


@functools.cache
def attributes(kind: type) -> frozenset[str]:
    """What an object of a class has: names of the class, and those that its methods set on `self`."""
    ours = [one for one in kind.__mro__ if one is kind or one.__module__.startswith("keywise.")]
    nodes = (node for one in ours for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))))
    stores = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = (node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self")
    return frozenset((*dir(kind), *own))


def returned_by_connect(module: str) -> tuple[set[str], set[str]]:
    """The names of the classes that `connect` makes, and of the contracts that it is annotated with."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    [connect] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "connect"]
    assert connect.returns is not None, f"{module}.connect names no contract"
    made = [node.value for node in ast.walk(connect) if isinstance(node, ast.Return)]
    contracts = {part.strip() for part in ast.unparse(connect.returns).split("|")}
    return {one.func.id for one in made if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}, contracts


PLUGS = sorted({(role, module) for role, modules in adapters.ADAPTERS.items() for module in modules.values()})
ROLES = {
    "sources": {"Source"},
    "ledgers": {"PluggedLedger"},
    "sinks": {"Sink", "AtomicSink"},
    "record_sinks": {"Sink", "AtomicSink"},
    "origins": {"Origin"},
    "turns": {"Turns"},
    "stores": {"ObjectStore"},
    "notifiers": {"Notifier"},
}


def test_every_contract_of_core_is_listed():
    names = {contract.__name__ for contract in listed()}
    assert names | set(NO_ADAPTERS) == {protocol.__name__ for protocol in protocols_of(keywise.core)}
    assert not names & set(NO_ADAPTERS)
    assert all(listed().values())


@pytest.mark.parametrize(("role", "module"), PLUGS)
def test_connect_is_annotated_with_its_contract_and_what_it_makes_is_listed(role: str, module: str):
    made, contracts = returned_by_connect(module)
    served = {kind.__name__ for contract, kinds in listed().items() if contract.__name__ in contracts for kind in kinds}
    assert contracts <= ROLES[role]
    assert made and made <= served


def test_every_class_is_listed_under_each_contract_that_it_serves():
    public = [one for one in classes_of(keywise.adapters) if not one.__name__.startswith("_")]
    concrete = [kind for kind in public if not vars(kind).get("_is_protocol", False)]
    expected = {
        (kind.__name__, contract.__name__) for contract in listed() for kind in concrete if serves(kind, contract)
    }
    told = {(kind.__name__, contract.__name__) for contract, kinds in listed().items() for kind in kinds}
    assert told | set(SAME_NAMES) == expected


def test_the_methods_of_a_class_have_the_parameters_of_the_contract():
    """mypy does not compare the names of parameters that can be given by their place."""
    expect_none(
        f"{kind.__name__}.{name} has other parameters than {contract.__name__}.{name}"
        for contract, kinds in listed().items()
        for kind in kinds
        for name, member in members(contract).items()
        if inspect.isfunction(member) and not _takes(getattr(kind, name), member)
    )


def test_an_ability_can_be_asked_for_at_run_time():
    """Contracts that some adapters of a role serve and others do not."""
    for role in ("sources", "ledgers", "sinks"):
        kinds = [kind for contract, kinds in listed().items() if contract.__name__ in ROLES[role] for kind in kinds]
        for contract, served in listed().items():
            is_optional = any(kind in served for kind in kinds) and not all(kind in served for kind in kinds)
            if is_optional and contract.__name__ not in {*ROLES[role], "ControlStore", "PeriodicLock", "HistoryStore"}:
                assert getattr(contract, "_is_runtime_protocol", False), contract


def test_what_a_contract_only_reads_is_a_read_only_property():
    for protocol in protocols_of(keywise.core):
        if protocol.__name__ in WRITTEN_BY_STEPS:
            continue
        assert not inspect.get_annotations(protocol), f"{protocol.__name__} has attributes that are no properties"


def test_a_class_that_serves_a_contract_is_seen():
    contracts = {contract.__name__: contract for contract in listed()}
    assert serves(Ringing, contracts["LosesWrites"])
    assert serves(Ringing, contracts["OutboxSource"])
    assert not serves(Ringing, contracts["ReadableSink"])
    assert not serves(Ringing, contracts["AckTimeoutSource"])


class Ringing:
    """A sample with an attribute, a method, and a method whose parameter is another one."""

    def __init__(self) -> None:
        self.losses = 0

    async def send_within(self, connection: Any, bodies: Any, *, delay_s: float = 0.0) -> None: ...

    async def read(self, names: Any) -> None: ...
