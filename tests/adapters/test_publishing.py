"""RabbitMQ in, OpenSearch or HTTP out, the ledger in Redis: two workers, bursts, and a ledger that goes away."""

import json
import random
from collections.abc import Callable, Iterator

import pytest

from adapters.publishing_shop import PublishingShop
from adapters.rabbitmq.queue_owner import owner
from chaos.fleet import pause
from running import run
from servers import shared
from servers.http import Space, http_service
from servers.redis import RedisServer, redis_server

pytestmark = [pytest.mark.timeout(240), pytest.mark.server("rabbitmq"), pytest.mark.server("redis")]

KEYS = [f"k{number}" for number in range(20)]
VERSIONS = 50
WRITE_ANYWAY = 'on_ledger_down="write-anyway", journal="journal", '


@pytest.fixture
def ledger() -> Iterator[RedisServer]:
    """One of its own, which may be stopped."""
    with redis_server() as server:
        yield server


@pytest.fixture
def space() -> Iterator[Space]:
    with http_service() as service:
        yield service.space()


@pytest.fixture(params=[pytest.param("opensearch", marks=pytest.mark.server("opensearch")), "http"])
def store(request, tmp_path) -> tuple[str, Callable[[], dict[str, int]]]:
    """Where pages go, and the version of each that is shown there."""
    if request.param == "http":
        space: Space = request.getfixturevalue("space")
        return f"{space.url}?missing=no+such+document", lambda: space.versions
    engine, index = shared.opensearch(), f"pages-{tmp_path.name}".lower()
    url = engine.index(index, {"v": "long"})
    return url, lambda: {key: page["v"] for key, page in engine.documents(index).items()}


@pytest.fixture
def shop(request, ledger, store, tmp_path) -> Iterator[PublishingShop]:
    queue = declared(f"pages-{tmp_path.name}")
    shop = PublishingShop(tmp_path, ledger.url, queue, *store, getattr(request, "param", ""))
    yield shop
    shop.close()


@pytest.mark.parametrize("shop", [WRITE_ANYWAY], indirect=True)
def test_with_write_anyway_pages_are_written_without_the_ledger_and_put_right_afterwards(ledger, shop):
    shop.start()
    shop.start()
    first = shop.change(KEYS, 1)
    shop.until(lambda: shop.stock() == shop.wanted(), "the first versions")
    ledger.stop()
    shop.change(KEYS, 2)
    shop.until(lambda: shop.stock() == shop.wanted(), "the second versions, without the ledger")
    shop.change(KEYS[:10], 3, again=first)
    ledger.start()
    shop.until(lambda: shop.said("ledger back") >= 1, "the ledger to be back")
    shop.until(lambda: is_calm(shop.figures()), "all keys to be repaired", limit_s=120)
    assert shop.said("marked suspect") >= 1
    assert shop.stock() == shop.wanted()
    assert shop.figures()["dead"] == 0


def test_with_wait_nothing_is_lost_while_the_ledger_is_away(ledger, shop):
    shop.start()
    shop.start()
    first = shop.change(KEYS, 1)
    shop.until(lambda: is_calm(shop.figures()), "the first versions")
    before = shop.stock()
    ledger.stop()
    shop.change(KEYS, 2, again=first)
    shop.until(lambda: shop.said("ledger down") >= 1, "the outage to be noticed")
    assert shop.stock() == before
    ledger.start()
    shop.until(lambda: shop.stock() == shop.wanted() and is_calm(shop.figures()), "the second versions")
    assert shop.figures()["dead"] == 0


def test_a_burst_through_two_workers_keeps_to_one_write_a_second(ledger, space, tmp_path):
    space.rule(per_s=1)
    options = 'rate=Rate(1, per="1s"), '
    queue = declared(f"burst-{tmp_path.name}")
    shop = PublishingShop(
        tmp_path, ledger.url, queue, f"{space.url}?missing=no+such+document", lambda: space.versions, options
    )
    try:
        shop.start()
        shop.start()
        run(burst(queue.partition("?queue=")[2]))
        shop.until(lambda: shop.stock() == {"page": VERSIONS} and is_calm(shop.figures()), "the last version")
        written = [one for one in space.log if one["status"] == 200]
        versions = [int(one["headers"]["keywise-version"]) for one in written]
        assert versions == sorted(set(versions)), "none older afterwards"
        assert sum(one["at"] < written[0]["at"] + 1.0 for one in written) <= 2
        assert shop.figures()["dead"] == 0
    finally:
        shop.close()


async def burst(queue: str) -> None:
    """All versions within a second, nearly in order."""
    rng = random.Random(1)
    versions = sorted(range(1, VERSIONS + 1), key=lambda version: version + rng.uniform(0, 4))
    async with owner(shared.rabbitmq().url) as somebody:
        for version in versions:
            await somebody.publish(queue, json.dumps({"id": "page", "v": version}).encode())
            pause(0.8 / VERSIONS)


def declared(queue: str) -> str:
    """The URL of a queue that somebody else has made."""

    async def declare() -> None:
        async with owner(shared.rabbitmq().url) as somebody:
            await somebody.declare(queue)

    run(declare())
    return f"{shared.rabbitmq().url}?queue={queue}"


def is_calm(figures: dict) -> bool:
    """Everything is handed over, repaired and acked."""
    if not figures or figures["journal"] is not None or figures["suspects"] or figures["claims"]:
        return False
    source = figures["sources"][0]
    return source.get("seen", source["depth"]) == 0
