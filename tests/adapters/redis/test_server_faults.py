"""What can happen to a ledger in Redis under two workers: it is told, waited for, and the store ends right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.postgres.benches import fresh
from chaos.final_checks import judge_plain
from chaos.fleet import Worker, drained, until
from chaos.postgres_backend import PostgresShelf
from chaos.redis_backend import RedisShelf
from chaos.store import Store
from servers import shared
from servers.redis import RedisServer, redis_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.server("redis"), pytest.mark.timeout(240)]

SHORT = {
    "poll": "50ms",
    "backoff": "10ms",
    "backoff_max": "100ms",
    "lease": "1s",
    "margin": "200ms",
    "visibility": "2s",
    "horizon": "2s",
    "repair": "100ms",
    "concurrency": 4,
    "attempts_max": 50,
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of its own, to which a test may do what it likes."""
    with redis_server() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, server: RedisServer) -> Iterator[Store]:
    beside = PostgresShelf(shared.postgres(), shared.postgres().create_database(fresh("database")))
    store = Store(tmp_path, RedisShelf(server, beside), is_heavy=True)
    yield store
    store.close()


@pytest.fixture
def workers(store: Store) -> Iterator[list[Worker]]:
    workers = [Worker(store, "leased", f"worker{number}", **SHORT) for number in range(2)]
    for worker in workers:
        worker.start()
    yield workers
    for worker in workers:
        worker.close()


def until_right(store: Store, workers: list[Worker]) -> None:
    """Wait until nothing is left to do, and end the workers."""

    def check() -> None:
        for worker in workers:
            worker.check()

    until(lambda: store.depth() == 0, "the queue to be empty", check, limit_s=60)
    until(lambda: store.counts().suspects == 0, "the repairs", check, limit_s=60)
    drained(*workers)


def said(workers: list[Worker], text: str) -> bool:
    return any(text in worker.notes for worker in workers)


def test_memory_that_is_used_up_is_waited_for(store, server, workers):
    server.command("CONFIG", "SET", "maxmemory", "1mb")
    store.produce(100)
    until(lambda: said(workers, "maxmemory"), "the workers to notice", workers[0].check)
    server.command("CONFIG", "SET", "maxmemory", "0")
    until_right(store, workers)
    assert (judge_plain(store.evidence()).faults, store.letters()) == ([], {})


def test_connections_and_scripts_are_taken_away_again_and_again(store, server, workers):
    for _ in range(10):
        store.produce(60)
        until(lambda: any(worker.is_inside for worker in workers) or store.depth() == 0, "a batch", workers[0].check)
        server.command("SCRIPT", "FLUSH")
        server.command("CLIENT", "KILL", "TYPE", "normal")
    until_right(store, workers)
    assert (judge_plain(store.evidence()).faults, store.letters()) == ([], {})


def test_a_server_that_comes_back_empty_is_told_and_newer_changes_win_from_there(store, server, workers):
    """Its marks are gone, so that a resync is due: the truth is sent once more."""
    for _ in range(5):
        store.produce(60)
    until(lambda: store.depth() == 0, "the first changes", workers[0].check)
    server.lose()
    server.start()
    until(lambda: said(workers, "has lost"), "the workers to notice", workers[0].check)
    for _ in range(5):
        store.produce(60)
    store.resync()
    until_right(store, workers)
    assert store.content() == store.truth()
    assert store.letters() == {}
