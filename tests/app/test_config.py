"""An app from a TOML file is the app that Python makes of the same words."""

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from app.toml_folder import Folder, folder_in
from keywise import App, Debounce, Rate, Retry
from keywise.app import PipelineDefinition
from keywise.core.errors import AddressError
from keywise.ingest.definition import ObjectsDefinition


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return folder_in(tmp_path, monkeypatch)


def told(definition: PipelineDefinition) -> dict[str, Any]:
    """Everything that a definition consists of; two with the same parts work alike."""
    parts = dict(vars(definition))
    app, route, decode = parts.pop("_app"), parts.pop("_route"), parts.pop("_decode")
    assert app.pipelines[definition.name] is definition
    where = route and (getattr(route, "fields", None) or route.read)
    parts |= {"route": (type(route), where), "decoded": decode is not None}
    parts |= {"records": definition.records and definition.records.name}
    parts |= {"_dialects": {url: same_code(dialect) for url, dialect in definition._dialects.items()}}
    return parts | {"objects": definition.objects and objects_told(definition.objects)}


def objects_told(definition: ObjectsDefinition) -> dict[str, Any]:
    plan = definition.plan
    made = (type(plan.format), vars(plan.format) if hasattr(plan.format, "__dict__") else None)
    cut = (plan.settings, plan.compression)
    return {"store": definition.store_url, "selection": definition.selection, "format": made, "cut": cut}


def same_code(dialect: Callable[..., Any]) -> Any:
    """Two dialects of one function are closures with the same code over the same function."""
    contents = [cell.cell_contents for cell in dialect.__closure__ or ()]
    return dialect.__code__, [one for one in contents if getattr(one, "__module__", "") == "toml_shop"]


def all_told(app: App) -> dict[str, Any]:
    return {"ledger": app.ledger_url, "pipelines": {name: told(one) for name, one in app.pipelines.items()}}


def fields_and_sink(app: App, shop: ModuleType) -> None:
    pipeline = app.pipeline("search", key="id", version="v", deleted={"type": ["gone", "moved"], "off": [True]})
    pipeline.source("sqlite:///shop.db?queue=live").source("sqlite:///shop.db?queue=bulk")
    pipeline.sink("sqlite:///shop.db?table=documents")


def settings(app: App, shop: ModuleType) -> None:
    app.pipeline("search", key="id", lease="45s", margin=1.5, batch_max=10, retention="30d", drain=3)


def retries(app: App, shop: ModuleType) -> None:
    app.pipeline("search", key="id", retry=Retry(attempts=3, backoff="1s", max=30))
    app.pipeline("other", key="id", attempts_max=2, backoff=2.0)
    app.pipeline("third", key="id", attempts_max=2, backoff=2.0)


def limits(app: App, shop: ModuleType) -> None:
    pipeline = app.pipeline("search", key="id", rate=Rate(3, per="10s"), debounce=Debounce("500ms", max_wait=5))
    pipeline.source("memory://?queue=a").source("memory://?queue=b", lane="bulk").source("memory://", lane="live")
    app.pipeline("other", key="id", rate=Rate(2))


def functions(app: App, shop: ModuleType) -> None:
    pipeline = app.pipeline("search", read=shop.read)
    pipeline.apply(shop.index)
    pipeline.refetch(shop.refetch)
    pipeline.lookup(shop.lookup)


def origins(app: App, shop: ModuleType) -> None:
    app.pipeline("search", key="id").origin("sqlite:////data/shop.db?table=pages&key=id")
    app.pipeline("other", key="id").origin(shop.TRUTH)


def several(app: App, shop: ModuleType) -> None:
    app.pipeline("b", key="id").source("memory://")
    app.pipeline("a", key="id").sink("memory://?grade=plain")
    app.pipeline("with a space.", key="id")


def from_environment(app: App, shop: ModuleType) -> None:
    app.pipeline("search", key="${SHOP_DB}", deleted={"type": ["${SHOP_DB}"]}).source(
        "amqp://user:s3cret%2Fp%40ss@host/${SHOP_DB}?a=$b$"
    ).sink("sqlite:////data/shop.db?table=a")


