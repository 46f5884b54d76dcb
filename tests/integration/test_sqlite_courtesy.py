"""A SQLite file that one process keeps busy stays open to others."""

import asyncio
import time

from chaos.fleet import until
from keywise.databases.sqlite import SqliteDatabase
from keywise.databases.sqlite_courtesy import BUSY_S, Courtesy
from running import run


async def has_given_way(courtesy: Courtesy, writes: int) -> bool:
    """Whether others on the loop had their turn meanwhile, which they have only while it gives way."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    for _ in range(writes):
        await courtesy.give_way()
        busy_until = time.perf_counter() + BUSY_S
        while time.perf_counter() < busy_until:
            pass
        courtesy.written()
    return turn.is_set()


def test_it_gives_way_only_after_a_busy_while(tmp_path):
    courtesy = Courtesy(str(tmp_path / "shop.db"))
    assert not run(has_given_way(courtesy, 1))
    assert run(has_given_way(courtesy, 3))
    courtesy.close()


def test_the_journal_is_moved_back_beside_the_writes_until_the_file_is_closed(tmp_path):
    path = tmp_path / "shop.db"

    def file_size() -> int:
        return path.stat().st_size

    async def write() -> None:
        async with SqliteDatabase(str(path)) as database:
            await database.write(lambda connection: connection.execute("create table pages (body text)"))
            size = file_size()
            database.give_way()
            await database.write(lambda connection: connection.execute("insert into pages values (zeroblob(100000))"))
            until(lambda: file_size() > size, "the journal to be moved back")

    async def read() -> list[tuple[object, ...]]:
        async with SqliteDatabase(str(path)) as database:
            await database.write(lambda connection: connection.execute("delete from pages where body is null"))
            return database.read("select count(*) from pages")

    run(write())
    assert run(read()) == [(1,)]
