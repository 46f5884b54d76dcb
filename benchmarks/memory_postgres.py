"""The two processes of a measurement of memory on Postgres: one fills the queue, one calls a handler for each change.

Each change has a key of its own: what a worker keeps of a key that it is done with would add up.
"""

import argparse
import asyncio

import msgspec

import keywise
from benchmarks import keywise_sqlite, workload
from benchmarks.drain_postgres import PIPELINE, handler_app, vacuum
from benchmarks.memory import MemorySamples
from keywise.core.events import Settled

CHUNK = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["send", "work"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--changes", type=int, required=True)
    options = parser.parse_args()
    act = _send if options.act == "send" else _work
    print(msgspec.json.encode(asyncio.run(act(options.url, options.changes))).decode())


async def _send(url: str, changes: int) -> list[float]:
    bodies = workload.once_each(changes)
    async with handler_app(url, _do_nothing) as app:
        for start in range(0, changes, CHUNK):
            await app.send(PIPELINE, *bodies[start : start + CHUNK])
    await vacuum(url)
    return []


async def _work(url: str, changes: int) -> list[float]:
    samples = MemorySamples(changes, Settled)
    async with handler_app(url, _do_nothing) as app:
        await keywise_sqlite.drain(app, changes, samples, counted=Settled)
    return samples.mib


async def _do_nothing(change: keywise.Change[object]) -> None:
    pass


if __name__ == "__main__":
    main()
