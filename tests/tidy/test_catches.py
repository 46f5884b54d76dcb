"""What catches everything, and what is found by its name, each with its reason; anything else names what it expects."""

import ast
from collections.abc import Iterable, Iterator, Mapping

from tidy.tree import Module, expect_none, modules

REBUILT = ("serial/",)
"""Folders that another change rebuilds."""
REBUILT_BY_NAME = (*REBUILT, "testing/")

EVERYTHING = {"Exception", "BaseException"}
LOOKUPS = {"getattr", "hasattr"}

# Where an `except` catches everything: around user code, around observers, and in loops that must not end.
CATCHES = {
    ("adapters/function/sink.py", "FunctionSink.apply"): "runs a handler",
    ("cli/app_loader.py", "import_place"): "imports the module of a user",
    ("cli/commands/run.py", "_finish"): "the outermost call of a process: it reports and exits",
    ("cli/live/show.py", "_guarded"): "the view is an observer; the work goes on without it",
    ("config.py", "_imported"): "imports the module of a user",
    ("core/bodies.py", "model_decoder.decode"): "runs the validators of a user's model",
    ("core/events.py", "notify"): "calls observers",
    ("core/failures.py", "cause_of_error"): "formats an error of user code, whose text may raise as well",
    ("flow/degraded/worker.py", "DegradedWorker._applied"): "calls a sink, which runs a handler",
    ("flow/heartbeat.py", "HeartbeatThread._beat"): "a loop that must not end while claims are held",
    ("flow/intake.py", "FunctionRoute.__call__"): "runs the type and the function of a user on a body",
    ("flow/intake.py", "MessageReader.read"): "runs user code on a body that may be hostile",
    ("flow/leased/executors.py", "SinkExecutor.execute"): "calls a sink, which runs a handler",
    ("flow/refetch.py", "_ThreadedRefetch._run"): "runs the refetch function of a user",
    ("flow/repair.py", "Repairer._write_refetched"): "calls a sink, which runs a handler",
    ("flow/transactional.py", "_write_at_once"): "calls a sink, which runs a handler",
    ("flow/transactional.py", "write_all"): "calls a sink, which runs a handler",
    ("ingest/dialects/function.py", "function_dialect.dialect"): "runs the type and the function of a user on a body",
    ("ingest/executor.py", "ObjectExecutor._attempt"): "calls a sink, which runs a handler",
    ("ingest/executor.py", "ObjectExecutor._write"): "calls a sink, which runs a handler",
    ("operate/force.py", "ForceWriter._apply"): "calls a sink, which runs a handler",
    ("operate/force.py", "ForceWriter._read"): "runs the refetch function of a user",
    ("operate/force.py", "ForceWriter._transact"): "calls a sink, which runs a handler",
    ("operate/reconcile.py", "Reconciler._compare"): "runs the refetch and lookup functions of a user",
    ("reindex/catch_up_stage.py", "CatchUpStage.run"): "runs the origin of a user",
    ("reindex/sweep.py", "Sweep.run"): "runs the origin of a user",
    ("reindex/worker.py", "ReindexWorker._read_shard"): "runs the origin of a user",
    ("testing/conformance/report.py", "_checked"): "runs the adapter of a user",
    ("testing/conformance/sinks.py", "a_bad_change_raises_and_its_savepoint_takes_it_back"): "runs the sink of a user",
    ("testing/handlers/world.py", "HandlerLoop.run_in_executor"): "runs a handler",
    ("testing/lossy_link.py", "LossyLink._serve"): "passes the error of a server on to its client",
    ("testing/simulated_world.py", "ConsumerWorld._work"): "the outermost call of a simulated process",
    ("testing/simulator/seeds.py", "run_world"): "the outermost call of a simulated world",
}

