"""One timed ingest of announced objects in a process of its own: announces them, reads all, and checks the table."""

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from obstore.store import S3Store

import keywise
from benchmarks import keywise_sqlite, object_workload, raw_objects
from benchmarks.drain import Drained
from benchmarks.drain_postgres import vacuum
from keywise.adapters.sqs.service import sqs_service
from keywise.adapters.sqs.source import REQUESTS, SqsSource
from keywise.core.events import Settled

PIPELINE = "bench"
ACCOUNT = "000000000000"
BATCH = 100
"""Small objects of one transaction: as many as keywise takes together."""
COUNT = "select count(*), count(distinct object) from records"

Timed = tuple[float, float]
"""Seconds by the clock on the wall, and seconds of CPU."""


class ObjectJob(msgspec.Struct, frozen=True):
    """Which objects are read, and from where."""

    objects: int
    records: int
    """Of all objects together."""
    folder: str
    """Where the files are."""
    url: str = ""
    """An empty Postgres database."""
    sqs: str = ""
    """A server that speaks SQS; the queue is in Postgres if there is none."""
    s3: str = ""
    """A server that speaks S3 and has the objects; they are read from the folder if there is none."""

    @property
    def queue(self) -> str:
        """A queue in SQS for each run, because the long polls of the run before may take messages and drop them."""
        return self.url.rpartition("/")[2]

    def paths(self) -> list[Path]:
        """The large objects."""
        return sorted(Path(self.folder).iterdir())

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value != ""}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(INGESTS))
    for field in msgspec.structs.fields(ObjectJob):
        parser.add_argument(f"--{field.name}", type=field.type, default="" if field.type is str else 0)
    options = vars(parser.parse_args())
    ingest, job = INGESTS[options.pop("what")], ObjectJob(**options)
    elapsed_s, cpu_s = asyncio.run(ingest(job))
    print(msgspec.json.encode(Drained(job.objects / elapsed_s, 1e6 * cpu_s / job.objects)).decode())


async def small_bare(job: ObjectJob) -> Timed:
    """Queue, ledger-free table and files: one connection, one transaction for each batch."""
    connection = await asyncpg.connect(job.url)
    await connection.execute(raw_objects.SCHEMA)
    rows = [(name.encode(),) for name in object_workload.small_names(job.objects)]
    await connection.copy_records_to_table("queue", columns=["body"], records=rows)
    await connection.execute("vacuum analyze")
    started, cpu = time.perf_counter(), time.process_time()
    while await raw_objects.drain_postgres(connection, Path(job.folder), BATCH):
        pass
    timed = time.perf_counter() - started, time.process_time() - cpu
    await connection.close()
    await _check(job)
    return timed


async def small_keywise(job: ObjectJob) -> Timed:
    names = object_workload.small_names(job.objects)
    return await _ingested(_app_of_files(job, job.url), job, [f"file://{job.folder}/{name}".encode() for name in names])


async def sqs_bare(job: ObjectJob) -> Timed:
    """As many loops side by side as the source of keywise has requests, each with ten messages at a time."""
    queue, left = f"{job.sqs}/{ACCOUNT}/{job.queue}", job.objects
    await _announce(job)
    config = AioConfig(max_pool_connections=2 * REQUESTS, parameter_validation=False)
    store = S3Store(object_workload.BUCKET, endpoint=job.s3, region="us-east-1", client_options={"allow_http": True})
    made = get_session().create_client("sqs", region_name="us-east-1", endpoint_url=job.sqs, config=config)
    async with made as client, asyncpg.create_pool(job.url, min_size=REQUESTS, max_size=REQUESTS) as pool:
        await pool.execute(raw_objects.SCHEMA)

        async def take() -> None:
            nonlocal left
            while left > 0:
                done = await raw_objects.drain_sqs(client, queue, store, pool)
                left -= done

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(take() for _ in range(REQUESTS)))
        timed = time.perf_counter() - started, time.process_time() - cpu
    await _check(job)
    return timed


async def sqs_keywise(job: ObjectJob) -> Timed:
    await _announce(job)
    app = keywise.App(job.url)
    pipeline = app.objects(PIPELINE, store=f"s3://{object_workload.BUCKET}?endpoint={job.s3}", format="ndjson")
    queue = f"sqs://{job.sqs.partition('//')[2]}/{ACCOUNT}/{job.queue}?tls=off"
    pipeline.source(queue, dialect="s3").sink(f"{job.url}?table=records")
    return await _ingested(app, job, [])


async def large_bare(job: ObjectJob) -> Timed:
    """All objects side by side, each streamed into the table by a connection of its own."""
    async with asyncpg.create_pool(job.url, min_size=job.objects, max_size=job.objects) as pool:
        await pool.execute(raw_objects.SCHEMA)
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(raw_objects.write_large(pool, path) for path in job.paths()))
        timed = time.perf_counter() - started, time.process_time() - cpu
    await _check(job)
    return timed


async def large_keywise(job: ObjectJob) -> Timed:
    app = _app_of_files(job, job.url)
    return await _ingested(app, job, [f"file://{path}".encode() for path in job.paths()])


async def large_sqlite(job: ObjectJob) -> Timed:
    """Queue, ledger and table in one SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/keywise.db"
        async with _app_of_files(job, f"sqlite:///{quote(database)}") as app:
            await app.send(PIPELINE, *(f"file://{path}".encode() for path in job.paths()))
            finish = await keywise_sqlite.drain(app, job.objects, counted=Settled)
        with closing(sqlite3.connect(database)) as connection:
            _compare(job, *connection.execute(COUNT).fetchone())
    return finish.elapsed_s, finish.cpu_s


def _app_of_files(job: ObjectJob, url: str) -> keywise.App:
    """An app as a user would write it."""
    app = keywise.App(url)
    pipeline = app.objects(PIPELINE, store=f"file://{job.folder}", format="ndjson")
    pipeline.source(url, dialect="uri").sink(f"{url}?table=records")
    return app


async def _ingested(app: keywise.App, job: ObjectJob, bodies: list[bytes]) -> Timed:
    async with app:
        if bodies:
            await app.send(PIPELINE, *bodies)
        await vacuum(job.url)
        finish = await keywise_sqlite.drain(app, job.objects, counted=Settled)
    await _check(job)
    return finish.elapsed_s, finish.cpu_s


async def _announce(job: ObjectJob) -> None:
    async with get_session().create_client("sqs", region_name="us-east-1", endpoint_url=job.sqs) as client:
        await client.create_queue(QueueName=job.queue)
    names = object_workload.small_names(job.objects)
    bodies = [object_workload.s3_notification(name, number) for number, name in enumerate(names)]
    async with SqsSource(sqs_service("bench", job.sqs, "us-east-1"), job.queue, ACCOUNT) as source:
        await source.send(bodies)


async def _check(job: ObjectJob) -> None:
    connection = await asyncpg.connect(job.url)
    found = await connection.fetchrow(COUNT)
    await connection.close()
    _compare(job, *found)


def _compare(job: ObjectJob, records: int, objects: int) -> None:
    assert (records, objects) == (job.records, job.objects), f"the table has {records} records of {objects} objects"


INGESTS: dict[str, Callable[[ObjectJob], Coroutine[Any, Any, Timed]]] = {
    "small_bare": small_bare,
    "small_keywise": small_keywise,
    "sqs_bare": sqs_bare,
    "sqs_keywise": sqs_keywise,
    "large_bare": large_bare,
    "large_keywise": large_keywise,
    "large_sqlite": large_sqlite,
}

if __name__ == "__main__":
    main()
