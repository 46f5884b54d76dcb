"""Workers with a ledger in Redis are killed, stopped past their lease and left without it; the judge finds no fault."""

from pathlib import Path

import pytest

from adapters.postgres.benches import fresh
from chaos.hunt import Plan, hunt
from chaos.postgres_backend import PostgresShelf
from chaos.redis_backend import RedisShelf
from servers import shared
from servers.redis import redis_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.server("redis"), pytest.mark.timeout(240)]

TIMES = 10
"""Kills inside an open batch, stops and restarts: so many of each; `make chaos` does a hundred."""


def test_after_kills_stops_and_restarts_nothing_is_lost_and_every_takeover_is_suspected_and_repaired(tmp_path: Path):
    plan = Plan(kills_inside=TIMES, stops=TIMES, restarts=TIMES, seed=4, every_s=0.1, limit_s=120)
    beside = PostgresShelf(shared.postgres(), shared.postgres().create_database(fresh("database")))
    with redis_server() as server:
        tally = hunt(tmp_path, "leased", plan, RedisShelf(server, beside))
    assert tally.faults == []
    assert tally.lacking(plan) == []
    assert tally.verdict.writes > 100
    assert tally.verdict.takeovers > 0 and tally.repairs > 0
