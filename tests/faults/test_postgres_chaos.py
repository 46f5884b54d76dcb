"""Workers on one Postgres are killed, stopped past their lease and left without a server; the judge finds no fault."""

from pathlib import Path

import pytest

from chaos.hunt import Plan, hunt
from chaos.postgres_backend import PostgresShelf
from servers.postgres import postgres_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

TIMES = {"queue_transaction": 4, "transacted": 3, "leased": 4}
"""Kills inside an open batch, stops and restarts: so many of each; `make chaos` does a hundred."""


@pytest.mark.parametrize("way", TIMES)
def test_after_kills_stops_and_restarts_nothing_is_lost_and_nothing_goes_backwards(tmp_path: Path, way: str):
    """Nothing is applied twice on the atomic grade; on the plain one, every takeover is suspected and repaired."""
    times = TIMES[way]
    plan = Plan(kills_inside=times, stops=times, restarts=times, seed=3, every_s=0.1, limit_s=120)
    with postgres_server() as server:
        tally = hunt(tmp_path, way, plan, PostgresShelf(server))
    assert tally.faults == []
    assert tally.lacking(plan) == []
    assert tally.verdict.writes > 100
    assert (tally.verdict.takeovers > 0, tally.repairs > 0) == (way != "queue_transaction", way == "leased")
