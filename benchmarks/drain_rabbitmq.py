"""One timed drain of a RabbitMQ queue in a process of its own: fills a queue, takes everything from it, acks it.

The bare loop is the client library's own: the same prefetch, one ack for each batch, nothing else.
"""

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pika

import keywise
from benchmarks import keywise_sqlite, workload
from benchmarks.drain import Drained, Job, add_job_arguments
from keywise.adapters.rabbitmq.broker import Broker, BrokerLink, Channel
from keywise.adapters.rabbitmq.publisher import Publisher
from keywise.adapters.rabbitmq.source import PREFETCH, RabbitSource
from keywise.core.events import Settled

QUEUE = "bench"
WAIT_S = 5.0

Timed = tuple[float, float]
"""Seconds by the clock on the wall, and seconds of CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DRAINS))
    parser.add_argument("--url", required=True, help="of a broker")
    add_job_arguments(parser)
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    elapsed_s, cpu_s = asyncio.run(_drained(DRAINS[options.what], job, bodies, options.url))
    print(msgspec.json.encode(Drained(job.changes / elapsed_s, 1e6 * cpu_s / job.changes)).decode())


async def drain_bare(job: Job, bodies: list[bytes], url: str) -> Timed:
    """Only pika: count what comes, and ack it in batches."""
    link = BrokerLink(Broker(url), "bench")
    channel: Channel = await link.channel()
    await channel.ask("basic_qos", prefetch_count=PREFETCH)
    done: asyncio.Future[Timed] = asyncio.get_running_loop().create_future()
    seen = 0

    def take(raw: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen % job.batch == 0 or seen == job.changes:
            raw.basic_ack(method.delivery_tag, True)
        if seen == job.changes:
            done.set_result((time.perf_counter() - started, time.process_time() - cpu))

    started, cpu = time.perf_counter(), time.process_time()
    await channel.ask("basic_consume", queue=QUEUE, on_message_callback=take)
    timed = await done
    await link.close()
    return timed


async def drain_source(job: Job, bodies: list[bytes], url: str) -> Timed:
    """The source of keywise: deliveries with ids, receipts, times and counts."""
    async with RabbitSource(Broker(url), QUEUE) as source:
        await source.receive(0, 0.0)
        started, cpu, seen = time.perf_counter(), time.process_time(), 0
        while seen < job.changes:
            deliveries = await source.receive(job.batch, WAIT_S)
            await source.ack(deliveries)
            seen += len(deliveries)
        return time.perf_counter() - started, time.process_time() - cpu


async def drain_keywise(job: Job, bodies: list[bytes], url: str) -> Timed:
    """A whole pipeline into a table beside its ledger, in SQLite."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.db"
        app = keywise.App(f"sqlite:///{file}")
        pipeline = app.pipeline(
            keywise_sqlite.PIPELINE, key="content_id", version="payload_version", batch_max=job.batch
        )
        pipeline.source(f"{url}?queue={QUEUE}").sink(f"sqlite:///{file}?table=pages")
        async with app:
            finish = await keywise_sqlite.drain(app, len(bodies), counted=Settled)
        with closing(sqlite3.connect(file)) as connection:
            found = dict(connection.execute("select key, version from pages"))
        assert found == workload.newest(bodies), "the table does not hold the newest versions"
        return finish.elapsed_s, finish.cpu_s


async def _drained(
    drain: Callable[[Job, list[bytes], str], Coroutine[Any, Any, Timed]], job: Job, bodies: list[bytes], url: str
) -> Timed:
    link = BrokerLink(Broker(url), "filling")
    channel = await link.channel()
    await channel.ask("queue_declare", queue=QUEUE, durable=True)
    outlet = Publisher(Broker(url))
    await outlet.publish(QUEUE, [(body, pika.BasicProperties(delivery_mode=2)) for body in bodies])
    await outlet.close()
    timed = await drain(job, bodies, url)
    left = (await channel.ask("queue_declare", queue=QUEUE, passive=True)).method.message_count
    assert left == 0, f"{left} messages are left"
    await link.close()
    return timed


DRAINS: dict[str, Callable[[Job, list[bytes], str], Coroutine[Any, Any, Timed]]] = {
    "bare": drain_bare,
    "source": drain_source,
    "keywise": drain_keywise,
}

if __name__ == "__main__":
    main()
