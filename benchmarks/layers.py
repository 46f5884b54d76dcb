"""One drain with a stopwatch at every layer, in a process of its own; prints one JSON line."""

import argparse
import asyncio
import functools
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

import keywise
from benchmarks import keywise_sqlite, raw_sqlite, workload
from benchmarks.drain import Job, add_job_arguments
from benchmarks.stopwatch import (
    Stopwatch,
    Watched,
    watched,
    watched_connection,
    watched_selector,
    watched_transaction,
)
from keywise.core.events import BatchClosed, Event, Started
from keywise.flow import transactional
from keywise.flow.coalesce import coalesce
from keywise.flow.consumer import Consumer
from keywise.flow.pipeline import OpenPipeline

IN_TRANSACTION = {"decide": "decide", "mark": "mark", "dead_letter": "mark", "fail": "mark"}
IN_QUEUE = {"receive": "queue read", "ack": "ack", "release": "ack"}
IN_SOURCE = {"arrived": "look", "peek": "queue read"}


class Profile(msgspec.Struct, frozen=True):
    """Microseconds per change in the thread that does the work; the layers add up to all of it."""

    layers: dict[str, float]
    in_sqlite: dict[str, float]
    """Of the time in each layer: inside SQLite."""
    elsewhere: float
    """Inside SQLite in another thread, meanwhile."""
    decode: float
    """What decoding a body costs by itself."""

    @property
    def total(self) -> float:
        return sum(self.layers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["raw", "keywise"])
    add_job_arguments(parser)
    parser.add_argument("--cpu", action="store_true", help="CPU time of the working thread, not time on the wall")
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    drain = drain_raw if options.what == "raw" else drain_keywise
    with tempfile.TemporaryDirectory() as folder:
        profile = drain(job, bodies, Path(folder), Stopwatch(cpu=options.cpu))
    print(msgspec.json.encode(profile).decode())


def drain_raw(job: Job, bodies: list[bytes], folder: Path, stopwatch: Stopwatch) -> Profile:
    """The raw loop has no plugs; its statements say which layer they are."""
    factory = watched_connection(stopwatch, raw_sqlite.LAYERS)
    with closing(raw_sqlite.connect(folder / "raw.db", factory)) as connection:
        connection.executescript(raw_sqlite.SCHEMA)
        raw_sqlite.send(connection, bodies)
        stopwatch.restart()
        while raw_sqlite.drain_batch(connection, job.batch):
            pass
        profile = _profile(stopwatch, bodies, workload.decode)
        assert raw_sqlite.stored(connection) == workload.newest(bodies)
    return profile


def drain_keywise(job: Job, bodies: list[bytes], folder: Path, stopwatch: Stopwatch) -> Profile:
    """keywise is watched at its plugs, and every connection that it opens is watched too."""
    connect = sqlite3.connect
    sqlite3.connect = functools.partial(connect, factory=watched_connection(stopwatch, {}))  # type: ignore[assignment]
    vars(transactional)["coalesce"] = watched(coalesce, stopwatch, "coalesce")
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watched_selector(stopwatch))) as runner:
        profile = runner.run(_drain_watched(job, bodies, folder, stopwatch))
    sqlite3.connect = connect
    assert keywise_sqlite.stored(folder) == workload.newest(bodies)
    return profile


async def _drain_watched(job: Job, bodies: list[bytes], folder: Path, stopwatch: Stopwatch) -> Profile:
    async with keywise_sqlite.app_in(folder, job.batch) as app:
        await app.send(keywise_sqlite.PIPELINE, *bodies)
        async with app.open(keywise_sqlite.PIPELINE) as pipeline:
            reader: Any = pipeline.reader
            route = reader._route
            watch(pipeline, stopwatch)
            consumer = Consumer(pipeline)
            profiles: list[Profile] = []
            left = job.changes

            def finish(event: Event) -> None:
                nonlocal left
                if isinstance(event, Started):
                    stopwatch.restart()
                elif isinstance(event, BatchClosed):
                    left -= event.changes
                    if left <= 0:
                        profiles.append(_profile(stopwatch, bodies, route))
                        consumer.stop()

            pipeline.observers = [*pipeline.observers, keywise.Counters(), finish]
            await consumer.run()
    return profiles[0]


def watch(pipeline: OpenPipeline, stopwatch: Stopwatch) -> None:
    """Put a stopwatch before every plug of the one-transaction way."""
    plugs: Any = pipeline
    ledger, [(name, source)] = plugs.ledger, plugs.sources
    plugs.ledger = Watched(ledger, stopwatch, {})
    plugs.ledger.transaction = lambda: watched_transaction(ledger.transaction(), stopwatch, IN_TRANSACTION)
    plugs.sources = [(name, Watched(source, stopwatch, IN_SOURCE))]
    plugs.sources[0][1].queue_in = lambda connection: Watched(source.queue_in(connection), stopwatch, IN_QUEUE)
    plugs.sink = Watched(plugs.sink, stopwatch, {"write": "sink write"})
    plugs.reader = Watched(plugs.reader, stopwatch, {"read": "decode"})


def _profile(stopwatch: Stopwatch, bodies: list[bytes], decode: Callable[[bytes], object]) -> Profile:
    layers = stopwatch.read()

    def us(seconds: Mapping[str, float]) -> dict[str, float]:
        return {layer: 1e6 * s / len(bodies) for layer, s in seconds.items()}

    in_sqlite, elsewhere_s = us(stopwatch.in_sqlite), stopwatch.elsewhere_s
    started = stopwatch.clock()
    for body in bodies:
        decode(body)
    decode_s = stopwatch.clock() - started
    return Profile(us(layers), in_sqlite, 1e6 * elsewhere_s / len(bodies), 1e6 * decode_s / len(bodies))


if __name__ == "__main__":
    main()
