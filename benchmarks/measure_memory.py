"""Memory of a consumer over many changes on SQLite, in one transaction for each batch."""

import argparse
import asyncio
import tempfile
from pathlib import Path

import msgspec

from benchmarks import keywise_sqlite, workload
from benchmarks.figure import Figure, Scale
from benchmarks.machine import run_module
from benchmarks.memory import MemorySamples, memory_figures

CHUNK = 50_000


def measure(scale: Scale) -> list[Figure]:
    """Another process fills the queue first."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--folder", folder, "--changes", str(scale.memory_changes), "--keys", str(scale.keys)]
        run_module("benchmarks.measure_memory", ["send", *arguments])
        samples: list[float] = run_module("benchmarks.measure_memory", ["work", *arguments])
    return memory_figures("memory", samples, scale.memory_changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["send", "work"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--changes", type=int, required=True)
    parser.add_argument("--keys", type=int, required=True)
    options = parser.parse_args()
    act = _send if options.act == "send" else _work
    print(msgspec.json.encode(asyncio.run(act(options.folder, options.changes, options.keys))).decode())


async def _send(folder: Path, changes: int, keys: int) -> list[float]:
    bodies = workload.changes(changes, keys)
    async with keywise_sqlite.app_in(folder) as app:
        for start in range(0, changes, CHUNK):
            await app.send(keywise_sqlite.PIPELINE, *bodies[start : start + CHUNK])
    return []


async def _work(folder: Path, changes: int, keys: int) -> list[float]:
    samples = MemorySamples(changes)
    async with keywise_sqlite.app_in(folder) as app:
        await keywise_sqlite.drain(app, changes, samples)
    return samples.mib


if __name__ == "__main__":
    main()