def objects(app: App, shop: ModuleType) -> None:
    logs = app.objects(
        "logs", store="s3://uploads", format="ndjson", prefix="2026/", part_records=500, lease=45, retry=Retry(3)
    )
    logs.source("sqlite:///shop.db", dialect="s3")
    logs.source("sqlite:///shop.db?queue=bulk", dialect="uri", lane="bulk").sink("sqlite:///shop.db?table=logs")


def objects_with_functions(app: App, shop: ModuleType) -> None:
    logs = app.objects("logs", store="file:///var/uploads", format=shop.split)
    logs.source("sqlite:///shop.db", dialect=shop.announced).apply(shop.write)


def enveloped(app: App, shop: ModuleType) -> None:
    logs = app.objects(
        "logs", store="file:///var/uploads", format="csv", kind="envelope", key="id", version="v", rate=Rate(2)
    )
    logs.source("sqlite:///shop.db", dialect="uri").apply(shop.index)
    logs.refetch(shop.refetch)


DEFINITIONS: dict[str, tuple[Callable[[App, ModuleType], None], str]] = {
    "fields and a sink": (
        fields_and_sink,
        """
        [pipeline.search]
        sources = ["sqlite:///shop.db?queue=live", { url = "sqlite:///shop.db?queue=bulk" }]
        sink = "sqlite:///shop.db?table=documents"
        key = "id"
        version = "v"
        deleted = { type = ["gone", "moved"], off = [true] }
        """,
    ),
    "settings": (
        settings,
        """
        [pipeline.search]
        key = "id"
        lease = "45s"
        margin = 1.5
        batch_max = 10
        retention = "30d"
        drain = 3
        """,
    ),
    "retries": (
        retries,
        """
        [pipeline.search]
        key = "id"
        retry = { attempts = 3, backoff = "1s", max = 30 }

        [pipeline.other]
        key = "id"
        backoff = "2s"
        retry.attempts = 2

        [pipeline.third]
        key = "id"
        backoff = 2
        retry = { attempts = 2 }
        """,
    ),
    "limits and lanes": (
        limits,
        """
        [pipeline.search]
        key = "id"
        sources = [
            "memory://?queue=a",
            { url = "memory://?queue=b", lane = "bulk" },
            { url = "memory://", lane = "live" },
        ]
        rate = { n = 3, per = "10s" }
        debounce = { quiet = "500ms", max_wait = 5 }

        [pipeline.other]
        key = "id"
        rate.n = 2
        """,
    ),
    "functions": (
        functions,
        """
        [pipeline.search]
        read = "toml_shop:read"
        apply = "toml_shop:index"
        refetch = "toml_shop:refetch"
        lookup = "toml_shop:lookup"
        """,
    ),
    "origins": (
        origins,
        """
        [pipeline.search]
        key = "id"
        origin = "sqlite:///${SHOP_DB}?table=pages&key=id"

        [pipeline.other]
        key = "id"
        origin = "toml_shop:TRUTH"
        """,
    ),
    "several pipelines": (
        several,
        """
        [pipeline.b]
        key = "id"
        sources = ["memory://"]

        [pipeline.a]
        key = "id"
        sink = "memory://?grade=plain"

        [pipeline."with a space."]
        key = "id"
        """,
    ),
    "values from the environment, in URLs only": (
        from_environment,
        """
        [pipeline.search]
        key = "${SHOP_DB}"
        deleted = { type = ["${SHOP_DB}"] }
        sources = ["amqp://user:${SHOP_PASSWORD}@host/$${SHOP_DB}?a=$b$"]
        sink = "sqlite:///${SHOP_DB}?table=a"
        """,
    ),
    "objects": (
        objects,
        """
        [objects.logs]
        store = "s3://${SHOP_BUCKET}"
        format = "ndjson"
        prefix = "2026/"
        part_records = 500
        lease = "45s"
        retry = { attempts = 3 }
        sources = [
            { url = "sqlite:///shop.db", dialect = "s3" },
            { url = "sqlite:///shop.db?queue=bulk", dialect = "uri", lane = "bulk" },
        ]
        sink = "sqlite:///shop.db?table=logs"
        """,
    ),
    "objects with functions": (
        objects_with_functions,
        """
        [objects.logs]
        store = "file:///var/uploads"
        format = "toml_shop:split"
        sources = [{ url = "sqlite:///shop.db", dialect = "toml_shop:announced" }]
        apply = "toml_shop:write"
        """,
    ),
    "objects of changes": (
        enveloped,
        """
        [objects.logs]
        store = "file:///var/uploads"
        format = "csv"
        kind = "envelope"
        key = "id"
        version = "v"
        rate = { n = 2 }
        sources = [{ url = "sqlite:///shop.db", dialect = "uri" }]
        apply = "toml_shop:index"
        refetch = "toml_shop:refetch"
        """,
    ),
    "no pipeline": (lambda app, shop: None, ""),
}


