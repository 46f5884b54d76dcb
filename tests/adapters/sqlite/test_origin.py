"""A table in a SQLite file as an origin: which tables it may be, what a row looks like, and that it only reads."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from keywise import adapters
from keywise.adapters.sqlite import origin as origins
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.origin import CURSOR_MAX_BYTES, Origin, Page, Shard
from keywise.core.url import Address
from running import run


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def origin_of(path: Path, options: str = "table=pages") -> Origin:
    return adapters.connect_origin(Address(f"sqlite:///{path}?{options}", "pages", {}))


async def all_pages(origin: Origin, shard: Shard, limit: int) -> AsyncIterator[Page]:
    after, is_last = "", False
    while not is_last:
        page = await origin.scan(shard, after, limit)
        after, is_last = page.after, page.is_last
        assert 0 < len(after.encode()) <= CURSOR_MAX_BYTES
        yield page


async def bodies(origin: Origin, size: int = 1000, limit: int = 1000) -> list[bytes]:
    pages = [page for shard in await origin.shards(size) async for page in all_pages(origin, shard, limit)]
    return [row for page in pages for row in page.rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "truth.db"


def test_a_row_is_an_object_with_all_columns_and_its_key_as_text(path):
    execute(
        path,
        "create table pages (Id integer primary key, version integer, price real, title text, picture blob)",
        "insert into pages values (7, 9007199254740993, 1.5, null, x'00ff')",
    )

    async def main() -> None:
        body = {"Id": "7", "version": 9007199254740993, "price": 1.5, "title": None, "picture": "AP8="}
        async with origin_of(path, "table=pages&key=id") as origin:
            assert [msgspec.json.decode(row) for row in await bodies(origin)] == [body]
            assert msgspec.json.decode((await origin.fetch(["7"]))["7"]) == body

    run(main())


def test_a_body_column_is_the_body_and_a_null_is_an_empty_one(path):
    execute(
        path,
        "create table pages (id text primary key, message)",
        "insert into pages values ('a', ' {}'), ('b', null), ('c', x'7b7d')",
    )

    async def main() -> None:
        async with origin_of(path, "table=pages&key=id&body=message") as origin:
            assert await origin.fetch(["a", "b", "c", "d"]) == {"a": b" {}", "b": b"", "c": b"{}"}

    run(main())


def test_rows_without_a_key_are_not_read(path):
    execute(
        path,
        "create table pages (key text primary key)",
        "insert into pages values (null), (''), ('a'), (x'ff')",
    )

    async def main() -> None:
        async with origin_of(path) as origin:
            for size, limit in ((1, 1), (10, 10)):
                assert await bodies(origin, size, limit) == [b'{"key":""}', b'{"key":"a"}']

    run(main())


def test_keys_that_are_too_long_for_a_cursor_are_read_with_the_page_before_them(path):
    keys = ["a", *(letter * 2 * CURSOR_MAX_BYTES for letter in "bcd"), "e", "z" * 2 * CURSOR_MAX_BYTES]
    execute(path, "create table pages (key text primary key)")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("insert into pages values (?)", [(key,) for key in keys])

    async def main() -> None:
        async with origin_of(path) as origin:
            [shard] = await origin.shards(1000)
            sizes = [len(page.rows) async for page in all_pages(origin, shard, 1)]
            assert (sizes[:2], sum(sizes)) == ([1, 4], len(keys))
            assert [msgspec.json.decode(row)["key"] for row in await bodies(origin, 1, 1)] == keys

    run(main())


MISFITS = {
    "no table": ("create table others (key text)", "no such table: pages"),
    "no column": ("create table pages (id text primary key)", "no such column: origin.key"),
    "no index": ("create table pages (key text)", "no unique index has the column key"),
    "a composite key": ("create table pages (key text, b text, primary key (key, b))", "no unique index"),
    "a composite key of numbers": ("create table pages (key integer, b text, primary key (key, b))", "no unique index"),
    "a partial index": (
        "create table pages (key text); create unique index i on pages (key) where key > 'a'",
        "no unique index",
    ),
    "an index in another order": (
        "create table pages (key text); create unique index i on pages (key collate nocase)",
        "no unique index",
    ),
    "a column in which texts are equal": (
        "create table pages (key text collate nocase primary key)",
        "keys that differ can be equal in its column key",
    ),
    "a column without a type": ("create table pages (key primary key)", "is declared as no type, and a key is text"),
    "a column of other numbers": ("create table pages (key real primary key)", "is declared as REAL"),
}


@pytest.mark.parametrize(("statements", "why"), MISFITS.values(), ids=MISFITS.keys())
def test_a_table_that_cannot_be_read_by_key_is_refused(path, statements, why):
    execute(path, *statements.split("; "))

    async def main() -> None:
        with pytest.raises(SettingsError, match=rf"table pages cannot be an origin: .*{why}.*\?key="):
            async with origin_of(path):
                pass

    run(main())


GOOD = (
    "key integer primary key",
    "key bigint primary key",
    "key integer primary key, b) without rowid --",
    "key varchar(20) unique",
    "a, key text not null unique",
)


@pytest.mark.parametrize("columns", GOOD)
def test_a_unique_column_of_texts_or_whole_numbers_fits(path, columns):
    execute(path, f"create table pages ({columns}\n)" if "--" not in columns else f"create table pages ({columns}")

    async def main() -> None:
        async with origin_of(path) as origin:
            assert await bodies(origin) == []

    run(main())


@pytest.mark.parametrize("column", ["text primary key", "integer primary key"])
def test_no_page_is_sorted_and_no_table_is_read_as_a_whole(path, column):
    execute(path, f"create table pages (key {column}, text)")
    execute(path, *(f"insert into pages values ({number}, 'x')" for number in range(30)))
    asked: list[str] = []

    async def main() -> None:
        origin = origin_of(path)
        async with origin:
            origin._reader.set_trace_callback(asked.append)
            shards = await origin.shards(10)
            page = await origin.scan(shards[1], "", 3)
            await origin.scan(shards[1], page.after, 3)
            await origin.fetch(["1"])
            origin._reader.set_trace_callback(None)

    run(main())
    # Whether the first page of a table is read by the index does not show as a search.
    with closing(sqlite3.connect(path)) as connection:
        for statement in asked:
            plan = [row[3] for row in connection.execute(f"explain query plan {statement}")]
            assert not any("TEMP B-TREE" in step for step in plan), (statement, plan)
            searches = [step for step in plan if "origin" in step]
            is_bounded = " > '" in statement or " in (select" in statement
            assert all(("SEARCH" if is_bounded else "SCAN") in step for step in searches), (statement, plan)
    assert len(asked) == 7


def test_a_file_that_is_not_there_is_not_created(path):
    async def main() -> None:
        with pytest.raises(DatabaseError, match=r"there is no file .*truth\.db; name the SQLite database"):
            async with origin_of(path):
                pass

    run(main())
    assert not path.exists()


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_nothing_is_written_to_the_file(path, mode):
    execute(path, "create table pages (key text primary key)", "insert into pages values ('a')")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"pragma journal_mode = {mode}")
    before = path.read_bytes()

    async def main() -> None:
        origin = origin_of(path)
        async with origin:
            assert await bodies(origin) == [b'{"key":"a"}']
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                origin._reader.execute("delete from pages")

    run(main())
    assert path.read_bytes() == before


def test_a_file_that_a_writer_has_locked_is_away_for_a_while(path, monkeypatch):
    monkeypatch.setattr(origins, "BUSY_S", 0.01)
    execute(path, "create table pages (key text primary key)", "insert into pages values ('a')")

    async def main() -> None:
        async with origin_of(path) as origin:
            with closing(sqlite3.connect(path, isolation_level=None)) as writer:
                writer.execute("begin exclusive")
                with pytest.raises(UnavailableError, match="locked"):
                    await origin.fetch(["a"])
                writer.execute("rollback")
            assert await origin.fetch(["a"]) == {"a": b'{"key":"a"}'}

    run(main())


@asynccontextmanager
async def opened_twice(path: Path) -> AsyncIterator[Origin]:
    origin = origin_of(path)
    async with origin:
        pass
    async with origin:
        yield origin


def test_an_origin_can_be_opened_again(path):
    execute(path, "create table pages (key text primary key)", "insert into pages values ('a')")

    async def main() -> None:
        async with opened_twice(path) as origin:
            assert list(await origin.fetch(["a"])) == ["a"]

    run(main())
