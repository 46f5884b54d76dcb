"""What an operator can do about a ledger in Redis when all memory that its server may use is used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import until
from cli.command import Folder
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import UnavailableError
from running import run
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

SHOP = """
import keywise

app = keywise.App({ledger!r})
shop = app.pipeline("shop", key="key", version="version", poll="50ms"{more})
shop.source("sqlite:///queue.db")


@shop.apply
def keep(change: keywise.Change[dict]) -> None:
    if change.version < 0:
        raise keywise.PermanentError("no such page")
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def full(tmp_path: Path, server: RedisServer) -> Folder:
    """A shop with three keys and two dead letters, whose server has no memory left."""
    folder = Folder(tmp_path, SHOP.format(ledger=server.url, more=""))
    versions = {"a": 1, "b": 1, "c": 1, "d": -1, "e": -1}
    bodies = [json.dumps({"key": key, "version": version}) for key, version in versions.items()]
    assert folder.keywise("send", "shop", *bodies).status == 0
    outcomes = folder.work()["shop"]
    assert (outcomes["applied"], outcomes["dead"]) == (3, 2)
    folder.write("shop.py", SHOP.format(ledger=server.url, more=', retention="100ms", redelivery="100ms"'))
    assert server.command("CONFIG", "SET", "maxmemory", "1kb").startswith("+OK")
    return folder


def test_keys_can_be_pruned(full):
    total = 0

    def is_pruned() -> bool:
        nonlocal total
        pruned = full.keywise("prune", "--json")
        assert (pruned.status, pruned.err) == (0, "")
        total += pruned.json["pruned"]
        return total == 3

    until(is_pruned, "all keys to be old enough")


def test_dead_letters_can_be_dropped(full):
    dropped = full.keywise("dead", "drop", "--all", "--yes", "--json")
    assert (dropped.status, dropped.err, dropped.json) == (0, "", {"dropped": 2})
    assert full.keywise("dead", "list", "--json").json == {"dead": 0, "letters": []}


def test_a_pipeline_that_is_new_can_be_opened(server):
    server.command("CONFIG", "SET", "maxmemory", "1kb")

    async def story() -> None:
        async with RedisLedger(RedisDatabase(server.url), "new", LedgerPolicy()) as ledger:
            assert (await ledger.counts()).keys == 0

    run(story())


def test_a_chore_that_frees_memory_has_its_turn_and_a_probe_does_not_get_through(server):
    """Else a ledger that refuses claims would count as being back."""

    async def story() -> None:
        async with RedisLedger(RedisDatabase(server.url), "new", LedgerPolicy()) as ledger:
            assert await ledger.control_store.acquire("probe", 0.0) and await ledger.control_store.acquire("probe", 0.0)
            server.command("CONFIG", "SET", "maxmemory", "1kb")
            assert await ledger.control_store.acquire("prune", 60.0)
            with pytest.raises(UnavailableError, match="maxmemory"):
                await ledger.control_store.acquire("probe", 0.0)

    run(story())
