"""Object ingest: small and large objects beside bare loops that read and insert the same records, and memory."""

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
import obstore
from aiobotocore.session import get_session
from obstore.store import S3Store

from benchmarks import object_workload
from benchmarks.drain import Drained
from benchmarks.drain_objects import ObjectJob
from benchmarks.figure import Figure, Scale
from benchmarks.generated_object import generated_object
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_postgres import durable_server
from benchmarks.memory_objects import PeakMemory
from benchmarks.object_workload import BUCKET, LARGE_RECORD_BYTES, SMALL_RECORDS

sys.path.insert(0, str(ROOT / "tests"))

from servers import seaweedfs
from servers.elasticmq import elasticmq_server
from servers.machine import MissingServerError
from servers.postgres import PostgresServer
from servers.seaweedfs import seaweedfs_server

SMALL_PER_S, SQS_PER_S, SQS_RATIO, LARGE_RATIO, MEMORY_MB = 1_000, 500, 0.8, 0.7, 200
SEED_PER_S = 50
"""Messages a second: the limit of the design that object ingest grew from."""
LARGE_OBJECTS = 4
PUTS_AT_ONCE = 16
Turns = dict[str, list[Drained]]


def measure(scale: Scale) -> list[Figure]:
    """On a durable Postgres with the settings that it comes with; objects are files, or in SeaweedFS."""
    try:
        with durable_server() as server, tempfile.TemporaryDirectory() as folder:
            return [
                *_small(scale, server, Path(folder)),
                *_sqs(scale, server),
                *_large(scale, server, Path(folder)),
                *_memory(scale),
            ]
    except MissingServerError as error:
        return [Figure("small objects, keywise", None, "objects/s", str(error), at_least=SMALL_PER_S)]


def ingested(server: PostgresServer, what: str, job: ObjectJob) -> Drained:
    """One ingest in a fresh process and a fresh database."""
    url = server.create_database(f"objects_{next(_databases)}")
    arguments = [what, *msgspec.structs.replace(job, url=url).arguments()]
    return msgspec.convert(run_module("benchmarks.drain_objects", arguments), Drained)


_databases = count()


def _small(scale: Scale, server: PostgresServer, folder: Path) -> list[Figure]:
    object_workload.write_small(folder / "small", scale.objects)
    job = ObjectJob(scale.objects, scale.objects * SMALL_RECORDS, str(folder / "small"))
    turns, others = _by_turns(scale, server, ("small_bare", "small_keywise"), job)
    bare, keywise = _medians(turns)
    return [
        Figure("small objects, bare loop", bare.changes_per_s, "objects/s", _cpu(bare)),
        Figure(
            "small objects, keywise",
            keywise.changes_per_s,
            "objects/s",
            f"1 KiB, ten records; files, queue and table in Postgres; {_cpu(keywise)}; the seed: {SEED_PER_S}",
            at_least=SMALL_PER_S,
            detail={"job": job, "turns": turns, "others": others},
        ),
        Figure("small objects, keywise / bare loop", *_ratio(turns)),
    ]


