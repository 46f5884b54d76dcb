"""The two processes of a measurement of flow control: one sends live changes at a steady rate, one works.

The worker has a backlog of bulk changes in a second queue, or a hot key with a slow handler among the live ones.
A live change counts from the moment when it was due to be sent. Each process prints one JSON line.
"""

import argparse
import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

import keywise
from benchmarks import workload
from benchmarks.latency import READY, Schedule
from keywise import Change
from keywise.app import PipelineDefinition
from keywise.core import events

PIPELINE, HOT = "flow", "hot"
FILL = 10_000
"""Bulk changes that are sent at once before the measurement."""
BUCKET_S = 0.1
HOT_S = 0.2
"""How long the handler of the hot key takes."""


class Job(msgspec.Struct, frozen=True):
    """What both processes have to know."""

    folder: str
    way: str = "transaction"
    live: int = 1000
    rate: int = 100
    """Live changes a second."""
    bulk: int = 0
    idle_keys: int = 0
    """Live changes go round so many keys; 0 gives each a key of its own."""
    hot_every: int = 0
    """After so many live changes one of the hot key is sent; 0: none."""

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]


class Seen(msgspec.Struct):
    """When the changes were done, by the clock that all processes share."""

    live: list[float]
    """By number."""
    started: float
    bulk: list[tuple[float, int]]
    """Moments, and how many bulk changes were done up to then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["send", "work"])
    parser.add_argument("job", help="as JSON")
    options = parser.parse_args()
    job = msgspec.json.decode(options.job, type=Job)
    told = asyncio.run(send(job) if options.act == "send" else work(job))
    print(msgspec.json.encode(told).decode(), flush=True)


def app_of(job: Job) -> tuple[keywise.App, PipelineDefinition]:
    url = f"sqlite:///{quote(str(Path(job.folder).resolve() / 'flow.db'))}"
    app = keywise.App(url)
    pipeline = app.pipeline(PIPELINE, key="content_id", version="payload_version")
    pipeline.source(url)
    if job.bulk:
        pipeline.source(f"{url}?queue=bulk", lane="bulk")
    if job.way == "transaction":
        pipeline.sink(f"{url}?table=pages")
    return app, pipeline


def bodies_of(job: Job) -> list[bytes]:
    """The live changes by number, with those of the hot key after some of them."""
    keys = [f"live-{number % job.idle_keys if job.idle_keys else number}" for number in range(job.live)]
    return [_body(key, number) for number, key in enumerate(keys)]


async def send(job: Job) -> list[float]:
    """When each live change was due."""
    app, pipeline = app_of(job)
    if job.way != "transaction":
        pipeline.apply(_nothing)
    schedule = Schedule(bodies_of(job), job.rate)
    sent = hot = 0
    async with app:
        for wait_s, bodies in schedule.sends():
            sent += len(bodies)
            while job.hot_every and hot < sent // job.hot_every:
                hot += 1
                bodies = [*bodies, _body(HOT, hot)]  # noqa: PLW2901 - one send, as a producer would
            if bodies:
                await app.send(PIPELINE, *bodies)
            else:
                await asyncio.sleep(wait_s)
    return schedule.due


async def work(job: Job) -> Seen:
    """Fill the backlog, say that it is ready, and work until every live change is done."""
    await _fill(job)
    app, pipeline = app_of(job)
    watch = _Watch(job, app)
    if job.way == "transaction":
        app.observers.append(watch.observe)
    else:
        pipeline.apply(watch.handle)
        app.observers.append(watch.begin)
    await app.run(handle_signals=False)
    return watch.seen()


async def _fill(job: Job) -> None:
    app, pipeline = app_of(job)
    bulk = workload.changes(job.bulk, max(1, job.bulk // 4)) if job.bulk else []
    if job.way != "transaction":
        pipeline.apply(_nothing)
    async with app, app.open(PIPELINE, work=False) as opened:
        for start in range(0, len(bulk), FILL):
            await opened.sources[-1][1].send(bulk[start : start + FILL])


class _Watch:
    """Notes when changes are done, from inside the worker, and ends the work after the last live one."""

    def __init__(self, job: Job, app: keywise.App) -> None:
        self._job, self._app = job, app
        self._live: dict[int, float] = {}
        self._bulk: Counter[int] = Counter()
        self._started = self._started_wall = 0.0

    def begin(self, event: events.Event) -> None:
        if isinstance(event, events.Started) and not self._started:
            self._started, self._started_wall = time.monotonic(), time.time()
            print(READY, flush=True)

    def observe(self, event: events.Event) -> None:
        """In one transaction, a batch is from one queue, and the live queue is first in, first out."""
        self.begin(event)
        if not isinstance(event, events.Settled):
            return
        if event.sent_at > self._started_wall:
            self._done_live(range(len(self._live), len(self._live) + event.changes))
        else:
            self._done_bulk(event.changes)

    async def handle(self, change: Change[Any]) -> None:
        if change.key == HOT:
            await asyncio.sleep(HOT_S)
        elif change.key.startswith("live-"):
            self._done_live([change.version or 0])
        else:
            self._done_bulk(1)

    def seen(self) -> Seen:
        live = [self._live[number] for number in sorted(self._live)]
        done, bulk = 0, []
        for bucket in sorted(self._bulk):
            done += self._bulk[bucket]
            bulk.append(((bucket + 1) * BUCKET_S, done))
        return Seen(live, self._started, bulk)

    def _done_live(self, numbers: "range | list[int]") -> None:
        now = time.monotonic()
        for number in numbers:
            self._live.setdefault(number, now)
        if len(self._live) >= self._job.live:
            self._app.stop()

    def _done_bulk(self, changes: int) -> None:
        self._bulk[int(time.monotonic() / BUCKET_S)] += changes


async def _nothing(change: Change[Any]) -> None:
    """A pipeline that is only sent to needs a target all the same."""


def _body(key: str, version: int) -> bytes:
    return msgspec.json.encode(workload.Body(key, version, "guide", workload.TEXT))


if __name__ == "__main__":
    main()
