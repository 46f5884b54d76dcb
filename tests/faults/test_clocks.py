"""Workers whose clocks are an hour apart, and count from another moment: leases go by the clock of the store alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapters.postgres.benches import fresh
from chaos.final_checks import judge_atomic, judge_plain
from chaos.fleet import Worker, drained, pause, until
from chaos.hunt import OPTIONS, Plan, hunt
from chaos.postgres_backend import PostgresShelf
from chaos.redis_backend import RedisShelf
from chaos.store import Shelf, Store
from servers import shared
from servers.faketime import shifted
from servers.redis import redis_server

pytestmark = [pytest.mark.server("faketime"), pytest.mark.timeout(240)]

APART_S = 3600
LONG = {"lease": "20s", "margin": "2s", "visibility": "30s"}
"""Nobody is late by so much, however busy the machine; a clock that is an hour ahead would be."""


@contextmanager
def on_postgres(folder: Path) -> Iterator[PostgresShelf]:
    server = shared.postgres()
    yield PostgresShelf(server, server.create_database(fresh("database")))


@contextmanager
def on_redis(folder: Path) -> Iterator[Shelf]:
    with on_postgres(folder) as beside, redis_server() as server:
        yield RedisShelf(server, beside)


NEEDS = pytest.mark.server("postgres"), pytest.mark.server("redis")
PLACES = [
    pytest.param(on_postgres, "transacted", id="postgres, transacted", marks=NEEDS[0]),
    pytest.param(on_postgres, "leased", id="postgres, leased", marks=NEEDS[0]),
    pytest.param(on_redis, "leased", id="redis, leased", marks=NEEDS),
]


def worked(folder: Path, shelf: Shelf, way: str, *environments: dict[str, str]) -> Store:
    """What workers leave that nothing happens to."""
    store = Store(folder, shelf, is_heavy=True)
    options = [OPTIONS | LONG | {"environment": one} for one in environments]
    workers = [Worker(store, way, f"worker{number}", **mine) for number, mine in enumerate(options)]
    try:
        for worker in workers:
            worker.start()
        for _ in range(10):
            store.produce(40)
            pause(0.1)
        until(lambda: store.depth() == 0, "the queue to be empty", workers[0].check, limit_s=60)
        drained(*workers)
    finally:
        for worker in workers:
            worker.close()
    return store


@pytest.mark.parametrize(("on", "way"), PLACES)
def test_nobody_takes_over_from_a_worker_whose_wall_clock_is_an_hour_behind(tmp_path, on, way):
    with on(tmp_path) as shelf:
        store = worked(tmp_path, shelf, way, shifted(APART_S), shifted(-APART_S))
        verdict = (judge_plain if way == "leased" else judge_atomic)(store.evidence())
        store.close()
    assert (verdict.faults, verdict.takeovers) == ([], 0)
    assert verdict.writes > 100


@pytest.mark.parametrize(("on", "way"), PLACES)
def test_workers_with_different_clocks_are_killed_and_stopped_and_nothing_goes_wrong(tmp_path, on, way):
    """Their boot clocks differ, too."""
    plan = Plan(kills_inside=2, stops=2, seed=5, every_s=0.1)
    with on(tmp_path) as shelf:
        clocks = [shifted(APART_S, boot_too=True), shifted(-APART_S, boot_too=True)]
        tally = hunt(tmp_path, way, plan, shelf, environments=clocks)
    assert (tally.faults, tally.lacking(plan)) == ([], [])
    assert tally.verdict.takeovers > 0
