"""The whole chain: Cloud Storage publishes to Pub/Sub, which shuffles by itself, and a pipeline reads the objects."""

import asyncio
import json
import random
import sqlite3
from pathlib import Path

import pytest

import keywise
from adapters.pubsub.benches import PROJECT, created, fresh, topic_of
from adapters.pubsub.waiting import until
from running import run
from servers import shared
from servers.fakegcs import FakeGcsServer

pytestmark = [pytest.mark.server("pubsub"), pytest.mark.server("fakegcs")]

CHANGES = 1000
OBJECTS = 40


class Bucket:
    """A bucket that changes at random, and what is in it."""

    def __init__(self, server: FakeGcsServer, name: str) -> None:
        self._server = server
        self._name = name
        self._random = random.Random(7)
        self.content: dict[str, int] = {}
        """By the URI of an object, how many records it has."""

    def change(self) -> None:
        """Put, overwrite or delete an object."""
        name = f"day {self._random.randrange(OBJECTS)}.ndjson"
        uri = f"gs://{self._name}/{name}"
        if uri in self.content and self._random.random() < 0.4:
            self._server.delete(self._name, name)
            del self.content[uri]
            return
        self.content[uri] = records = self._random.randrange(8)
        lines = (json.dumps({"n": n, "of": records}) for n in range(records))
        self._server.put(self._name, name, "".join(f"{line}\n" for line in lines).encode())


def stored(database: Path) -> dict[str, list[tuple[int, str]]]:
    """The rows of each object."""
    found: dict[str, list[tuple[int, str]]] = {}
    with sqlite3.connect(database) as connection:
        for uri, ordinal, body in connection.execute("select object, ordinal, body from logs order by 1, 2"):
            found.setdefault(uri, []).append((ordinal, body))
    return found


def test_a_thousand_changes_of_a_bucket_end_right(tmp_path: Path):
    run(_change_and_compare(tmp_path), limit_s=120)


async def _change_and_compare(tmp_path: Path) -> None:
    server, subscription = shared.fakegcs(), await created(fresh("chain"), ack_deadline_seconds=60)
    name = fresh("chain")
    server.create_bucket(name)
    server.notify(name, topic_of(subscription))
    database = tmp_path / "logs.db"
    app = keywise.App(f"sqlite:///{database}")
    store = f"gs://{name}?endpoint={server.url}&anonymous=true"
    logs = app.objects("logs", store=store, format="ndjson", gone="1s", poll="100ms")
    queue = f"pubsub://{PROJECT}/{subscription}?emulator={shared.pubsub().address}"
    logs.source(queue, dialect="gcs").sink(f"sqlite:///{database}?table=logs")
    working = asyncio.create_task(app.run(handle_signals=False))
    bucket = Bucket(server, name)
    for _ in range(CHANGES):
        await asyncio.to_thread(bucket.change)
    await until(lambda: not shared.pubsub().unacked(topic_of(subscription)))
    app.stop()
    await working
    truth = {
        uri: [(n, json.dumps({"n": n, "of": records})) for n in range(records)]
        for uri, records in bucket.content.items()
        if records
    }
    assert stored(database) == truth
    async with app.open("logs", work=False) as pipeline:
        assert await pipeline.admin.dead_letters(10) == []