# Where something is looked up by a name: in what is not ours, or in fields of our own values that are listed elsewhere.
LOOKED_UP = {
    ("adapters/dynamodb/table.py", "DynamoTable.ask"): "calls a method of the AWS client",
    ("adapters/function/sink.py", "_name"): "any callable may be a handler",
    ("adapters/rabbitmq/broker.py", "Channel.ask"): "calls a method of pika",
    ("adapters/rabbitmq/broker.py", "_root_cause"): "errors of pika",
    ("adapters/rabbitmq/broker.py", "refusal_code"): "errors of pika",
    ("adapters/rabbitmq/subscription.py", "Subscription.check"): "errors of pika",
    ("adapters/sqlite/database.py", "sqlite_errors"): "only some errors of sqlite3 have a code",
    ("cli/app_loader.py", "load"): "the module of a user",
    ("cli/live/show.py", "StreamRedirect.__getattr__"): "passes everything else on to a stream of Python",
    ("cli/live/show.py", "redirected_output"): "streams of sys",
    ("cli/simulate_handler.py", "_TrialLoader._forget"): "modules of a user",
    ("cli/simulate_handler.py", "_TrialLoader._found"): "the module of a user",
    ("config.py", "_found"): "the module of a user",
    ("core/bodies.py", "_dumped"): "models of pydantic, which may not be installed",
    ("core/bodies.py", "_fields"): "models of pydantic, which may not be installed",
    ("core/bodies.py", "_name"): "any type may be annotated",
    ("core/clock.py", ""): "not every platform has the clock",
    ("core/limits.py", "_normalise"): "a field of our own value",
    ("core/settings.py", "SerialSettings.__post_init__"): "every field of the settings",
    ("core/settings.py", "Settings.__post_init__"): "every field of the settings",
    ("flow/degraded/lazy_ledger.py", "_Part.__getattr__"): "passes every call on to the ledger once it is open",
    ("flow/intake.py", "FieldRoute.__call__"): "fields of a type that is made at run time",
    ("ingest/parts.py", "PartSettings.__post_init__"): "every field of the settings",
}


def catches(module: Module) -> list[tuple[str, str]]:
    """Every `except` that swallows everything, as its file and function; what ends with `raise` only cleans up."""
    return [
        (_place(module), scope)
        for node, scope in _scoped(module.tree, ())
        if isinstance(node, ast.ExceptHandler) and _names(node.type) & EVERYTHING and not _is_raised_again(node)
    ]


def lookups(module: Module) -> list[tuple[str, str]]:
    """Every `getattr` and `hasattr`, as its file and function."""
    return [
        (_place(module), scope)
        for node, scope in _scoped(module.tree, ())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKUPS
    ]


def _place(module: Module) -> str:
    return module.path.removeprefix("src/keywise/")


def _scoped(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[ast.AST, str]]:
    """Every node with the name of the function or class that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield child, ".".join(scope)
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _scoped(child, (*scope, child.name) if is_scope else scope)


def _names(caught: ast.expr | None) -> set[str]:
    if caught is None:
        return {"BaseException"}
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _is_raised_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _faults(found: Iterable[tuple[str, str]], table: Mapping[tuple[str, str], str], what: str) -> list[str]:
    places = set(found)
    unknown = [f"{path}: {scope or 'the module'} {what}" for path, scope in sorted(places - table.keys())]
    return unknown + [f"{path}: {scope} is in the table, and does it no more" for path, scope in table.keys() - places]


def test_only_what_meets_user_code_catches_everything():
    ours = [module for module in modules("src") if not any(part in module.path for part in REBUILT)]
    found = [place for module in ours for place in catches(module)]
    expect_none(_faults(found, CATCHES, "catches everything; name the errors that it expects"))


def test_nothing_of_ours_is_asked_for_an_ability_by_its_name():
    ours = [module for module in modules("src") if not any(part in module.path for part in REBUILT_BY_NAME)]
    found = [place for module in ours for place in lookups(module)]
    expect_none(_faults(found, LOOKED_UP, "looks something up by its name; ask for a protocol of core"))


def test_every_kind_of_catch_is_seen():
    for caught in ("", " Exception", " BaseException as error", " (OSError, Exception)"):
        text = f"class A:\n    def f(self):\n        try: g()\n        except{caught}:\n            h()"
        assert catches(Module.of("src/keywise/flow/a.py", text)) == [("flow/a.py", "A.f")], caught


def test_what_is_raised_again_or_named_is_no_catch():
    for handler in ("except Exception:\n    g()\n    raise", "except OSError: ...", "except* ValueError: ..."):
        assert catches(Module.of("src/keywise/flow/a.py", f"try: f()\n{handler}")) == [], handler
    again = "try: f()\nexcept Exception as error:\n    raise ValueError from error"
    assert catches(Module.of("src/keywise/flow/a.py", again)) == [("flow/a.py", "")]


def test_every_lookup_is_seen():
    for text in ("getattr(a, 'b')", "getattr(a, name, None)", "x = [y for y in z if hasattr(y, 'b')]"):
        assert lookups(Module.of("src/keywise/flow/a.py", text)) == [("flow/a.py", "")], text
    assert lookups(Module.of("src/keywise/flow/a.py", "isinstance(a, B)")) == []


def test_a_place_that_is_in_no_table_and_an_entry_without_a_place_are_reported():
    table = {("a.py", "f"): "runs a handler"}
    assert _faults([("a.py", "f")], table, "catches") == []
    assert _faults([], table, "catches") == ["a.py: f is in the table, and does it no more"]
    assert _faults([("a.py", "f"), ("b.py", "")], table, "catches") == ["b.py: the module catches"]
