"""One large object from a server into a handler that only counts, in a process of its own whose memory is measured."""

import argparse
import asyncio
import resource
import tempfile
from typing import Any
from urllib.parse import quote

import msgspec

import keywise
from benchmarks import keywise_sqlite
from benchmarks.generated_object import NAME
from benchmarks.object_workload import BUCKET
from keywise.core.events import Settled

PIPELINE = "bench"


class PeakMemory(msgspec.Struct, frozen=True):
    """How the object was read."""

    elapsed_s: float
    records: int
    peak_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", required=True, help="the URL of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{quote(folder)}/keywise.db"
        print(msgspec.json.encode(asyncio.run(counted(options.s3, url))).decode())


async def counted(s3: str, url: str) -> PeakMemory:
    """Count the records of the object; queue and ledger are at the URL."""
    app = keywise.App(url)
    store = f"s3://{BUCKET}?endpoint={s3}&anonymous=true&region=us-east-1"
    pipeline = app.objects(PIPELINE, store=store, format="ndjson").source(url, dialect="uri")
    records = 0

    @pipeline.apply
    async def count(some: list[keywise.Record[Any]]) -> None:
        nonlocal records
        records += len(some)

    async with app:
        await app.send(PIPELINE, f"s3://{BUCKET}/{NAME}".encode())
        finish = await keywise_sqlite.drain(app, 1, counted=Settled)
    # The kernel counts in KiB.
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return PeakMemory(finish.elapsed_s, records, peak_mb)


if __name__ == "__main__":
    main()