@pytest.mark.parametrize(("define", "text"), DEFINITIONS.values(), ids=DEFINITIONS.keys())
def test_a_file_makes_the_app_that_python_makes(folder: Folder, define: Callable[[App, ModuleType], None], text: str):
    loaded = folder.load('ledger = "sqlite:///shop.db"\n' + dedent(text))
    written = App("sqlite:///shop.db")
    define(written, folder.shop if "toml_shop" in text else sys)
    assert all_told(loaded) == all_told(written)
    assert [type(one) for one in loaded.observers] == [type(one) for one in written.observers]


OTHERS = (
    *("lease = '44s'", "key = 'other'", "sink = 'memory://'", "sources = ['memory://']", "rate = { n = 1 }"),
    *("debounce = { quiet = 1, max_wait = 2 }", "sources = [{ url = 'memory://', lane = 'bulk' }]"),
)
OTHER_OBJECTS = (
    *("format = 'csv'", "store = 's3://other'", "part_records = 3", "prefix = 'a'", "compression = 'gzip'"),
    *("sources = [{ url = 'memory://', dialect = 's3' }]", "sources = [{ url = 'memory://', dialect = 'uri' }]"),
    "sources = [{ url = 'memory://', dialect = 'toml_shop:announced' }]",
)


@pytest.mark.parametrize("text", OTHERS)
def test_apps_that_differ_are_told_apart(folder: Folder, text: str):
    """Or the test above would prove nothing."""
    base = 'ledger = "memory://"\n[pipeline.search]\nkey = "id"\n'
    changed = base.replace('key = "id"\n', "") if text.startswith("key") else base
    assert all_told(folder.load(base)) != all_told(folder.load(changed + text))


@pytest.mark.parametrize("text", OTHER_OBJECTS)
def test_objects_that_differ_are_told_apart(folder: Folder, text: str):
    base = {"format": "format = 'ndjson'", "store": "store = 's3://logs'", "sources": "sources = []"}
    changed = base | {text.partition(" ")[0]: text}
    before, after = ("\n".join(("ledger = 'memory://'", "[objects.logs]", *one.values())) for one in (base, changed))
    assert all_told(folder.load(before)) != all_told(folder.load(after))


def test_a_variable_is_filled_in_once(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """What comes from the environment is no template."""
    monkeypatch.setenv("SHOP_DB", "${SHOP_PASSWORD}$${x}")
    assert folder.load("ledger = 'sqlite:///$$${SHOP_DB}/${SHOP_DB}'").ledger_url == (
        "sqlite:///$${SHOP_DB}/${SHOP_PASSWORD}$${x}"
    )


def test_an_empty_variable_is_set(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOP_DB", "")
    assert folder.load("ledger = 'memory://${SHOP_DB}'").ledger_url == "memory://"


def test_a_pipeline_from_a_file_can_be_completed_in_python(folder: Folder):
    app = folder.load("ledger = 'memory://'\n[pipeline.search]\nkey = 'id'")
    app.pipelines["search"].source("memory://").sink("memory://")
    with pytest.raises(AddressError):
        app.pipelines["search"].source("nothing")
