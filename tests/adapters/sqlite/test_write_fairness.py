"""A SQLite file that one process keeps busy stays open to others."""

import asyncio
import threading
import time

import pytest

import keywise
from chaos.fleet import until
from keywise.adapters.sqlite import write_fairness as sqlite_courtesy
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.write_fairness import BUSY_S, FREE_MAX_S, WriteFairness
from keywise.core import events
from running import run


async def has_given_way(fairness: WriteFairness, writes: int) -> bool:
    """Whether others on the loop had their turn meanwhile, which they have only while it gives way."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    for _ in range(writes):
        await fairness.yield_if_busy()
        busy_until = time.perf_counter() + BUSY_S
        while time.perf_counter() < busy_until:
            pass
        fairness.record_write()
    return turn.is_set()


def test_it_gives_way_only_after_a_busy_while(tmp_path):
    fairness = WriteFairness(str(tmp_path / "shop.db"))
    assert not run(has_given_way(fairness, 1))
    assert run(has_given_way(fairness, 3))


def test_after_a_standstill_it_gives_way_for_a_moment_only(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(sqlite_courtesy.time, "perf_counter", lambda: now)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(sqlite_courtesy.asyncio, "sleep", sleep)
    fairness = WriteFairness(str(tmp_path / "shop.db"))
    run(fairness.yield_if_busy())
    now += 600.0
    fairness.record_write()
    run(fairness.yield_if_busy())
    assert slept == [FREE_MAX_S]


def test_the_journal_is_moved_back_beside_the_writes_until_the_file_is_closed(tmp_path):
    path = tmp_path / "shop.db"

    def file_size() -> int:
        return path.stat().st_size

    async def write() -> None:
        async with SqliteDatabase(str(path)) as database:
            await database.write(lambda connection: connection.execute("create table pages (body text)"))
            size = file_size()
            database.enable_fair_writes()
            assert tidying()
            await database.write(lambda connection: connection.execute("insert into pages values (zeroblob(100000))"))
            until(lambda: file_size() > size, "the journal to be moved back")
        assert not tidying()

    run(write())


def test_a_file_is_given_way_to_from_its_next_opening_on(tmp_path):
    async def opened() -> bool:
        database = SqliteDatabase(str(tmp_path / "shop.db"))
        database.enable_fair_writes()
        assert not tidying() and not (tmp_path / "shop.db").exists()
        async with database:
            return tidying()

    assert run(opened())
    assert not tidying()


def test_what_cannot_be_moved_back_troubles_nobody(tmp_path):
    fairness = WriteFairness(str(tmp_path / "nowhere" / "shop.db"))
    fairness.start()
    fairness.record_write()
    fairness.close()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("lanes", [("live",), ("live", "bulk"), ("bulk", "bulk")])
def test_only_a_pipeline_with_both_lanes_gives_way(tmp_path, lanes):
    url = f"sqlite:///{tmp_path}/shop.db"
    app = keywise.App(url)
    pages = app.pipeline("pages", key="id", version="v").sink(f"{url}?table=pages")
    for number, lane in enumerate(lanes):
        pages.source(f"{url}?queue=q{number}", lane=lane)
    seen: list[bool] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Settled):
            seen.append(tidying())
            app.stop()

    async def work() -> None:
        app.observers.append(watch)
        async with app:
            await app.send("pages", {"id": "home", "v": 1})
            await app.run(handle_signals=False)

    run(work())
    assert seen == [set(lanes) == {"live", "bulk"}]


def tidying() -> bool:
    return any(thread.name == "keywise-sqlite-checkpoint" for thread in threading.enumerate())
