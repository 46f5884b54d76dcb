"""Shards of three megabytes are read to their end while rows are deleted behind the cursor, at it and before it."""

import asyncio
import itertools
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import msgspec
import pytest

from adapters.aws_credentials import CREDENTIALS
from keywise import adapters
from keywise.core.controls import RunState
from keywise.core.origin import Origin, Page, Shard
from keywise.core.url import Address
from reindex.reindex_rig import Works
from running import run
from servers import shared

ROWS, PAGE_ROWS = 48, 10
TEXT = "x" * 64 * 1024
KEYS = [f"k{number:02d}" for number in range(ROWS)]
_numbers = itertools.count(1)


class Truth(Protocol):
    """A table of the user's, with its rows."""

    url: str

    async def fill(self) -> None:
        """Write all rows."""

    async def delete(self, key: str) -> None:
        """Delete one, as its owner does."""


class SqliteTruth:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "truth.db"
        self.url = f"sqlite:///{self._file}?table=items"

    async def fill(self) -> None:
        with closing(sqlite3.connect(self._file)) as truth, truth:
            truth.execute("create table items (key text primary key, version integer, text text)")
            truth.executemany("insert into items values (?, 1, ?)", [(key, TEXT) for key in KEYS])

    async def delete(self, key: str) -> None:
        with closing(sqlite3.connect(self._file)) as truth, truth:
            truth.execute("delete from items where key = ?", (key,))


class PostgresTruth:
    def __init__(self, folder: Path) -> None:
        self._database = shared.postgres().create_database(f"deleted_{os.getpid()}_{next(_numbers)}")
        self.url = f"{self._database}?table=items"

    async def fill(self) -> None:
        connection = await asyncpg.connect(self._database)
        await connection.execute("create table items (key text primary key, version bigint, text text)")
        await connection.executemany("insert into items values ($1, 1, $2)", [(key, TEXT) for key in KEYS])
        await connection.close()

    async def delete(self, key: str) -> None:
        connection = await asyncpg.connect(self._database)
        await connection.execute("delete from items where key = $1", key)
        await connection.close()


class DynamoTruth:
    def __init__(self, folder: Path) -> None:
        self._server = shared.dynamodb()
        self._table = self._server.create_table(f"deleted_{os.getpid()}_{next(_numbers)}", "key")
        self.url = f"dynamodb://{self._table}?segments=1&region=us-east-1&endpoint={self._server.url}"

    async def fill(self) -> None:
        for key in KEYS:
            item = {"key": {"S": key}, "version": {"N": "1"}, "text": {"S": TEXT}}
            await asyncio.to_thread(self._server.ask, "PutItem", TableName=self._table, Item=item)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._server.ask, "DeleteItem", TableName=self._table, Key={"key": {"S": key}})


class Watched:
    """An origin whose pages are small, and behind each of which something happens."""

    is_consistent = True

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.pages: list[list[str]] = []
        self.behind_page: Any = None

    async def shards(self, size: int) -> Sequence[Shard]:
        return await self._origin.shards(size)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        page = await self._origin.scan(shard, after, min(limit, PAGE_ROWS))
        if self.behind_page is not None:
            self.pages.append([msgspec.json.decode(row)["key"] for row in page.rows])
            await self.behind_page(self.pages[-1])
        return page

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        return await self._origin.fetch(keys)


@pytest.mark.parametrize(
    "truth_of",
    [
        SqliteTruth,
        pytest.param(PostgresTruth, marks=pytest.mark.server("postgres")),
        pytest.param(DynamoTruth, marks=pytest.mark.server("dynamodb")),
    ],
)
def test_the_sink_ends_as_the_table_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth_of: Any):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    truth: Truth = truth_of(tmp_path)
    left, seen = set(KEYS), set[str]()

    async def story() -> None:
        await truth.fill()
        async with adapters.connect_origin(Address(truth.url, "shop", {})) as origin:
            watched = Watched(origin)
            works = Works(tmp_path, watched)
            await works.runs()
            await works.start(delete_max=ROWS)

            async def delete(keys: list[str]) -> None:
                """Delete the row at the cursor and one behind it, and announce that; and one that is not read yet, of
                which the message is lost: the run finds that out."""
                seen.update(keys)
                told = {*keys[-1:], *keys[:1]}
                for key in (*told, *sorted(left - seen)[:1]):
                    left.discard(key)
                    await truth.delete(key)
                await works.app.send("shop", *({"key": key, "version": 2, "gone": True} for key in told))

            watched.behind_page = delete
            report = await works.work_until_ended(limit_s=60)
            assert report.run.state is RunState.COMPLETE
            assert len(watched.pages) >= 4, "the shard has several pages"
            assert len(left) <= ROWS - 9
            read = [key for page in watched.pages for key in page]
            assert len(set(read)) == len(read) == report.counts["read"], "no row is read twice"
            assert left <= set(read), "no row that stayed is left out"
            assert set(works.content()) == left
            assert report.swept["gone"] >= 3

    run(story(), limit_s=100)
