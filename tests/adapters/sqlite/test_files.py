"""What can be wrong with a SQLite file: each case says what to do, and nothing is lost while it lasts."""

import asyncio
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from app.shop import WAYS, Shop
from keywise import Change
from keywise.adapters.sqlite.database import BUSY_S, SqliteDatabase
from keywise.core.clock import boot_time
from keywise.core.errors import DatabaseError
from keywise.core.events import Failed, Unavailable
from keywise.flow.consumer import Consumer
from running import run

NOBODY = 65534


def started(shop: Shop) -> None:
    run(shop.app.run(handle_signals=False))


def changes(count: int, version: int = 1, text: str = "") -> list[dict]:
    return [{"key": f"k{number}", "version": version, "text": text} for number in range(count)]


def test_a_folder_that_is_missing_is_named(tmp_path):
    shop = Shop(tmp_path / "nowhere")
    shop.app.pipeline("shop", key="key").source(shop.url).sink(shop.url)
    with pytest.raises(DatabaseError, match=r"nowhere of .*shop\.db does not exist; create it"):
        started(shop)


def test_a_folder_in_place_of_the_file_is_told(tmp_path):
    (tmp_path / "shop.db").mkdir()
    shop = Shop(tmp_path)
    shop.pipeline("queue_transaction")
    with pytest.raises(DatabaseError, match="check that the file can be created there"):
        started(shop)


def test_a_file_system_that_takes_no_file_is_told():
    shop = Shop(Path("/proc"))
    shop.pipeline("queue_transaction")
    with pytest.raises(DatabaseError, match="check that the file can be created there"):
        started(shop)


def _start_as_nobody(path: str, answer) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    shop = Shop(Path(path))
    shop.pipeline("queue_transaction")
    try:
        started(shop)
    except Exception as error:
        answer.send((type(error).__name__, str(error)))
    answer.close()
    os._exit(0)


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_file_that_this_user_may_not_write_is_told(mode):
    """In a process without root's rights, since permissions do not bind root."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shop = Shop(Path(folder))
        shop.pipeline("queue_transaction")
        run(shop.app.send("shop", *changes(3)))
        run(shop.app.close())
        for path in Path(folder).iterdir():
            path.chmod(mode)
        os.chmod(folder, 0o555)
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_start_as_nobody, args=(folder, theirs))
        process.start()
        try:
            assert mine.poll(20), "the process said nothing"
            kind, message = mine.recv()
        finally:
            process.join(20)
            os.chmod(folder, 0o755)
        assert kind == "DatabaseError", message
        assert "writable for this user" in message or "can be created there" in message, message


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_starts_while_another_process_keeps_the_file_locked(tmp_path, way):
    """A worker that was stopped in the middle of a write holds the lock until it goes on."""
    shop = Shop(tmp_path)
    shop.pipeline(way)

    async def opened() -> bool:
        async with shop.app.open("shop"):
            return True

    assert run(opened())
    with closing(sqlite3.connect(shop.ledger_file, isolation_level=None)) as other:
        other.execute("begin immediate")
        began = boot_time()
        assert run(opened())
        assert boot_time() - began < BUSY_S, "it waited for the lock"


@pytest.mark.parametrize("content", [b"Dear diary, this is no database. " * 200, random.Random(1).randbytes(20_000)])
def test_a_file_that_is_no_database_is_told_and_left_alone(tmp_path, content):
    shop = Shop(tmp_path)
    shop.ledger_file.write_bytes(content)
    shop.app.pipeline("shop", key="key").source(shop.url).sink(f"{shop.url}?table=stock")
    with pytest.raises(DatabaseError, match="this is no SQLite database; name another file"):
        started(shop)
    assert shop.ledger_file.read_bytes() == content


def test_a_damaged_file_is_told(tmp_path):
    """Random bytes over all pages but the first: nothing is applied from what cannot be trusted."""
    shop = Shop(tmp_path)
    shop.pipeline("queue_transaction")
    run(shop.app.send("shop", *changes(2000, text="x" * 200)))
    run(shop.app.close())
    with closing(sqlite3.connect(shop.ledger_file)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    damage = random.Random(2)
    with shop.ledger_file.open("r+b") as file:
        for page in range(4096 * 12, shop.ledger_file.stat().st_size, 4096):
            file.seek(page)
            file.write(damage.randbytes(4096))
    with pytest.raises(DatabaseError, match="the file is damaged; restore it from a backup"):
        started(shop)


@pytest.mark.parametrize("schema", ["99", "null"])
def test_a_file_of_a_newer_keywise_is_refused(tmp_path, schema):
    shop = Shop(tmp_path)
    shop.pipeline("queue_transaction")
    run(shop.app.send("shop", *changes(3)))
    run(shop.app.close())
    change = "delete from keywise_meta" if schema == "null" else f"update keywise_meta set value = {schema}"
    shop.execute(f"{change} where name = 'schema'")
    with pytest.raises(DatabaseError, match=r"newer keywise: .* upgrade keywise"):
        started(shop)
    assert shop.rows("select count(*) from keywise_ready") == [(3,)]


LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("pragma busy_timeout = 10000")
print("ready", flush=True)
sys.stdin.readline()
connection.execute("begin immediate")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("rollback")
"""


