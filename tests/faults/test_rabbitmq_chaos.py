"""Workers on RabbitMQ are killed, cut off and left without a broker: nothing is lost, and nothing is thrown away."""

from pathlib import Path

import pytest

from chaos.hunt import Plan, hunt
from chaos.rabbitmq_backend import RabbitShelf
from chaos.sqlite_backend import SqliteShelf
from servers.rabbitmq import rabbit_server

pytestmark = [pytest.mark.server("rabbitmq"), pytest.mark.timeout(600)]

KILLS, CUTS, RESTARTS = 10, 10, 1
"""A broker takes long to start; `make chaos` does a hundred of each."""


def test_after_kills_cuts_and_restarts_nothing_is_lost_or_thrown_away(tmp_path: Path):
    plan = Plan(kills_inside=KILLS, cuts=CUTS, restarts=RESTARTS, seed=5, every_s=0.1, limit_s=120)
    with rabbit_server() as server:
        shelf = RabbitShelf(server, SqliteShelf(tmp_path))
        buried = []
        tally = hunt(tmp_path, "leased", plan, shelf, lambda tally: buried.append(shelf.buried()))
        buried.append(shelf.buried())
        assert tally.faults == [], server.overview()
    assert tally.lacking(plan) == []
    assert tally.verdict.writes > 100
    assert max(buried) == 0, "messages were thrown away, though nothing was wrong with them"
