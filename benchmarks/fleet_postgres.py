"""Some workers that drain one queue together; each is a process, and prints one JSON line when it is told to stop."""

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import msgspec

from benchmarks import workload
from benchmarks.drain_postgres import PIPELINE, app_on, stored, vacuum
from benchmarks.machine import ROOT
from keywise.core.events import BatchClosed, Event, Started

LOOK_S = 0.02


class Shift(msgspec.Struct):
    """What one worker did, by the clock that all processes share."""

    started: float = 0.0
    ended: float = 0.0
    changes: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = time.monotonic()
        elif isinstance(event, BatchClosed):
            self.ended = time.monotonic()
            self.changes += event.changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--batch", type=int, default=1000)
    options = parser.parse_args()
    shift = Shift()
    app = app_on(options.url, options.batch)
    app.observers.append(shift)
    asyncio.run(app.run())
    print(msgspec.json.encode(shift).decode())


def drain_by(workers: int, bodies: list[bytes], url: str, batch: int) -> tuple[float, list[Shift]]:
    """Changes per second from the first worker's start to the last commit."""
    asyncio.run(_fill(bodies, url))
    command = [sys.executable, "-m", "benchmarks.fleet_postgres", "--url", url, "--batch", str(batch)]
    with contextlib.ExitStack() as stack:
        fleet = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            for _ in range(workers)
        ]
        try:
            asyncio.run(_until_drained(url))
        finally:
            for process in fleet:
                process.send_signal(signal.SIGTERM)
        shifts = [msgspec.json.decode(process.communicate()[0], type=Shift) for process in fleet]
    assert asyncio.run(stored(url)) == workload.newest(bodies), "the table does not hold the newest versions"
    busy = [shift for shift in shifts if shift.changes]
    elapsed_s = max(shift.ended for shift in busy) - min(shift.started for shift in busy)
    return len(bodies) / elapsed_s, shifts


async def _fill(bodies: list[bytes], url: str) -> None:
    async with app_on(url) as app:
        await app.send(PIPELINE, *bodies)
    await vacuum(url)


async def _until_drained(url: str) -> None:
    app = app_on(url)
    async with app.open(PIPELINE, work=False) as pipeline:
        [(_, source)] = pipeline.sources
        while await source.depth():  # noqa: ASYNC110 - another process drains it
            await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    main()
