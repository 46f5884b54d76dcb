"""Two workers on one Postgres are killed, cut off and left without a server; nothing is lost, twice or backwards."""

from collections.abc import Iterator

import pytest

from integration.postgres_shop import PostgresShop
from servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

KILLS = 5
CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where pid != pg_backend_pid() and backend_type = 'client backend'"
)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One of its own, which may be restarted."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def shop(server: PostgresServer, tmp_path, request) -> Iterator[PostgresShop]:
    shop = PostgresShop(tmp_path, server.url, getattr(request, "param", "one transaction"))
    yield shop
    shop.close()


@pytest.mark.parametrize("shop", ["one transaction", "transacted"], indirect=True)
def test_after_kills_cuts_and_a_restart_nothing_is_lost_twice_or_backwards(server, shop):
    shop.start(), shop.start()
    kills_at_work = 0
    for _ in range(KILLS):
        shop.produce(1000)
        shop.until_written(50)
        shop.kill(shop.workers[0])
        kills_at_work += shop.depth() > 0
        shop.start()
    shop.produce(1000)
    shop.until_written(50)
    cut = shop.rows(CUT)
    assert len(cut) >= 2, "nobody was connected"
    shop.produce(1000)
    shop.until_written(50)
    server.restart()
    shop.produce(1000)
    shop.until_empty()
    shop.drain()
    assert shop.faults() == []
    assert shop.writes() > 500
    assert kills_at_work > 0, "every kill came when all was done"


def test_a_server_that_is_away_for_a_while_is_waited_for(server, shop):
    worker = shop.start()
    shop.produce(100)
    shop.until_empty()
    server.stop("fast")
    server.start()
    shop.produce(100)
    shop.until_empty()
    assert worker.poll() is None
    shop.drain()
    assert shop.faults() == []
