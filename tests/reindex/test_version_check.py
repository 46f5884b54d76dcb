"""Before a run writes anything, some rows and versions of its origin are compared with the ledger."""

import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from ingest.object_rig import fresh
from keywise.core.errors import AdminError
from keywise.reindex import version_check
from keywise.reindex.dry_run import DryRun
from keywise.reindex.plan import RunPlan
from reindex.reindex_rig import Catalogue, Works, bodies_of, row
from running import run
from servers import shared

MICROSECONDS = 1_700_000_000_000_000
KEYS = [f"k{number}" for number in range(6)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were written just now are compared too."""
    monkeypatch.setattr(version_check, "QUIET_S", -60.0)


def in_microseconds(key: str, version: int) -> tuple[str, int]:
    return key, MICROSECONDS + version


def sqlite_table(folder: Path, rows: list[tuple[str, int]]) -> str:
    with closing(sqlite3.connect(folder / "truth.db")) as truth, truth:
        truth.execute("create table items (key text primary key, version integer)")
        truth.executemany("insert into items values (?, ?)", rows)
    return f"sqlite:///{folder / 'truth.db'}?table=items"


def postgres_table(folder: Path, rows: list[tuple[str, int]]) -> str:
    url = shared.postgres().create_database(fresh("units"))

    async def fill() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute("create table items (key text primary key, version bigint)")
        await connection.executemany("insert into items values ($1, $2)", rows)
        await connection.close()

    run(fill())
    return f"{url}?table=items"


@pytest.mark.parametrize("table", [sqlite_table, pytest.param(postgres_table, marks=pytest.mark.server("postgres"))])
def test_versions_of_another_unit_are_refused_with_three_examples(
    tmp_path: Path, table: Callable[[Path, list[tuple[str, int]]], str]
):
    works = Works(tmp_path, table(tmp_path, [in_microseconds(key, 1) for key in KEYS]))

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        with pytest.raises(AdminError) as refused:
            await works.start()
        words = str(refused.value)
        assert "6 of 6 quiet keys have another version in the origin" in words
        assert len(re.findall(rf"'k\d' is at 1 in the ledger and at {MICROSECONDS + 1} in the origin", words)) == 3
        assert "--unchecked" in words
        with pytest.raises(AdminError, match="another unit"):
            await works.start(into="stock_1")
        assert (await works.controls()).run is None, "nothing was started"
        await works.handles(*(row(key, 2) for key in KEYS))
        assert works.content() == dict.fromkeys(KEYS, 2), "and no later change is stale"

    run(story(), limit_s=60)


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))])
def test_rows_without_a_column_of_the_sink_are_refused(tmp_path: Path, store: str):
    """The column would become empty in every row, and the rows of both sides would be equal."""
    catalogue = Catalogue(
        *(row(key, 1, title="Chair", price=6) for key in KEYS), row("gone", 1, gone=True, name="Lamp")
    )
    ledger = f"sqlite:///{tmp_path / 'shop.db'}" if store == "sqlite" else shared.postgres().create_database(fresh("c"))
    works = Works(tmp_path, catalogue, ledger=ledger, sink=f"{ledger}?table=stock&columns=name,price")

    async def story() -> None:
        with pytest.raises(
            AdminError, match="none of the first 6 rows of pipeline 'shop' has name, which its sink"
        ) as no:
            await works.start()
        assert "their other fields are key, title, version;" in str(no.value)
        with pytest.raises(AdminError, match="has name, which its sink"):
            async with works.operated() as (admin, _):
                await DryRun(admin.pipeline, RunPlan()).run()
        assert (await works.controls()).run is None, "nothing was started"
        await works.start(is_checked=False)
        await works.cancel()
        catalogue.put(row("k3", 1, name=None))
        await works.start()

    run(story(), limit_s=60)


def test_what_would_follow_without_the_check(tmp_path: Path):
    """Else the test before this one would prove nothing."""
    works = Works(tmp_path, sqlite_table(tmp_path, [in_microseconds(key, 1) for key in KEYS]))

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        await works.runs(is_checked=False)
        await works.handles(*(row(key, 2) for key in KEYS))
        assert works.content() == dict.fromkeys(KEYS, MICROSECONDS + 1)

    run(story(), limit_s=60)


@pytest.mark.parametrize(("ahead", "starts"), [(3, True), (4, False)])
def test_a_run_starts_if_half_of_the_versions_are_equal(tmp_path: Path, ahead: int, starts: bool):
    origin = Catalogue(*(row(key, 7 if number < ahead else 1) for number, key in enumerate(KEYS)))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        if starts:
            assert (await works.start()).generation == 1
            return
        with pytest.raises(AdminError, match="4 of 6 quiet keys"):
            await works.start()

    run(story())


def test_deletions_and_keys_that_the_origin_does_not_have_are_not_compared(tmp_path: Path):
    works = Works(tmp_path, Catalogue(row("k0", 1), row("k1", 9)))

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS), row("k1", 2, gone=True))
        assert (await works.start()).generation == 1

    run(story())


@pytest.mark.parametrize("unit", [1000, MICROSECONDS])
@pytest.mark.parametrize("is_in_ledger", [True, False])
def test_without_quiet_keys_versions_of_another_scale_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int, is_in_ledger: bool
):
    """A pipeline that has just begun has no quiet key, and is where a wrong unit is most likely."""
    monkeypatch.undo()
    ledger, origin = (3 * unit, 3) if is_in_ledger else (3, 3 * unit)
    works = Works(tmp_path, Catalogue(*(row(key, origin) for key in KEYS)))

    async def story() -> None:
        await works.handles(*(row(key, ledger) for key in KEYS))
        with pytest.raises(AdminError, match="6 of 6 keys have versions in the origin that differ by more than a fact"):
            await works.start()
        assert (await works.controls()).run is None, "nothing was started"
        assert (await works.start(is_checked=False)).generation == 1

    run(story())


def test_keys_that_have_just_changed_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A live change may be ahead of its row, or behind it."""
    monkeypatch.undo()
    works = Works(tmp_path, Catalogue(*(row(key, 7) for key in KEYS)))

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        assert (await works.start()).generation == 1

    run(story())


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [{"sku": key, "version": 1} for key in KEYS],
            r"6 of the first 6 rows cannot be read as messages.*\"sku\":\"k0\"",
        ),
        (
            [{"key": key} for key in KEYS],
            r"6 of the first 6 rows cannot be read as messages.*missing required field `version`",
        ),
    ],
    ids=["no messages", "no versions"],
)
def test_rows_that_would_all_be_dead_letters_are_refused(tmp_path: Path, rows: list[dict[str, Any]], why: str):
    origin = Catalogue()
    origin.rows = dict(zip(KEYS, rows, strict=True))
    works = Works(tmp_path, origin)

    async def story() -> None:
        with pytest.raises(AdminError, match=why):
            await works.start()
        assert (await works.controls()).run is None

    run(story())


@pytest.mark.parametrize("known", [[], KEYS], ids=["of new keys", "of keys in the ledger"])
def test_some_rows_that_cannot_be_read_stop_no_run_and_become_dead_letters(tmp_path: Path, known: list[str]):
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    origin.rows["k0"] = {"key": "k0"}
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in known))
        report = await works.runs()
        assert report.counts == {"read": 6, "applied": 5, "dead": 1}
        assert bodies_of(works.ledger_file) == {key: row(key, 1) for key in known or KEYS[1:]}

    run(story())


def test_an_origin_that_returns_the_row_of_another_key_is_refused_by_name(tmp_path: Path):
    origin = Catalogue(*(row(key, 1) for key in KEYS))
    works = Works(tmp_path, origin)

    async def other_rows(keys: Sequence[str]) -> dict[str, Any]:
        return {key: row(f"{key}-other", 1) for key in keys}

    async def story() -> None:
        await works.handles(*(row(key, 1) for key in KEYS))
        origin.fetch = other_rows
        with pytest.raises(
            AdminError, match="asked for the row of 'k0', the origin has returned the row of 'k0-other'"
        ):
            await works.start()
        assert (await works.controls()).run is None, "nothing was started"

    run(story(), limit_s=60)
