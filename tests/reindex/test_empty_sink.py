"""A worker warns at its start if its sink is empty while the ledger has keys in it, and names the command to run."""

import asyncio
import itertools
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import pytest

from adapters.aws_credentials import CREDENTIALS
from cli.command import Folder
from keywise.core import events
from reindex.reindex_rig import Catalogue, Works, row
from running import run
from servers import shared

KEYS = [f"k{number}" for number in range(5)]
ADVICE = "to write every row of the origin again, run keywise reindex start shop"
_numbers = itertools.count(1)


class Store(Protocol):
    """A store of a test's own."""

    sink: str
    ledger: str
    """Empty: a file."""

    def renew(self) -> None:
        """Put a new one in its place."""

    def keys(self) -> set[str]:
        """The keys that it holds."""


class Table:
    """A table in the file of the ledger."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "shop.db"
        self.ledger, self.sink = "", f"sqlite:///{self._file}?table=stock"

    def renew(self) -> None:
        self._execute("drop table stock")

    def keys(self) -> set[str]:
        return {key for (key,) in self._execute("select key from stock")}

    def _execute(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self._file)) as connection, connection:
            return connection.execute(statement).fetchall()


class PostgresTable:
    def __init__(self) -> None:
        self.ledger = shared.postgres().create_database(f"empty_{os.getpid()}_{next(_numbers)}")
        self.sink = f"{self.ledger}?table=stock"

    def renew(self) -> None:
        self._read("drop table stock")

    def keys(self) -> set[str]:
        return {found["key"] for found in self._read("select key from stock")}

    def _read(self, statement: str) -> list[Any]:
        async def read() -> list[Any]:
            connection = await asyncpg.connect(self.ledger)
            try:
                return await connection.fetch(statement)
            finally:
                await connection.close()

        return run(read())


class Index:
    def __init__(self) -> None:
        self.name, self.ledger = f"empty_{next(_numbers)}", ""
        self.sink = shared.opensearch().index(self.name)

    def renew(self) -> None:
        shared.opensearch().ask("DELETE", f"/{self.name}")
        shared.opensearch().index(self.name)

    def keys(self) -> set[str]:
        return set(shared.opensearch().documents(self.name))


class Items:
    def __init__(self) -> None:
        self.name, self.ledger = f"empty_{os.getpid()}_{next(_numbers)}", ""
        self._server = shared.dynamodb()
        self._server.create_table(self.name)
        self.sink = f"dynamodb://{self.name}?region=us-east-1&endpoint={self._server.url}"

    def renew(self) -> None:
        self._server.ask("DeleteTable", TableName=self.name)
        self._server.create_table(self.name)

    def keys(self) -> set[str]:
        return {item["id"]["S"] for item in self._server.items(self.name)}


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.server("postgres")),
        pytest.param("opensearch", marks=pytest.mark.server("opensearch")),
        pytest.param("dynamodb", marks=pytest.mark.server("dynamodb")),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    made: dict[str, Any] = {"postgres": PostgresTable, "opensearch": Index, "dynamodb": Items}
    return made[request.param]() if request.param in made else Table(tmp_path)


def test_a_new_store_behind_an_old_ledger_is_reported_and_the_command_fills_it(tmp_path: Path, store: Store):
    def process() -> Works:
        """A worker that has just been started."""
        return Works(tmp_path, Catalogue(*(row(key, 1) for key in KEYS)), ledger=store.ledger, sink=store.sink)

    async def handles(*bodies: dict[str, Any]) -> list[events.Event]:
        """Let a new worker handle messages; return its warnings."""
        works = process()
        await works.handles(*bodies)
        await works.app.close()
        return works.emitted(events.SinkEmpty)

    async def keys() -> set[str]:
        return await asyncio.to_thread(store.keys)

    async def story() -> None:
        assert await handles(*(row(key, 1) for key in KEYS), row("gone", 1, gone=True)) == [], "all is new"
        assert await keys() >= set(KEYS)
        assert await handles(row("k0", 1)) == []

        await asyncio.to_thread(store.renew)
        [warning] = await handles(*(row(key, 1) for key in KEYS))
        assert isinstance(warning, events.SinkEmpty)
        assert (warning.keys, warning.advice) == (5, ADVICE)
        assert await keys() == set(), "all that is sent again is a duplicate, which is what the warning is for"

        works = process()
        report = await works.runs()
        await works.app.close()
        assert report.counts["applied"] == 5
        assert await keys() >= set(KEYS)
        assert await handles(row("k0", 1)) == [], "it is over"

    run(story(), limit_s=60)


SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
shop = app.pipeline("shop", key="key", version="version")
shop.source("sqlite:///shop.db").sink("sqlite:///shop.db?table=stock"){origin}
"""


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ('.origin("sqlite:///truth.db?table=items")', ADVICE),
        ("", "messages at the same versions are refused as duplicates; either name an origin and run keywise reindex "),
    ],
    ids=["with an origin", "without an origin"],
)
def test_status_shows_it_and_names_what_to_run(tmp_path: Path, origin: str, advice: str):
    folder, store = Folder(tmp_path, SHOP.format(origin=origin)), Table(tmp_path)
    with closing(sqlite3.connect(tmp_path / "truth.db")) as truth, truth:
        truth.execute("create table items (key text primary key, version integer)")
    assert folder.keywise("send", "shop", '{"key": "a", "version": 1}').status == 0
    folder.work()
    assert "ALARM" not in folder.keywise("status").out
    store.renew()
    answer = folder.keywise("status")
    assert "ALARM: the sink is empty, and the ledger has 1 key in it; " + advice in " ".join(answer.out.split())
    assert folder.keywise("status", "--json").json["pipelines"][0]["keys_missing"] == 1
    ran = folder.keywise("run", "--until-empty")
    assert "the sink is empty, and the ledger has 1 key in it" in ran.err