class Locker:
    """Another process that can take the write lock of a file, and hold it until it is told to let go."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", LOCKER, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._process.stdout.readline() == "ready\n"

    def lock(self) -> None:
        self._process.stdin.write("go\n")
        assert self._process.stdout.readline() == "locked\n"

    def let_go(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


async def work_through_a_lock(way: str, shop: Shop) -> None:
    """Apply one change, then lock the file until the app has said that it cannot write, then let it work on."""
    shop.pipeline(way)
    await shop.app.send("shop", {"key": "first", "version": 1})
    async with shop.opened() as pipeline:
        [(_, source)], locker, unlocked = pipeline.sources, Locker(shop.ledger_file), asyncio.Event()

        async def is_done() -> bool:
            if not unlocked.is_set() and await source.depth() == 0:
                # Sent with a delay, so that they become due behind the lock.
                await shop.app.send("shop", *changes(100), delay="200ms")
                locker.lock()
            elif not unlocked.is_set() and shop.emitted(Unavailable):
                assert shop.rows("select count(*) from keywise_marks") == [(1,)]
                locker.let_go()
                unlocked.set()
            return unlocked.is_set() and await source.depth() == 0

        await shop.work_until(is_done, limit_s=40)
    assert await shop.letters() == []
    await shop.app.close()


def test_a_file_that_is_locked_for_long_holds_everything_up_and_loses_nothing(tmp_path):
    """All four ways at once, each on a file of its own, locked until each has said that it cannot write."""
    shops: dict[str, Shop] = {}
    for number, way in enumerate(WAYS):
        (tmp_path / str(number)).mkdir()
        shops[way] = Shop(tmp_path / str(number))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for way, shop in shops.items():
                group.create_task(work_through_a_lock(way, shop))

    run(main(), limit_s=60)
    for way, shop in shops.items():
        assert shop.content() == {"first": 1} | {f"k{number}": 1 for number in range(100)}, way
        assert all("locked" in event.cause for event in shop.emitted(Unavailable)), way


def test_a_heartbeat_that_cannot_connect_at_first_tries_again(tmp_path):
    """The file is locked when the heartbeat opens it; later a handler works for longer than its lease."""
    shop = Shop(tmp_path)
    worked: list[str] = []

    async def slow(change: Change) -> None:
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=2.5)
        worked.append(change.key)

    pipeline = shop.app.pipeline("shop", key="key", version="version", lease="1s", margin="200ms", poll="50ms")
    pipeline.source(f"{shop.url}?visibility=2s").apply(slow)

    async def main() -> None:
        async with shop.app.open("shop") as opened:
            consumer, locker = Consumer(opened), Locker(shop.ledger_file)
            locker.lock()
            running = asyncio.create_task(consumer.run())
            await asyncio.wait([running], timeout=BUSY_S + 1.0)
            locker.let_go()
            await shop.app.send("shop", *changes(1))
            while not running.done() and not worked and not shop.emitted(Failed):
                await asyncio.wait([running], timeout=0.05)
            consumer.stop()
            await running
        await shop.app.close()

    run(main(), limit_s=40)
    assert (worked, shop.emitted(Failed)) == (["k0"], [])


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_holds_everything_up_and_loses_nothing(tmp_path, way, room):
    """The limit of pages is a real SQLITE_FULL; when there is room again, everything is applied, once."""
    shop = Shop(tmp_path)
    shop.pipeline(way, batch_max=50)
    count, text = 400, "x" * 500

    async def main() -> None:
        async with shop.opened() as pipeline:
            database, [(_, source)] = pipeline.ledger.database, pipeline.sources
            await shop.app.send("shop", *changes(count, text=text))
            await _limit_pages(database, room)
            is_full = asyncio.Event()

            async def is_done() -> bool:
                if shop.emitted(Unavailable) and not is_full.is_set():
                    is_full.set()
                    await _limit_pages(database, 1_000_000)
                return await source.depth() == 0

            await shop.work_until(is_done)
            assert is_full.is_set(), "the disk was never full"
        assert await shop.letters() == []
        await shop.app.close()

    run(main(), limit_s=40)
    assert shop.content() == {f"k{number}": 1 for number in range(count)}
    assert all("full" in event.cause for event in shop.emitted(Unavailable))


async def _limit_pages(database, more: int) -> None:
    """Let the file grow by so many pages and no more, on the connection that the app writes with."""
    async with database.transaction() as connection:
        [pages] = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages + more}")


STARTER = """
import asyncio, json, sys
import keywise
from keywise.core.errors import KeywiseError

