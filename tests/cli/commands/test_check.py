"""`keywise check` says what it will write, reports each promise, and exits with status 1 if one is broken."""

import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from adapters.redis.serial.benches import turns_url
from cli.command import LIMIT_S, Answer, Folder, environment
from keywise.adapters.redis.database import RedisDatabase
from running import run, scaled
from servers import shared

BROKEN = """
import sys
from keywise.cli import main
from keywise.adapters.memory.source import MemorySource

async def ack(self, deliveries):
    pass

MemorySource.ack = ack
sys.argv = ["keywise", "check", "source", "memory://", *sys.argv[1:]]
main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def check_broken(*arguments: str) -> Answer:
    """A queue in memory that never forgets."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, *arguments],
        env=environment(None),
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def test_every_promise_has_a_line_after_what_will_be_written(folder):
    answer = folder.keywise("check", "sink", "sqlite:///shop.db")
    assert (answer.status, answer.err) == (0, "")
    first, *lines, end = answer.out.splitlines()
    assert first.startswith("writes to tables named check_")
    assert first.endswith("in sqlite:///shop.db; they are removed afterwards")
    assert all(line.startswith("kept ") for line in lines)
    assert end == f"{len(lines)} promises kept, 0 broken"
    assert not (folder.path / "shop.db").exists()


def test_an_origin_is_checked_in_tables_of_its_own(folder):
    answer = folder.keywise("check", "origin", "sqlite:///shop.db")
    assert (answer.status, answer.err) == (0, "")
    first, *lines, end = answer.out.splitlines()
    assert first.startswith("writes to tables named check_")
    assert all(line.startswith("kept ") for line in lines)
    assert end == f"{len(lines)} promises kept, 0 broken"
    assert not (folder.path / "shop.db").exists()


@pytest.mark.server("postgres")
def test_an_origin_in_postgres_leaves_no_table_behind(folder):
    url = shared.postgres().create_database("checked_origin")
    answer = folder.keywise("check", "origin", url)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[-1].endswith(" promises kept, 0 broken")

    async def tables() -> list:
        connection = await asyncpg.connect(url)
        found = await connection.fetch("select relname from pg_class where relnamespace = 'public'::regnamespace")
        await connection.close()
        return found

    assert run(tables()) == []


def test_scripts_get_every_promise_by_name(folder):
    answer = folder.keywise("check", "source", "memory://", "--json").json
    assert (answer["role"], answer["broken"], answer["unchecked"]) == ("source", 0, 0)
    assert answer["kept"] == len(answer["promises"]) > 20
    empty = {"name": "an_empty_queue_gives_nothing", "verdict": "kept", "why": ""}
    assert empty.items() <= answer["promises"][2].items()


def test_a_broken_promise_is_reported_and_ends_with_status_1():
    answer = check_broken()
    assert answer.status == 1
    [line] = [one for one in answer.out.splitlines() if one.startswith("broken") and "An acked message" in one]
    assert " But what came after the ack was [" in line
    assert "promises are broken" in answer.err


def test_a_broken_promise_is_reported_to_scripts_too():
    answer = check_broken("--json")
    assert answer.status == 1
    [one] = [one for one in answer.json["promises"] if one["name"] == "an_acked_message_never_comes_back"]
    assert one["verdict"] == "broken"
    assert one["why"].startswith("what came after the ack was [")


@pytest.mark.parametrize(
    ("role", "url", "error"),
    [
        ("source", "sqlite:///shop.db?queue=live", "leave queue= out"),
        ("sink", "sqlite:///shop.db?table=pages", "leave table= out"),
        ("ledger", "sqlite://shop.db", "has two slashes where a file needs three"),
        ("ledger", "nonsense", "is no URL"),
        ("sink", "http://127.0.0.1:1/pages/{key}", "call keywise.testing.check_sink with a SinkBench whose content()"),
        ("sink", "amqp://127.0.0.1:1", "no sink understands amqp://"),
    ],
)
def test_what_could_be_somebody_elses_is_refused_before_anything_is_written(folder, role, url, error):
    answer = folder.keywise("check", role, url)
    assert (answer.status, answer.out) == (1, "")
    assert error in answer.err
    assert not (folder.path / "shop.db").exists()


@pytest.mark.server("rabbitmq")
def test_a_broker_is_checked_with_queues_that_are_made_and_removed(folder):
    broker = shared.rabbitmq()
    answer = folder.keywise("check", "source", broker.url)
    assert (answer.status, answer.err) == (0, "")
    first, *_, end = answer.out.splitlines()
    prefix = first.removeprefix("writes to queues named ").partition("…")[0]
    assert re.fullmatch(r"[0-9]+ promises kept, 0 broken, [0-9] not checked", end)
    assert prefix not in broker.control("list_queues", "name")


def test_turns_in_a_file_are_checked_and_leave_it_as_it_was(folder):
    answer = folder.keywise("check", "turns", "sqlite:///shop.db")
    assert (answer.status, answer.err) == (0, "")
    first, *_, end = answer.out.splitlines()
    assert first.startswith("writes to serial functions named check_")
    assert re.fullmatch(r"[0-9]+ promises kept, 0 broken", end)
    assert not (folder.path / "shop.db").exists()


@pytest.mark.server("redis")
def test_turns_in_redis_are_checked_and_nothing_of_them_is_left(folder):
    answer = folder.keywise("check", "turns", turns_url(), "--json").json
    assert (answer["role"], answer["broken"], answer["unchecked"]) == ("turns", 0, 0)
    assert answer["kept"] == len(answer["promises"]) > 40
    assert run(_names_with(answer["wrote_to"])) == []


async def _names_with(part: str) -> list[bytes]:
    """Names and notes in the Redis database that have this part."""
    async with RedisDatabase(turns_url()) as server:
        names = await server.run("KEYS", "*")
        notes = [one for name in names if b":within:" in name for one in await server.run("ZRANGE", name, 0, -1)]
        return [one for one in (*names, *notes) if part.encode() in one]
