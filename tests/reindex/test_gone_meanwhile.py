"""Keys that are gone while a target catches up: a run has one limit for all of its passes together."""

import itertools
import os

import pytest

from keywise.core.errors import AdminError
from keywise.reindex.catch_up import CatchUp
from keywise.reindex.report import RunReport, report_run
from reindex.catalogue import Catalogue, row
from running import run
from servers import shared

_numbers = itertools.count(1)
ROWS = {f"k{number}": 1 for number in range(20)}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))])
def catalogue(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'pages.db'}"
    else:
        url = shared.postgres().create_database(f"gone_{os.getpid()}_{next(_numbers)}")
    # A worker that loses its claim on a busy machine, among deletions, counts them although it has not done them.
    return Catalogue(url, f"{url}?table=pages", ROWS, lease="30s")


async def lose(catalogue: Catalogue, *keys: str) -> None:
    """Announce a change of keys whose rows the origin has lost, or never had."""
    for key in keys:
        catalogue.origin.rows.pop(key)
        await catalogue.app.send("pages", row(key, 2))


async def until_gone(catalogue: Catalogue, key: str) -> None:
    while key in await catalogue.content():
        await catalogue._look()


async def until_held(catalogue: Catalogue, keys: int) -> RunReport:
    """Wait until the run asks for the operator's consent to delete so many keys."""
    async with catalogue.acting() as admin:
        while True:
            report = await report_run(admin.pipeline, admin._shards)
            assert report is not None
            if report.gone == keys:
                return report
            await catalogue._look()


def test_passes_delete_no_more_keys_together_than_the_run_may(catalogue):
    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
            await catalogue.build("pages_{generation}", delete_max=2)
            for key in ("k1", "k2"):
                await lose(catalogue, key)
                await until_gone(catalogue, key)
            await lose(catalogue, "k3")
            held = await until_held(catalogue, 1)
            asked = await catalogue.content()
            async with catalogue.acting() as admin:
                with pytest.raises(
                    AdminError,
                    match=r"1 key is gone from the origin, more .* allow it with --delete-max 1, or end the run",
                ):
                    await admin.resume(0)
                await admin.resume(1)
            await until_gone(catalogue, "k3")
            await lose(catalogue, "k4")
            again = await until_held(catalogue, 1)
            return held.deleted, asked, again.deleted, await catalogue.content()

    deleted, asked, deleted_then, content = run(story(), limit_s=15)
    assert (deleted, deleted_then) == (2, 3)
    assert asked == {**dict.fromkeys(ROWS.keys() - {"k1", "k2"}, 1), "k3": 2}
    assert content == {**dict.fromkeys(ROWS.keys() - {"k1", "k2", "k3"}, 1), "k4": 2}


def test_a_worker_that_takes_over_knows_what_the_run_has_deleted(catalogue, monkeypatch):
    """The first worker fails after it has deleted a key."""
    delete_gone, failed = CatchUp._delete_gone, []

    async def failing_later(self, this):
        await delete_gone(self, this)
        if lost and not failed:
            failed.append(self)
            raise RuntimeError("this worker goes no further")

    lost = []

    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
            await catalogue.build("pages_{generation}", delete_max=1)
            await lose(catalogue, "k1")
            await until_gone(catalogue, "k1")
            lost.append("k1")
            await lose(catalogue, "k2")
            return (await until_held(catalogue, 1)).deleted, await catalogue.content()

    monkeypatch.setattr(CatchUp, "_delete_gone", failing_later)
    deleted, content = run(story(), limit_s=15)
    assert failed, "another attempt has gone on"
    assert deleted == 1
    assert content == {**dict.fromkeys(ROWS.keys() - {"k1"}, 1), "k2": 2}
