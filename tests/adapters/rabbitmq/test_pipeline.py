"""From RabbitMQ to a table in SQLite: the table ends exact, under duplicates, disorder and cut connections."""

import asyncio
import random
import sqlite3
from pathlib import Path

import msgspec
import pytest

import keywise
from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import owner
from adapters.rabbitmq.waiting import left_in, until
from keywise.core.events import Event
from running import run
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "100ms", "evict_delay": "200ms"}


class Shop:
    """An app that keeps what a queue says, as its users see it."""

    def __init__(self, folder: Path, queue: str, url: str = "", **options: object) -> None:
        self.events: list[Event] = []
        self.file, self.queue = folder / "shop.db", queue
        self.app = keywise.App(f"sqlite:///{self.file}", observers=[self.events.append])
        pipeline = self.app.pipeline(
            "stock", key="key", version="version", deleted={"gone": [True]}, **(QUICK | options)
        )
        pipeline.source(url or f"{shared.rabbitmq().url}?queue={queue}").sink(f"sqlite:///{self.file}?table=stock")

    def content(self) -> dict[str, int]:
        with sqlite3.connect(self.file) as connection:
            return dict(connection.execute("select key, version from stock").fetchall())

    async def is_drained(self) -> bool:
        return await left_in(self.queue, 0)


def history(seed: int, keys: int, versions: int) -> tuple[list[bytes], dict[str, int]]:
    """Messages in disorder, one in five twice, and what the table has to show in the end."""
    rng = random.Random(seed)
    told = [
        {"key": f"k{key}", "version": version, "gone": rng.random() < 0.2}
        for key in range(keys)
        for version in range(1, versions + 1)
    ]
    truth = {one["key"]: one["version"] for one in told if one["version"] == versions and not one["gone"]}
    bodies = [msgspec.json.encode(one) for one in told]
    bodies += rng.sample(bodies, len(bodies) // 5)
    rng.shuffle(bodies)
    return bodies, truth


def test_the_table_ends_exact_under_duplicates_disorder_and_cuts(tmp_path: Path):
    bodies, truth = history(seed=7, keys=100, versions=20)

    async def story() -> None:
        async with owner(shared.rabbitmq().url) as they:
            queue = await they.declare(fresh("stock"))
            shop = Shop(tmp_path, queue, prefetch=1000, batch_max=100)
            await they.publish(queue, *bodies[:1200])
        async with shop.app:
            work = asyncio.create_task(shop.app.run(handle_signals=False))
            await until(lambda: shop.file.exists() and shop.events)
            await asyncio.to_thread(shared.rabbitmq().cut_connections)
            async with owner(shared.rabbitmq().url) as they:
                await they.publish(queue, *bodies[1200:])
            await until(shop.is_drained)
            shop.app.stop()
            await work
        assert shop.content() == truth

    run(story(), limit_s=60)


def test_a_dead_letter_keeps_body_and_headers(tmp_path: Path):
    async def story() -> None:
        async with owner(shared.rabbitmq().url) as they:
            queue = await they.declare(fresh("bad"))
            await they.publish(queue, b"no json", headers={"sender": "cms"}, timestamp=1_700_000_000)
        shop = Shop(tmp_path, queue)
        async with shop.app:
            work = asyncio.create_task(shop.app.run(handle_signals=False))
            async with shop.app.open("stock", work=False) as pipeline:

                async def is_buried() -> bool:
                    return (await pipeline.admin.counts()).dead == 1

                await until(is_buried)
                [(_, _, letter)] = await pipeline.admin.dead_letters(10)
            shop.app.stop()
            await work
        assert (letter.body, letter.headers, letter.sent_at) == (b"no json", {"sender": "cms"}, 1_700_000_000.0)

    run(story())
