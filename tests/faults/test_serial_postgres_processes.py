"""Four processes call serial functions on Postgres at once: one at a time per key, in order, and answers as stored."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from running import run, scaled
from servers import shared

pytestmark = pytest.mark.server("postgres")

CALLER = Path(__file__).with_name("serial_postgres_caller.py")
RUNS = (
    "create table runs (key text, id text unique, process text, began_at float8, ended_at float8, answer int, "
    "n bigserial)"
)
PROCESSES, CALLS, KEYS = 4, 250, 20
BACKENDS = ("postgres-lock", "postgres-queue")


async def rows_of(url: str, statement: str) -> list:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch(statement)
    finally:
        await connection.close()


def called(url: str, turns: str, kind: str) -> dict[str, int | str]:
    """What all callers were told."""
    command = [sys.executable, str(CALLER), url, turns, kind]
    callers = [
        subprocess.Popen([*command, f"p{number}", str(CALLS), str(KEYS)], stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    served = range(2 if kind == "served" else 0)
    workers = [subprocess.Popen([*command, f"w{number}", "0", str(KEYS)]) for number in served]
    said = [caller.communicate(timeout=scaled(100))[0] for caller in callers]
    for worker in workers:
        worker.terminate()
    ended = [process.wait(30) for process in (*callers, *workers)]
    assert ended == [0] * len(ended)
    return {id: answer for one in said for id, answer in json.loads(one).items()}


@pytest.mark.parametrize(
    ("turns", "kind"), [*itertools.product(BACKENDS, ("plain", "atomic")), ("postgres-queue", "served")]
)
def test_a_thousand_calls_of_four_processes_run_one_at_a_time(turns, kind):
    url = shared.postgres().create_database(fresh("processes"))
    run(rows_of(url, RUNS))
    told = called(url, turns, kind)
    runs = run(rows_of(url, "select key, id, process, began_at, ended_at, answer from runs order by key, began_at"))
    stored = run(
        rows_of(
            url,
            "select convert_from(id, 'UTF8') as id, convert_from(key, 'UTF8') as key, place, "
            "convert_from(answer, 'UTF8') as answer, started_at from keywise_turn_completed order by key, place",
        )
    )
    assert len(told) == PROCESSES * CALLS == len(runs) == len(stored)
    assert told == {row["id"]: int(row["answer"]) for row in stored}
    assert told == {row["id"]: row["answer"] for row in runs}
    for _, mine in itertools.groupby(runs, key=lambda row: row["key"]):
        in_order = list(mine)
        for before, after in itertools.pairwise(in_order):
            assert before["ended_at"] <= after["began_at"], "two ran side by side"
        assert [row["answer"] for row in in_order] == list(range(1, len(in_order) + 1))
    for key, mine in itertools.groupby(stored, key=lambda row: row["key"]):
        ran = [row["id"] for row in runs if row["key"] == key]
        assert ran == [row["id"] for row in mine], "not in the order in which they came"
    if kind == "served":
        assert {row["process"] for row in runs} <= {"w0", "w1"}, "a caller ran a request though others work for it"
    assert run(leftovers(url)) == (0, 0)


async def leftovers(url: str) -> tuple[int, int]:
    """Sessions and locks of keywise that are left; sessions end a moment after their clients."""
    for _ in range(2000):
        [[sessions]] = await rows_of(
            url,
            "select count(*) from pg_stat_activity where datname = current_database() and application_name "
            "like 'keywise%'",
        )
        if not sessions:
            break
    [[locks]] = await rows_of(
        url,
        "select count(*) from pg_locks where locktype = 'advisory' and database = "
        "(select oid from pg_database where datname = current_database())",
    )
    return sessions, locks
