"""A run over the rows of which a condition holds: the table chooses them, and all others are left alone."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import asyncpg
import pytest

from adapters.aws_credentials import CREDENTIALS
from keywise.core.controls import RunState
from keywise.core.errors import AdminError, OriginError
from reindex.reindex_rig import Catalogue, Works, row
from running import run
from servers import shared

ROWS = [(f"k{number:02d}", 1, number % 5, "o'clock" if number == 7 else "text") for number in range(20)]
CREATE = "create table items (key text primary key, version bigint, shelf bigint, name text)"
_numbers = count(1)


def sqlite_table(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "truth.db")) as truth, truth:
        truth.execute(CREATE)
        truth.executemany("insert into items values (?, ?, ?, ?)", ROWS)
    return f"sqlite:///{folder / 'truth.db'}?table=items"


def postgres_table(folder: Path) -> str:
    url = shared.postgres().create_database(f"chosen_{os.getpid()}_{next(_numbers)}")

    async def fill() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(CREATE)
        await connection.executemany("insert into items values ($1, $2, $3, $4)", ROWS)
        await connection.close()

    run(fill())
    return f"{url}?table=items"


on_each_table = pytest.mark.parametrize(
    "table", [sqlite_table, pytest.param(postgres_table, marks=pytest.mark.server("postgres"))]
)


@on_each_table
@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        ("shelf = 3", ["k03", "k08", "k13", "k18"]),
        ("shelf = 3 or shelf = 4", ["k03", "k04", "k08", "k09", "k13", "k14", "k18", "k19"]),
        ("name = 'o''clock' -- the one", ["k07"]),
        ("shelf > 4", []),
    ],
)
def test_rows_that_match_are_written_and_all_others_are_left_alone(
    tmp_path: Path, table: Callable[[Path], str], condition: str, keys: list[str]
):
    works = Works(tmp_path, table(tmp_path))

    async def story() -> None:
        await works.handles(row("gone", 1))
        report = await works.runs(where=condition, shard_rows=6)
        assert (report.run.state, report.run.is_partial, report.run.shards) == (RunState.COMPLETE, True, 4)
        assert report.rows_read == len(keys) and report.reconciles
        assert works.content() == dict.fromkeys([*keys, "gone"], 1), "and nothing is deleted"

    run(story(), limit_s=60)


@on_each_table
@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("colour = 'red'", "colour"),
        ("shelf = ", "syntax"),
        ("shelf = 1 then true end; delete from items; --", "cannot be used"),
        ("true) or (true", "cannot be used"),
        ("true then true end or case when true", "cannot be used"),
        ("name = '" + "x" * 500 + "'", "at most 500 bytes"),
    ],
)
def test_a_condition_that_the_table_does_not_understand_is_refused(
    tmp_path: Path, table: Callable[[Path], str], condition: str, why: str
):
    works = Works(tmp_path, table(tmp_path))

    async def story() -> None:
        with pytest.raises(OriginError, match=why):
            await works.start(where=condition)
        assert (await works.controls()).run is None

    run(story(), limit_s=60)


@on_each_table
def test_the_refusal_of_a_condition_shows_nothing_that_was_put_around_it(tmp_path: Path, table: Callable[[Path], str]):
    works = Works(tmp_path, table(tmp_path))

    async def story() -> None:
        with pytest.raises(OriginError) as refused:
            await works.start(where="price > '")
        assert "cannot be used: " in str(refused.value)
        assert not any(part in str(refused.value) for part in ("\n", "true end", "limit 0"))

    run(story(), limit_s=60)


@on_each_table
def test_a_limit_may_be_any_number(tmp_path: Path, table: Callable[[Path], str]):
    works = Works(tmp_path, table(tmp_path))

    async def story() -> None:
        report = await works.runs(limit=10**20, shard_rows=10**20)
        assert (report.run.state, report.rows_read) == (RunState.COMPLETE, len(ROWS))

    run(story(), limit_s=60)


def test_an_origin_that_cannot_choose_rows_says_what_to_do(tmp_path: Path):
    works = Works(tmp_path, Catalogue(row("a", 1)))

    async def story() -> None:
        with pytest.raises(
            OriginError, match=r"cannot choose rows by a condition; write their keys into a file.*--ids"
        ):
            await works.start(where="true")

    run(story())


@pytest.mark.server("dynamodb")
def test_neither_can_a_table_of_dynamodb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server = shared.dynamodb()
    table = server.create_table(f"chosen_{os.getpid()}_{next(_numbers)}", "key")
    works = Works(tmp_path, f"dynamodb://{table}?region=us-east-1&endpoint={server.url}")

    async def story() -> None:
        with pytest.raises(OriginError, match="--ids"):
            await works.start(where="shelf = 3")

    run(story())


def test_a_new_target_gets_every_row(tmp_path: Path):
    works = Works(tmp_path, sqlite_table(tmp_path))

    async def story() -> None:
        with pytest.raises(AdminError, match="leave out --ids, --where, --limit and --also-removed"):
            await works.start(where="shelf = 3", into="stock_1")

    run(story())