def _sqs(scale: Scale, server: PostgresServer) -> list[Figure]:
    os.environ |= {"AWS_ACCESS_KEY_ID": seaweedfs.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": seaweedfs.SECRET_KEY}
    with elasticmq_server() as queues, seaweedfs_server() as store:
        asyncio.run(_put(store.url, scale.objects))
        job = ObjectJob(scale.objects, scale.objects * SMALL_RECORDS, "", sqs=queues.url, s3=store.url)
        names = ("sqs_bare", "sqs_keywise")
        for what in names:
            ingested(server, what, job)  # The first requests to a fresh JVM take up to a hundred times as long.
        turns, others = _by_turns(scale, server, names, job)
    bare, keywise = _medians(turns)
    ratio, unit, note = _ratio(turns)
    return [
        Figure("small objects from SQS and S3, bare loop", bare.changes_per_s, "objects/s", _cpu(bare)),
        Figure(
            "small objects from SQS and S3, keywise",
            keywise.changes_per_s,
            "objects/s",
            f"ElasticMQ and SeaweedFS; {_cpu(keywise)}; the seed: {SEED_PER_S}",
            at_least=SQS_PER_S,
            detail={"job": job, "turns": turns, "others": others},
        ),
        Figure("small objects from SQS and S3, keywise / bare loop", ratio, unit, note, at_least=SQS_RATIO),
    ]


def _large(scale: Scale, server: PostgresServer, folder: Path) -> list[Figure]:
    records = scale.object_bytes // LARGE_RECORD_BYTES
    object_workload.write_large(folder / "large", LARGE_OBJECTS, records)
    job = ObjectJob(LARGE_OBJECTS, LARGE_OBJECTS * records, str(folder / "large"))
    turns, others = _by_turns(scale, server, ("large_bare", "large_keywise"), job)
    turns["large_sqlite"] = [ingested(server, "large_sqlite", job) for _ in range(scale.rounds)]
    bare, keywise, sqlite = _medians(turns)
    del turns["large_sqlite"]
    ratio, unit, note = _ratio(turns)
    mb = records * LARGE_RECORD_BYTES / 1e6
    about = f"{LARGE_OBJECTS} objects of {mb:,.0f} MB, records of {LARGE_RECORD_BYTES} bytes"
    return [
        Figure("large objects, bare loop", bare.changes_per_s * mb, "MB/s", "side by side, inserts of 10,000 records"),
        Figure("large objects, keywise", keywise.changes_per_s * mb, "MB/s", about),
        Figure(
            "large objects, keywise / bare loop",
            ratio,
            unit,
            note,
            at_least=LARGE_RATIO,
            detail={"job": job, "turns": turns, "others": others},
        ),
        Figure("large objects on SQLite, keywise", sqlite.changes_per_s * mb, "MB/s", about),
    ]


def _memory(scale: Scale) -> list[Figure]:
    size = scale.generated_bytes // LARGE_RECORD_BYTES * LARGE_RECORD_BYTES
    with generated_object(size) as url:
        found = msgspec.convert(run_module("benchmarks.memory_objects", ["--s3", url], limit_s=3600), PeakMemory)
    assert found.records * LARGE_RECORD_BYTES == size, f"the handler got {found.records} records"
    name = f"one object of {size / 2**30:.3g} GiB into a handler"
    return [
        Figure(f"{name}, peak memory", found.peak_mb, "MB", "the whole worker process", at_most=MEMORY_MB),
        Figure(
            f"{name}, speed", size / 1e6 / found.elapsed_s, "MB/s", "the server that generates it takes CPU time too"
        ),
    ]


def _by_turns(scale: Scale, server: PostgresServer, names: Sequence[str], job: ObjectJob) -> tuple[Turns, float]:
    """Run each as often as there are rounds; also return how busy the machine was with other work."""
    turns: Turns = {what: [] for what in names}
    with Bystander() as bystander:
        for turn in range(scale.rounds):
            # Who goes first changes: the disk is still busy with what the one before left behind.
            for what in names if turn % 2 == 0 else reversed(names):
                turns[what].append(ingested(server, what, job))
    return turns, bystander.others


def _medians(turns: Turns) -> list[Drained]:
    return [
        Drained(
            *(statistics.median(getattr(one, name) for one in done) for name in ("changes_per_s", "cpu_us_per_change"))
        )
        for done in turns.values()
    ]


def _ratio(turns: Turns) -> tuple[float, str, str]:
    """The ratio of the medians, its unit, and a note with the ratios of the turns."""
    bare, keywise = ([one.changes_per_s for one in done] for done in turns.values())
    paired = [k / b for b, k in zip(bare, keywise, strict=True)]
    note = f"medians of {len(paired)}, turn by turn {min(paired):.2f} to {max(paired):.2f}"
    return statistics.median(keywise) / statistics.median(bare), "", note


def _cpu(one: Drained) -> str:
    return f"{one.cpu_us_per_change:.0f} µs of CPU an object in the client"


async def _put(url: str, objects: int) -> None:
    async with get_session().create_client("s3", region_name="us-east-1", endpoint_url=url) as client:
        await client.create_bucket(Bucket=BUCKET)
    store = S3Store(BUCKET, endpoint=url, region="us-east-1", client_options={"allow_http": True})
    names = list(enumerate(object_workload.small_names(objects)))

    async def put(some: Sequence[tuple[int, str]]) -> None:
        for number, name in some:
            await obstore.put_async(store, name, object_workload.small_content(number))

    await asyncio.gather(*(put(names[first::PUTS_AT_ONCE]) for first in range(PUTS_AT_ONCE)))
