"""One timed drain on Postgres in a process of its own: fills a queue, drains it, checks the store, prints one line."""

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import msgspec

import keywise
from benchmarks import keywise_sqlite, raw_leased, raw_postgres, workload
from benchmarks.drain import Drained, Job, Timed, add_job_arguments
from keywise.core.events import BatchClosed, Settled

PIPELINE = "bench"
HANDLER_S = 0.001
calls: list[str] = []
"""The keys that a handler was called for."""
CONCURRENCY = 200
"""A handler that waits for 1 ms is worth having so many of at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DRAINS))
    parser.add_argument("--url", required=True, help="an empty database")
    parser.add_argument("--known", action="store_true", help="every key has been written before")
    parser.add_argument("--distinct", action="store_true", help="one change for each key")
    add_job_arguments(parser)
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    if options.distinct:
        bodies = workload.once_each(job.changes)
    else:
        bodies = workload.changes(job.changes, job.keys, job.distribution)
    known = workload.first_of_each(job.keys) if options.known else []
    calls.clear()
    elapsed_s, cpu_s, found = asyncio.run(DRAINS[options.what](job, bodies, known, options.url))
    assert found == workload.newest([*known, *bodies]), "the store does not hold the newest versions"
    print(msgspec.json.encode(Drained(job.changes / elapsed_s, 1e6 * cpu_s / job.changes, len(calls))).decode())


async def drain_raw(job: Job, bodies: list[bytes], known: list[bytes], url: str) -> Timed:
    connection = await raw_postgres.connect(url)
    await connection.execute(raw_postgres.SCHEMA)
    await raw_postgres.send(connection, known)
    while await raw_postgres.drain_batch(connection, job.batch):
        pass
    await raw_postgres.send(connection, bodies)
    await connection.execute("vacuum analyze")
    started, cpu = time.perf_counter(), time.process_time()
    while await raw_postgres.drain_batch(connection, job.batch):
        pass
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    await connection.close()
    return elapsed_s, cpu_s, await stored(url)


async def drain_keywise(job: Job, bodies: list[bytes], known: list[bytes], url: str) -> Timed:
    if known:
        await _drain(app_on(url, job.batch), known, url)
    finish = await _drain(app_on(url, job.batch), bodies, url)
    return finish.elapsed_s, finish.cpu_s, await stored(url)


async def drain_raw_leased(job: Job, bodies: list[bytes], known: list[bytes], url: str) -> Timed:
    connections = [await raw_postgres.connect(url) for _ in range(4)]
    await connections[0].execute(raw_leased.SCHEMA)
    rows = [(body,) for body in bodies]
    await connections[0].copy_records_to_table("ready", columns=["body"], records=rows)
    await connections[0].execute("vacuum analyze")
    for connection in connections:
        await connection.execute(raw_leased.PLANS)
    started, cpu = time.perf_counter(), time.process_time()
    found = await raw_leased.drain(connections, job.batch)
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    for connection in connections:
        await connection.close()
    return elapsed_s, cpu_s, found


async def drain_noop(job: Job, bodies: list[bytes], known: list[bytes], url: str) -> Timed:
    """Each change goes to a handler that does nothing, with the settings that keywise comes with."""
    found: dict[str, int] = {}

    async def handle(change: keywise.Change[Any]) -> None:
        calls.append(change.key)
        assert change.version is not None
        found[change.key] = change.version

    finish = await _drain(handler_app(url, handle), [*known, *bodies], url, counted=Settled)
    return finish.elapsed_s, finish.cpu_s, found


async def drain_leased(job: Job, bodies: list[bytes], known: list[bytes], url: str) -> Timed:
    """Each change goes to a handler that waits for a while, as one that calls another service does."""
    found: dict[str, int] = {}

    async def handle(change: keywise.Change[Any]) -> None:
        await asyncio.sleep(HANDLER_S)
        assert change.version is not None
        found[change.key] = change.version

    app = handler_app(url, handle, batch_max=job.batch, concurrency=CONCURRENCY)
    finish = await _drain(app, [*known, *bodies], url, counted=Settled)
    return finish.elapsed_s, finish.cpu_s, found


async def _drain(
    app: keywise.App, bodies: list[bytes], url: str, counted: type[BatchClosed | Settled] = BatchClosed
) -> keywise_sqlite.Finish:
    async with app:
        await app.send(PIPELINE, *bodies)
        await vacuum(url)
        return await keywise_sqlite.drain(app, len(bodies), counted=counted)


def app_on(url: str, batch: int = 1000) -> keywise.App:
    """An app as a user would write it."""
    app = keywise.App(url)
    pipeline = app.pipeline(PIPELINE, key="content_id", version="payload_version", batch_max=batch)
    pipeline.source(url).sink(f"{url}?table=pages")
    return app


def handler_app(
    url: str, handle: Callable[[keywise.Change[Any]], Coroutine[Any, Any, None]], **options: Any
) -> keywise.App:
    """An app that calls a function for each change, outside of a transaction."""
    app = keywise.App(url)
    app.pipeline(PIPELINE, key="content_id", version="payload_version", **options).source(url).apply(handle)
    return app


async def vacuum(url: str) -> None:
    """As the server does by itself, given time."""
    connection = await asyncpg.connect(url)
    await connection.execute("vacuum analyze")
    await connection.close()


async def stored(url: str) -> dict[str, int]:
    """The version of each key that the table holds."""
    connection = await asyncpg.connect(url)
    try:
        return dict(await connection.fetch("select key, version from pages"))
    finally:
        await connection.close()


DRAINS: dict[str, Callable[[Job, list[bytes], list[bytes], str], Coroutine[Any, Any, Timed]]] = {
    "raw": drain_raw,
    "keywise": drain_keywise,
    "leased": drain_leased,
    "noop": drain_noop,
    "raw_leased": drain_raw_leased,
}

if __name__ == "__main__":
    main()
