"""A pipeline with an origin: how it is named, what it repairs with, and that live changes flow without it."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import keywise
from adapters.function.handler_shop import handle_all, handle_until, shop_with
from app.shop import Shop
from keywise.core.change import ChangeHeader
from keywise.core.entry import LeaseTerms
from keywise.core.errors import AddressError, DatabaseError, SettingsError, UnavailableError
from keywise.core.events import Repaired
from keywise.core.origin import Page, Shard
from keywise.flow.refetch import refetched
from keywise.operate.reconcile import Reconciler
from running import run
from servers import machine

SOON = {"horizon": "400ms", "repair": "100ms", "attempts_max": 1}


class Truth:
    """Rows of the test's own."""

    def __init__(self, **rows: Any) -> None:
        self.rows = rows
        self.asked: list[Sequence[str]] = []

    def shards(self, size: int) -> list[Shard]:
        return [Shard("all")]

    def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return Page(list(self.rows.values()), "end", is_last=True)

    async def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        self.asked.append(keys)
        return {key: self.rows[key] for key in keys if key in self.rows}


def table_in(folder: Path) -> str:
    """A table with the newest state of one key, and its URL."""
    with closing(sqlite3.connect(folder / "truth.db")) as connection, connection:
        connection.execute("create table pages (key text primary key, version integer)")
        connection.execute("insert into pages values ('a', 5)")
    return f"sqlite:///{folder / 'truth.db'}?table=pages"


class Store:
    """Where a handler writes; the first write raises after it has landed, so that its key is suspect."""

    def __init__(self) -> None:
        self.content: dict[str, int | None] = {}

    async def handle(self, change: keywise.Change) -> None:
        is_first = not self.content
        self.content[change.key] = None if change.deleted else change.version
        if is_first:
            raise ValueError("was it written?")


def repaired_by(folder: Path, origin: Any, refetch: Any = None) -> dict[str, int | None]:
    """Have the write of version 1 repaired; what the store holds then."""
    store = Store()
    shop = shop_with(store.handle, folder, refetch=refetch, **SOON)
    shop.app.pipelines["shop"].origin(origin)

    async def is_repaired() -> bool:
        return bool(shop.emitted(Repaired))

    run(handle_until(shop, is_repaired, {"key": "a", "version": 1}))
    return store.content


def test_a_suspect_key_is_repaired_from_a_table(tmp_path):
    assert repaired_by(tmp_path, table_in(tmp_path)) == {"a": 5}


def test_a_suspect_key_is_repaired_from_an_object(tmp_path):
    truth = Truth(a={"key": "a", "version": 7})
    assert repaired_by(tmp_path, truth) == {"a": 7}
    assert truth.asked == [["a"]]


def test_a_decorated_function_is_preferred_to_the_origin(tmp_path):
    truth = Truth(a={"key": "a", "version": 7})
    assert repaired_by(tmp_path, truth, refetch=lambda key: {"key": key, "version": 9}) == {"a": 9}
    assert truth.asked == []


def shop_of(folder: Path, origin: Any, **options: Any) -> Shop:
    shop = Shop(folder)
    shop.pipeline("leased", **options).origin(origin)
    return shop


def test_what_reads_the_truth_reads_the_origin(tmp_path):
    """Force, reconcile and repair all do it by `refetched`."""
    shop = shop_of(tmp_path, table_in(tmp_path))

    async def main() -> None:
        async with shop.opened() as pipeline:
            found = await refetched(pipeline, "a")
            assert found is not None and found.version == 5
            assert await refetched(pipeline, "b") is None

    run(main())


def test_a_sink_is_compared_with_the_origin(tmp_path):
    shop = Shop(tmp_path)
    shop.pipeline("queue_transaction").origin(table_in(tmp_path))

    async def main() -> None:
        await shop.app.send("shop", {"key": "a", "version": 4}, {"key": "b", "version": 1})
        await shop.work_until_empty()
        async with shop.opened() as pipeline:
            found = [difference async for difference in Reconciler(pipeline).differences()]
            assert {one.key: one.kind.value for one in found} == {"a": "older", "b": "should be gone"}
        await shop.app.close()

    run(main())


