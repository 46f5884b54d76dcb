"""A table that cannot take the name of the live one, or give it up, is refused with what to do."""

import inspect
import itertools
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keywise.core.errors import AdminError
from keywise.core.target import MovableSink, TargetNote
from keywise.flow.pipeline import OpenPipeline
from reindex.catalogue import Catalogue
from running import run
from servers import shared

_numbers = itertools.count(1)
RUN = TargetNote("pages", 1)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))])
def catalogue(request: pytest.FixtureRequest, tmp_path: Path) -> Catalogue:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'pages.db'}"
    else:
        url = shared.postgres().create_database(f"tables_{os.getpid()}_{next(_numbers)}")
    return Catalogue(url, f"{url}?table=pages", {})


@asynccontextmanager
async def opened(catalogue: Catalogue, *statements: str) -> AsyncIterator[MovableSink]:
    """The sink, beside a live table, after the statements."""
    async with catalogue.acting() as admin:
        for statement in statements:
            await carry_out(admin.pipeline, statement)
        assert isinstance(admin.pipeline.sink, MovableSink)
        yield admin.pipeline.sink


async def carry_out(pipeline: OpenPipeline, statement: str) -> None:
    async with pipeline.ledger.transaction() as transaction:
        done = transaction.connection.execute(statement)
        if inspect.isawaitable(done):
            await done


async def create(sink: MovableSink) -> None:
    await sink.create_target("pages_1", RUN, 0, None)


def refusal_of(catalogue: Catalogue, *statements: str) -> str:
    async def story() -> str:
        async with opened(catalogue, *statements) as sink:
            with pytest.raises(AdminError) as refused:
                await create(sink)
            return str(refused.value)

    return run(story())


def test_a_table_without_one_of_the_columns_is_refused(catalogue):
    cause = refusal_of(catalogue, "create table pages_1 (id integer)")
    assert re.match("table pages_1 does not fit: it has no column (key|version); ", cause)


def test_a_table_with_a_column_of_another_type_is_refused(catalogue):
    cause = refusal_of(catalogue, "create table pages_1 (key text primary key, version text, body text)")
    assert re.match("table pages_1 does not fit: its column version is text, and not (integer|bigint)", cause, re.I)


def test_a_table_that_already_has_the_name_of_the_old_one_is_refused(catalogue):
    assert "pages becomes pages_0 when another target goes live, and a table pages_0 exists already" in refusal_of(
        catalogue, "create table pages_0 (key text primary key)"
    )


def test_a_table_that_a_view_reads_keeps_its_name(catalogue):
    cause = refusal_of(catalogue, "create view titles as select key from pages")
    assert "view titles would stay with the old table when the name pages moves" in cause


def test_what_changes_after_the_build_is_a_fault_that_the_gate_shows(catalogue):
    async def story() -> tuple[list[str], list[str]]:
        async with opened(catalogue) as sink:
            await create(sink)
            before = await sink.finish_target("pages_1")
        late = "create view titles as select key from pages", "alter table pages_1 add column colour text"
        async with opened(catalogue, *late) as sink:
            return before, await sink.finish_target("pages_1")

    before, after = run(story())
    assert before == []
    assert after[0] == "table pages_1 has other columns than pages: it has a column colour as well"
    assert "view titles would stay with the old table when the name pages moves" in after[1]


def test_no_table_is_dropped_that_no_run_has_built(catalogue):
    async def story() -> None:
        async with opened(catalogue, "create table pages_7 (key text primary key)") as sink:
            with pytest.raises(AdminError, match="no reindex has built the table pages_7"):
                await sink.drop_target("pages_7")

    run(story())
