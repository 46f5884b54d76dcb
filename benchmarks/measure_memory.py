"""Memory of a consumer over many changes: it must not grow with what has passed through."""

import argparse
import asyncio
import resource
import tempfile
from pathlib import Path

import msgspec

from benchmarks import keywise_sqlite, workload
from benchmarks.figure import Figure, Scale
from benchmarks.machine import run_module
from keywise.core.events import BatchClosed, Event

CHUNK = 50_000
FLAT = 1.05
FILLING = 500_000


def measure(scale: Scale) -> list[Figure]:
    """Resident memory after a tenth of the changes and after all; another process has filled the queue."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--folder", folder, "--changes", str(scale.memory_changes), "--keys", str(scale.keys)]
        run_module("benchmarks.measure_memory", ["send", *arguments])
        samples: list[float] = run_module("benchmarks.measure_memory", ["work", *arguments])
    course = " ".join(f"{sample:.0f}" for sample in samples)
    # A short run does not fill the page caches of SQLite, so its memory still grows.
    target = FLAT if scale.memory_changes >= FILLING else None
    return [
        Figure("memory after 10 % of the changes", samples[0], "MiB", f"{scale.memory_changes:,} changes"),
        Figure("memory after all of them", samples[-1], "MiB", f"every 10 %: {course}"),
        Figure(
            "memory, at the end / half way", samples[-1] / samples[4], "", "caches are full by then", at_most=target
        ),
    ]


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
    samples: list[float] = []
    done = 0

    def sample(event: Event) -> None:
        nonlocal done
        if isinstance(event, BatchClosed):
            done += event.changes
            while done * 10 >= changes * (len(samples) + 1) and len(samples) < 10:
                samples.append(_resident_mib())

    async with keywise_sqlite.app_in(folder) as app:
        await keywise_sqlite.drain(app, changes, sample)
    return samples


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
