"""The ledger's Postgres or Redis goes away and comes back; the queue and the store are elsewhere."""

from collections.abc import Iterator

import pytest

from flow.degraded.outage_shop import OutageShop
from servers.postgres import PostgresServer, postgres_server
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.timeout(240)

SERVERS = {"postgres": postgres_server, "redis": redis_server}

KEYS = [f"k{number}" for number in range(20)]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.server(name)) for name in SERVERS])
def server(request) -> Iterator[PostgresServer | RedisServer]:
    """One of its own, which may be stopped."""
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def shop(server, tmp_path, request) -> Iterator[OutageShop]:
    shop = OutageShop(tmp_path, server.url, *request.param)
    yield shop
    shop.close()


@pytest.mark.parametrize("shop", [("write-anyway",)], indirect=True)
def test_with_write_anyway_changes_flow_on_and_all_is_put_right_afterwards(server, shop):
    worker = shop.start()
    first = shop.change(KEYS, 1)
    shop.until(lambda: shop.stock() == shop.wanted(), "the first versions")
    server.stop()

    shop.change(KEYS, 2)
    shop.until(lambda: shop.stock() == shop.wanted(), "changes without the ledger")
    status = shop.keywise("status", "--json")
    assert status.status == 1
    [unreached] = status.json["unreached"]
    assert (unreached["journal"]["keys"], unreached["journal"]["resync_due"]) == (len(KEYS), False)
    text = shop.keywise("status")
    assert text.status == 1
    assert "without the ledger since" in text.out and "20 keys are noted in 1 journal" in text.out

    shop.kill(worker)
    worker = shop.start()
    shop.change(KEYS[:10], 3, again=first)
    # An older version may be written after it: that is why these keys become suspect.
    shop.until(lambda: shop.writes("k3", 3) > 0, "changes of a worker that came later")
    server.start()
    shop.until(lambda: shop.said("ledger back") == 1, "the ledger to be back")
    shop.until(lambda: _is_calm(shop.figures()), "all keys to be repaired", limit_s=120)
    assert shop.stock() == shop.wanted()
    assert shop.said("marked suspect") >= 2, "the dead worker's notes and the living one's"
    assert shop.said("repaired") >= len(KEYS)
    assert list((shop.folder / "journal").iterdir()) == []
    assert shop.figures()["dead"] == 0


@pytest.mark.parametrize("shop", [("wait",)], indirect=True)
def test_with_wait_nothing_is_applied_meanwhile_and_everything_afterwards(server, shop):
    shop.start()
    shop.change(KEYS, 1)
    shop.until(lambda: _is_calm(shop.figures()), "the first versions")
    before, writes = shop.stock(), shop.writes()
    server.stop()
    shop.change(KEYS, 2)
    shop.until(lambda: shop.said("ledger down") == 1, "the outage to be noticed")
    assert (shop.stock(), shop.writes()) == (before, writes)
    assert shop.keywise("status").status == 1
    server.start()
    shop.until(lambda: _is_calm(shop.figures()), "the second versions")
    assert shop.stock() == shop.wanted()
    assert shop.said("ledger back") == 1
    assert (shop.figures()["dead"], shop.figures()["suspects"], shop.writes()) == (0, 0, 2 * len(KEYS))


@pytest.mark.parametrize("shop", [("write-anyway", 5)], indirect=True)
def test_past_the_threshold_a_full_resync_is_due_until_somebody_says_that_it_is_done(server, shop):
    shop.start()
    shop.change(KEYS, 1)
    shop.until(lambda: shop.stock() == shop.wanted(), "the first versions")
    server.stop()
    shop.change(KEYS, 2)
    shop.until(lambda: shop.stock() == shop.wanted(), "changes without the ledger")
    [unreached] = shop.keywise("status", "--json").json["unreached"]
    assert (unreached["journal"]["keys"], unreached["journal"]["resync_due"]) == (5, True)
    assert "a full resync is due" in shop.keywise("status").out
    server.start()
    shop.until(lambda: (shop.figures() or {}).get("resync_since") is not None, "the ledger to know")
    assert shop.said("alarmed") == 1
    assert "A FULL RESYNC IS DUE" in shop.keywise("status").out
    assert shop.keywise("repair", "--resynced", "k1").status == 2
    assert shop.keywise("repair", "--resynced").out == "shop: no full resync is due any more\n"
    assert shop.keywise("repair", "--resynced", "--json").json == {"pipeline": "shop", "was_due": False}
    assert shop.figures()["resync_since"] is None


def _is_calm(figures: dict) -> bool:
    """Everything is handed over, repaired and acked."""
    if not figures or figures["journal"] is not None or figures["suspects"] or figures["claims"]:
        return False
    return figures["sources"][0]["depth"] == 0
