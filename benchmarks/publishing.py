"""The processes of the publishing measurements: a worker, a producer, and the design that keywise grew from.

Each prints one JSON line. A document counts from the moment when it was due to be published.
"""

import argparse
import asyncio
import time
from typing import Any

import asyncpg
import msgspec
import redis.asyncio

import keywise
from benchmarks import keywise_sqlite, workload
from benchmarks.drain import Drained
from benchmarks.latency import READY, Schedule
from benchmarks.peers.locks import Locks
from benchmarks.peers.store import UPSERT
from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.events import Event, Settled, Started

LIVE, RESYNC, DRAIN = "published", "resync", "drain"
SIDE_BY_SIDE = 16


class Place(msgspec.Struct, frozen=True):
    """Where everything is, and how much of it there is."""

    broker: str
    redis: str = ""
    postgres: str = ""
    index: str = ""
    live: int = 0
    rate: int = 100
    changes: int = 0
    keys: int = 0
    batch: int = 1000

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]


class Document(msgspec.Struct):
    """A live one has a number from 0, one of the resync has -1."""

    content_id: str
    payload_version: int
    document_type: str
    number: int
    text: str = workload.TEXT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=sorted(ACTS))
    parser.add_argument("place", help="as JSON")
    options = parser.parse_args()
    told = asyncio.run(ACTS[options.act](msgspec.json.decode(options.place, type=Place)))
    if options.act != "work":  # Nobody listens to it any more.
        print(msgspec.json.encode(told).decode(), flush=True)


def app_at(place: Place) -> keywise.App:
    """Events and a resync into a search index; the ledger is in Redis."""
    app = keywise.App(place.redis)
    search = app.pipeline("search", key="content_id", version="payload_version")
    search.source(f"{place.broker}?queue={LIVE}").source(f"{place.broker}?queue={RESYNC}", lane="bulk")
    search.sink(place.index)
    return app


async def work(place: Place) -> None:
    """Until it is told to stop."""
    app = app_at(place)
    app.observers.append(_ready)
    await app.run()


async def resync(place: Place) -> None:
    await _declare(place, LIVE, RESYNC)
    documents = (Document(f"page-{number}", 1, "guide", -1) for number in range(place.changes))
    async with RabbitSource(Broker(place.broker), RESYNC) as source:
        await source.send([msgspec.json.encode(document) for document in documents])


async def publish(place: Place) -> list[float]:
    """When each live document was due."""
    documents = [Document(f"live-{number}", 2, "news", number) for number in range(place.live)]
    schedule = Schedule([msgspec.json.encode(document) for document in documents], place.rate)
    async with RabbitSource(Broker(place.broker), LIVE) as source:
        for wait_s, bodies in schedule.sends():
            if bodies:
                await source.send(bodies)
            else:
                await asyncio.sleep(wait_s)
    return schedule.due


async def drain(place: Place) -> Drained:
    """RabbitMQ to a table beside the ledger, in Postgres."""
    app = keywise.App(place.postgres)
    pages = app.pipeline(keywise_sqlite.PIPELINE, key="content_id", version="payload_version", batch_max=place.batch)
    pages.source(f"{place.broker}?queue={DRAIN}").sink(f"{place.postgres}?table=pages")
    async with app:
        finish = await keywise_sqlite.drain(app, place.changes, counted=Settled)
    return Drained(place.changes / finish.elapsed_s, 1e6 * finish.cpu_s / place.changes)


async def drain_with_locks(place: Place) -> Drained:
    """A lock and the latest version of each key in Redis, message by message; the source is the same."""
    pool = await asyncpg.create_pool(place.postgres, min_size=SIDE_BY_SIDE, max_size=SIDE_BY_SIDE)
    await pool.execute("create table pages (key text primary key, version bigint, body text)")
    client: Any = redis.asyncio.Redis.from_url(place.redis)
    waiting: asyncio.Queue[Any] = asyncio.Queue(100)
    async with RabbitSource(Broker(place.broker), DRAIN, prefetch=100) as source:
        worker = _Locking(source, client, pool, place.changes)
        started, cpu = time.perf_counter(), time.process_time()
        workers = [asyncio.create_task(worker.handle_all(waiting)) for _ in range(SIDE_BY_SIDE)]
        while worker.left:
            for delivery in await source.receive(100, 0.1):
                await waiting.put(delivery)
        elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        for one in workers:
            one.cancel()
    await client.aclose()
    await pool.close()
    return Drained(place.changes / elapsed_s, 1e6 * cpu_s / place.changes)


class _Locking:
    """Takes messages and brings them to an end, some side by side."""

    def __init__(self, source: RabbitSource, client: Any, pool: Any, changes: int) -> None:
        self.left = changes
        self._source = source
        self._locks = Locks(client)
        self._pool = pool

    async def handle_all(self, waiting: "asyncio.Queue[Any]") -> None:
        while True:
            delivery = await waiting.get()
            await self._handle(delivery.body)
            await self._source.ack([delivery])
            self.left -= 1

    async def _handle(self, body: bytes) -> None:
        change = workload.decode(body)
        key, version = change.content_id, change.payload_version
        await self._locks.write_newer(key, version, lambda: self._pool.execute(UPSERT, key, version, body.decode()))


async def fill(place: Place) -> None:
    await _declare(place, DRAIN)
    async with RabbitSource(Broker(place.broker), DRAIN) as source:
        await source.send(workload.changes(place.changes, place.keys))


async def _declare(place: Place, *queues: str) -> None:
    link = BrokerLink(Broker(place.broker), "declaring")
    channel = await link.channel()
    for queue in queues:
        await channel.ask("queue_declare", queue=queue, durable=True)
    await link.close()


def _ready(event: Event) -> None:
    if isinstance(event, Started) and event.source.endswith(RESYNC):
        print(READY, flush=True)


ACTS = {
    "work": work,
    "resync": resync,
    "publish": publish,
    "fill": fill,
    "drain": drain,
    "locks": drain_with_locks,
}

if __name__ == "__main__":
    main()
