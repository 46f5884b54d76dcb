"""Workers whose clocks are an hour apart, and count from another moment: leases go by the clock of the store alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.fleet import Worker, drained, pause, until
from chaos.hunt import OPTIONS, Plan, hunt
from chaos.judge import judge_plain
from chaos.on_postgres import PostgresShelf
from chaos.store import Shelf, Store
from conformance.postgres_benches import fresh
from servers import shared
from servers.faketime import shifted

pytestmark = [pytest.mark.server("faketime"), pytest.mark.timeout(240)]

APART_S = 3600
LONG = {"lease": "20s", "margin": "2s", "visibility": "30s"}
"""Nobody is late by so much, however busy the machine; a clock that is an hour ahead would be."""


@contextmanager
def on_postgres(folder: Path) -> Iterator[Shelf]:
    server = shared.postgres()
    yield PostgresShelf(server, server.create_database(fresh("database")))


SERVERS = [pytest.param(on_postgres, id="postgres", marks=pytest.mark.server("postgres"))]


def worked(folder: Path, shelf: Shelf, *environments: dict[str, str]) -> Store:
    """What workers leave that nothing happens to."""
    store = Store(folder, shelf, is_heavy=True)
    options = [OPTIONS | LONG | {"environment": one} for one in environments]
    workers = [Worker(store, "leased", f"worker{number}", **mine) for number, mine in enumerate(options)]
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


@pytest.mark.parametrize("on", SERVERS)
def test_nobody_takes_over_from_a_worker_whose_wall_clock_is_an_hour_behind(tmp_path, on):
    with on(tmp_path) as shelf:
        store = worked(tmp_path, shelf, shifted(APART_S), shifted(-APART_S))
        verdict = judge_plain(store.evidence())
        store.close()
    assert (verdict.faults, verdict.takeovers) == ([], 0)
    assert verdict.writes > 100


@pytest.mark.parametrize("way", ["transacted", "leased"])
@pytest.mark.parametrize("on", SERVERS)
def test_workers_with_different_clocks_are_killed_and_stopped_and_nothing_goes_wrong(tmp_path, on, way):
    """Their boot clocks differ, too."""
    plan = Plan(kills_inside=2, stops=2, seed=5, every_s=0.1)
    with on(tmp_path) as shelf:
        clocks = [shifted(APART_S, boot_too=True), shifted(-APART_S, boot_too=True)]
        tally = hunt(tmp_path, way, plan, shelf, environments=clocks)
    assert (tally.faults, tally.lacking(plan)) == ([], [])
    assert tally.verdict.takeovers > 0