async def start(folder):
    app = keywise.App(f"sqlite:///{folder}/shop.db", observers=[])
    app.pipeline("shop", key="key").source(app.ledger_url).sink(f"{app.ledger_url}?table=stock")
    async with app.open("shop"):
        await app.send("shop", {"key": "a"})
        await app.close()

print("ready", flush=True)
for line in sys.stdin:
    try:
        asyncio.run(start(line.strip()))
        print("started", flush=True)
    except KeywiseError as error:
        print(json.dumps(str(error)), flush=True)
"""


def test_processes_that_start_at_once_on_an_empty_folder_agree(tmp_path):
    """Twenty rounds: both create the file, its tables, its clock and their queue, and neither fails."""
    command = [sys.executable, "-c", STARTER]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    answers = []
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n", "ready\n"]
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            for process in processes:
                process.stdin.write(f"{folder}\n")
            answers += [process.stdout.readline().strip() for process in processes]
            assert Shop(folder).rows("select count(*) from keywise_ready") == [(2,)], answers
            assert Shop(folder).rows("select count(*) from keywise_queues") == [(1,)]
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(20)
            process.stdout.close()
    assert set(answers) == {"started"}


@pytest.mark.parametrize(
    "seen",
    [
        "insert into keywise_marks values (1, 'a', 0, 1, 0, 0, ?)",
        "insert into keywise_active values (1, 'a', 7, 0, 0, null, json_object('updated_at', ?))",
    ],
    ids=["committed", "claimed"],
)
def test_the_clock_of_a_file_does_not_fall_back_when_the_machine_boots_with_a_wrong_time(tmp_path, seen):
    """What was committed or claimed an hour ahead of the wall clock, before a reboot, has still passed after it."""
    path = str(tmp_path / "shop.db")

    async def committed_at() -> float:
        async with SqliteDatabase(path) as database:
            return database.now()

    before = asyncio.run(committed_at())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(seen, (before + 3600,))
        connection.execute("update keywise_meta set value = 'an earlier boot' where name = 'boot'")
    assert asyncio.run(committed_at()) >= before + 3600
