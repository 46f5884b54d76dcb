"""One timed drain on Postgres in a process of its own: fills a queue, drains it, checks the table, prints one line."""

import argparse
import asyncio
import time

import asyncpg
import msgspec

import keywise
from benchmarks import keywise_sqlite, raw_postgres, workload
from benchmarks.drain import Drained, Job, add_job_arguments

PIPELINE = "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DRAINS))
    parser.add_argument("--url", required=True, help="an empty database")
    add_job_arguments(parser)
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    elapsed_s, cpu_s = asyncio.run(DRAINS[options.what](job, bodies, options.url))
    assert asyncio.run(stored(options.url)) == workload.newest(bodies), "the table does not hold the newest versions"
    print(msgspec.json.encode(Drained(job.changes / elapsed_s, 1e6 * cpu_s / job.changes)).decode())


async def drain_raw(job: Job, bodies: list[bytes], url: str) -> tuple[float, float]:
    connection = await raw_postgres.connect(url)
    await connection.execute(raw_postgres.SCHEMA)
    await raw_postgres.send(connection, bodies)
    await connection.execute("vacuum analyze queue")
    started, cpu = time.perf_counter(), time.process_time()
    while await raw_postgres.drain_batch(connection, job.batch):
        pass
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    await connection.close()
    return elapsed_s, cpu_s


async def drain_keywise(job: Job, bodies: list[bytes], url: str) -> tuple[float, float]:
    async with app_on(url, job.batch) as app:
        await app.send(PIPELINE, *bodies)
        connection = await asyncpg.connect(url)
        await connection.execute("vacuum analyze keywise_ready")
        await connection.close()
        finish = await keywise_sqlite.drain(app, job.changes)
    return finish.elapsed_s, finish.cpu_s


def app_on(url: str, batch: int = 1000) -> keywise.App:
    """An app as a user would write it."""
    app = keywise.App(url)
    pipeline = app.pipeline(PIPELINE, key="content_id", version="payload_version", batch_max=batch)
    pipeline.source(url).sink(f"{url}?table=pages")
    return app


async def stored(url: str) -> dict[str, int]:
    """The version of each key that the table holds."""
    connection = await asyncpg.connect(url)
    try:
        return dict(await connection.fetch("select key, version from pages"))
    finally:
        await connection.close()


DRAINS = {"raw": drain_raw, "keywise": drain_keywise}

if __name__ == "__main__":
    main()
