"""The rate of a key holds for all worker processes together, by the times that the store itself recorded."""

import asyncio
import random
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import keywise
from adapters.function.handler_shop import passed
from cli.command import Folder
from running import run

VERSIONS = 50
HEAD = """
import keywise
from keywise import Change, Rate, Transaction

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", rate=Rate(1, per="1s"), poll="50ms", prefetch=20, batch_max=10)
pages.source("sqlite:///shop.db")
"""
SINKS = {
    "table": 'pages.sink("sqlite:///shop.db?table=stored")',
    "transacted": """
@pages.apply
async def write(change: Change, transaction: Transaction) -> None:
    transaction.connection.execute("insert or replace into stored values (?, ?)", (change.key, change.version))
""",
    "leased": """
import sqlite3

@pages.apply
def write(change: Change) -> None:
    with sqlite3.connect("store.db", timeout=60) as connection:
        connection.execute("insert or replace into stored values (?, ?)", (change.key, change.version))
    connection.close()
""",
}
LOG = """
create table log (version integer, at real);
create trigger log_insert after insert on stored begin
  insert into log values (new.version, (julianday('now') - 2440587.5) * 86400.0);
end;
create trigger log_update after update on stored begin
  insert into log values (new.version, (julianday('now') - 2440587.5) * 86400.0);
end;
"""


def prepared(path: Path, sink: str) -> tuple[Folder, Path]:
    """The folder of a shop, and the file of its store, which logs every write with its time."""
    folder, store = Folder(path, HEAD + SINKS[sink]), path / ("store.db" if sink == "leased" else "shop.db")
    with closing(sqlite3.connect(store)) as connection:
        if sink != "table":
            connection.execute("create table stored (key text primary key, version integer)")
        else:
            assert folder.keywise("run", "--until-empty").status == 0
        connection.executescript(LOG)
    return folder, store


def writes(store: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute("select version, at from log order by rowid").fetchall()


async def write_nothing(change: keywise.Change) -> None:
    """The app that sends has a pipeline to send to, and does not run it."""


async def send_for_a_second(path: Path) -> None:
    """All versions within about a second, some of them out of order, to whichever worker takes them."""
    rng = random.Random(5)
    order = sorted(range(1, VERSIONS + 1), key=lambda version: version + rng.uniform(-4, 4))
    async with keywise.App(f"sqlite:///{path}/shop.db") as app:
        app.pipeline("pages", key="id", version="v").source(f"sqlite:///{path}/shop.db").apply(write_nothing)
        for version in order:
            await app.send("pages", {"id": "hot", "v": version})
            await passed(1 / VERSIONS)
        async with app.open("pages", work=False) as pipeline:
            [(_, source)] = pipeline.sources
            while await source.depth():
                await passed(0.05)


@pytest.fixture
def started() -> list[subprocess.Popen[str]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sink", SINKS)
def test_two_processes_write_a_hot_key_at_its_rate_and_end_at_its_newest(tmp_path, started, sink):
    folder, store = prepared(tmp_path, sink)
    started += [folder.start("run", "shop:app") for _ in range(2)]
    for worker in started:
        assert worker.stderr.readline().startswith("pages:"), "it says how it works, and works"
    run(asyncio.wait_for(send_for_a_second(tmp_path), 40), limit_s=45)
    for worker in started:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    written = writes(store)
    versions, times = [version for version, _ in written], [at for _, at in written]
    assert versions[-1] == VERSIONS
    assert versions == sorted(set(versions)), "never older after newer, and each once"
    assert sum(at < times[0] + 1.0 for at in times) <= 2
    assert len(times) <= times[-1] - times[0] + 2.0, "the pace holds afterwards too"
