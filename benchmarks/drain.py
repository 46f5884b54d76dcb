"""One timed drain in a process of its own: fills a queue, drains it, checks the table, and prints one JSON line."""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks import keywise_sqlite, raw_sqlite, workload


class Job(msgspec.Struct, frozen=True):
    """What is drained, and how."""

    changes: int
    keys: int
    batch: int
    distribution: str = "uniform"

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        return [word for name, value in msgspec.structs.asdict(self).items() for word in (f"--{name}", str(value))]


class Drained(msgspec.Struct, frozen=True):
    """How it went."""

    changes_per_s: float
    cpu_us_per_change: float
    calls: int = 0
    """How often a handler was called."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DRAINS))
    add_job_arguments(parser)
    parser.add_argument("--folder", type=Path, help="where the database is made; a temporary folder unless given")
    options = parser.parse_args()
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        elapsed_s, cpu_s, found = DRAINS[options.what](job, bodies, Path(folder))
    assert found == workload.newest(bodies), "the table does not hold the newest versions"
    print(msgspec.json.encode(Drained(job.changes / elapsed_s, 1e6 * cpu_s / job.changes)).decode())


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--distribution", choices=["uniform", "zipf"], default="uniform")


Timed = tuple[float, float, dict[str, int]]
"""Seconds by the clock on the wall, seconds of CPU, and the versions in the table."""


def drain_raw(job: Job, bodies: list[bytes], folder: Path) -> Timed:
    with closing(raw_sqlite.connect(folder / "raw.db")) as connection:
        connection.executescript(raw_sqlite.SCHEMA)
        raw_sqlite.send(connection, bodies)
        started, cpu = time.perf_counter(), time.process_time()
        while raw_sqlite.drain_batch(connection, job.batch):
            pass
        return time.perf_counter() - started, time.process_time() - cpu, raw_sqlite.stored(connection)


def drain_keywise(job: Job, bodies: list[bytes], folder: Path) -> Timed:
    async def drain() -> keywise_sqlite.Finish:
        # The sender stays open, so that both sides drain with the connection that has filled the queue.
        async with keywise_sqlite.app_in(folder, job.batch) as app:
            await app.send(keywise_sqlite.PIPELINE, *bodies)
            return await keywise_sqlite.drain(app, job.changes)

    finish = asyncio.run(drain())
    return finish.elapsed_s, finish.cpu_s, keywise_sqlite.stored(folder)


DRAINS: dict[str, Callable[[Job, list[bytes], Path], Timed]] = {"raw": drain_raw, "keywise": drain_keywise}

if __name__ == "__main__":
    main()