def test_an_open_pipeline_has_its_origin(tmp_path):
    shop = shop_of(tmp_path, table_in(tmp_path))

    async def main() -> None:
        async with shop.app.open("shop") as pipeline:
            assert pipeline.origin is not None and pipeline.origin.is_consistent
            [shard] = await pipeline.origin.shards(10)
            [row] = (await pipeline.origin.scan(shard, "", 10)).rows
            assert msgspec.json.decode(row) == {"key": "a", "version": 5}
            assert pipeline.reader.read_one(row).order == (0, 5, 0)

    run(main())


def test_a_pipeline_without_an_origin_has_none(tmp_path):
    shop = Shop(tmp_path)
    shop.pipeline("leased")

    async def main() -> None:
        async with shop.opened() as pipeline:
            assert (pipeline.origin, pipeline.refetch) == (None, None)
            with pytest.raises(SettingsError, match=r"name its table with \.origin\(URL\), or write a function"):
                await refetched(pipeline, "a")

    run(main())


def away() -> str:
    return f"postgresql://nobody@127.0.0.1:{machine.free_port()}/nowhere?table=pages"


def test_live_changes_flow_while_the_origin_is_away(tmp_path):
    shop = shop_of(tmp_path, away())

    async def main() -> None:
        assert await handle_all(shop, {"key": "a", "version": 1}) == []
        assert shop.content() == {"a": 1}
        async with shop.app.open("shop") as pipeline:
            with pytest.raises(UnavailableError):
                await refetched(pipeline, "a")

    run(main())


def test_an_origin_that_cannot_be_used_is_refused_at_the_start_and_hides_nothing_from_an_operator(tmp_path):
    shop = shop_of(tmp_path, f"sqlite:///{tmp_path / 'missing.db'}?table=pages")

    async def main() -> None:
        with pytest.raises(DatabaseError, match="there is no file"):
            await shop.app.run(handle_signals=False)
        async with shop.opened() as pipeline:
            assert await pipeline.admin.inspect("a") is None

    run(main())


@pytest.mark.parametrize(("grade", "has_origin"), [("conditional", True), ("conditional", False), ("plain", False)])
def test_with_an_origin_claims_of_a_conditional_sink_have_intents(grade, has_origin):
    """A worker of an earlier reindex that wakes up could overwrite the write of a later one, at the same version."""
    app = keywise.App("memory://")
    pipeline = app.pipeline("pages", key="key", version="version").source("memory://").sink(f"memory://?grade={grade}")
    if has_origin:
        pipeline.origin(Truth())

    async def main() -> None:
        async with app.open("pages") as opened:
            await opened.ledger.claim([ChangeHeader("a", (0, 1, 0))], LeaseTerms("w1", 10.0))
            entry = await opened.admin.inspect("a")
            has_intents = grade == "plain" or has_origin
            assert entry is not None and entry.intent == ((0, 1, 0) if has_intents else None)
            assert opened.has_suspects is has_intents

    run(main())


def test_an_atomic_sink_needs_no_intents(tmp_path):
    shop = Shop(tmp_path)
    shop.pipeline("queue_transaction").origin(Truth())

    async def main() -> None:
        async with shop.opened() as pipeline:
            assert not pipeline.has_suspects

    run(main())


@pytest.mark.parametrize("kind", [{}, {"kind": "envelope", "key": "id"}])
def test_objects_have_no_origin_but_their_store(kind):
    logs = keywise.App("memory://").objects("logs", store="s3://logs", format="ndjson", **kind)
    with pytest.raises(
        SettingsError, match=r"pipeline 'logs' reads objects.*; leave \.origin out, and .* backfill logs"
    ):
        logs.origin("sqlite:///truth.db")


def test_a_second_origin_is_refused():
    pages = keywise.App("memory://").pipeline("pages", key="id").origin(Truth())
    with pytest.raises(SettingsError, match="pipeline 'pages' has an origin already"):
        pages.origin("sqlite:///truth.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://host", "no origin understands redis://.*known are: dynamodb, memory, postgres, postgresql, sqlite"),
        ("sqlite:///truth.db?tabel=pages", "unknown option 'tabel'; did you mean table?"),
        ("sqlite:///truth.db?version=v", "unknown option 'version'"),
    ],
)
def test_a_url_that_cannot_be_an_origin_is_refused_before_anything_starts(tmp_path, url, message):
    shop = shop_of(tmp_path, url)
    with pytest.raises(AddressError, match=message):
        run(shop.app.run(handle_signals=False))
