"""The two processes of a latency measurement: one sends at a steady rate, one works; each prints one JSON line.

A message counts from the moment when it was due to be sent, so a slow send is not forgiven.
The queue is first in, first out, so the number of changes after each commit tells which messages it held.
"""

import argparse
import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks import keywise_sqlite, raw_sqlite, workload
from keywise.core.events import BatchClosed, Event, Observer, Started

READY = "ready"
POLL_S = 0.001
Commits = list[tuple[float, int]]
"""When each commit had ended, and how many changes it held; by the clock that all processes share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["send", "work"])
    parser.add_argument("what", choices=["raw", "keywise"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--rate", type=int, default=500)
    options = parser.parse_args()
    if options.act == "send":
        bodies = workload.changes(options.messages, max(1, options.messages // 4))
        schedule = Schedule(bodies, options.rate)
        if options.what == "raw":
            send_raw(schedule, options.folder)
        else:
            asyncio.run(send_keywise(schedule, options.folder))
        print(msgspec.json.encode(schedule.due).decode())
    elif options.what == "raw":
        print(msgspec.json.encode(work_raw(options.messages, options.folder)).decode())
    else:
        print(msgspec.json.encode(asyncio.run(work_keywise(options.messages, options.folder))).decode())


class Schedule:
    """When each message is due; those that became due during a send go together in the next one."""

    def __init__(self, bodies: list[bytes], rate: int) -> None:
        self.due: list[float] = []
        self._bodies = bodies
        self._rate = rate

    def sends(self) -> Iterator[tuple[float, list[bytes]]]:
        """How long to wait, and then what to send. The time begins here: the sender has connected before."""
        start = time.monotonic() + 0.2
        self.due = [start + number / self._rate for number in range(len(self._bodies))]
        sent = 0
        while sent < len(self.due):
            now = time.monotonic()
            end = sent + sum(1 for due in self.due[sent : sent + 1000] if due <= now)
            yield max(0.0, self.due[sent] - now), self._bodies[sent:end]
            sent = end


def send_raw(schedule: Schedule, folder: Path) -> None:
    with closing(raw_sqlite.connect(folder / "raw.db")) as connection:
        for wait_s, bodies in schedule.sends():
            if bodies:
                raw_sqlite.send(connection, bodies)
            else:
                time.sleep(wait_s)


async def send_keywise(schedule: Schedule, folder: Path) -> None:
    async with keywise_sqlite.app_in(folder) as app:
        await app.send(keywise_sqlite.PIPELINE)  # Connects, as the raw loop has done by now.
        for wait_s, bodies in schedule.sends():
            if bodies:
                await app.send(keywise_sqlite.PIPELINE, *bodies)
            else:
                await asyncio.sleep(wait_s)


def work_raw(messages: int, folder: Path) -> Commits:
    commits: Commits = []
    with closing(raw_sqlite.connect(folder / "raw.db")) as connection:
        connection.executescript(raw_sqlite.SCHEMA)
        # SQLite's own waiting for the lock backs off to 100 ms, and a steady sender would starve the worker.
        connection.execute("pragma busy_timeout = 0")
        print(READY, flush=True)
        while messages > 0:
            done = _drain_if_free(connection)
            if done == 0:
                time.sleep(POLL_S)
                continue
            commits.append((time.monotonic(), done))
            messages -= done
    return commits


def _drain_if_free(connection: sqlite3.Connection) -> int:
    if connection.execute(raw_sqlite.LOOK).fetchone() is None:
        return 0
    try:
        return raw_sqlite.drain_batch(connection, 1000)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        return 0


async def work_keywise(messages: int, folder: Path) -> Commits:
    commits: Commits = []
    async with keywise_sqlite.app_in(folder) as app:
        await keywise_sqlite.drain(app, messages, noting(commits))
    return commits


def noting(commits: Commits) -> Observer:
    """An observer that says when the work begins, and notes each commit."""

    def note(event: Event) -> None:
        if isinstance(event, Started):
            print(READY, flush=True)
        elif isinstance(event, BatchClosed):
            commits.append((time.monotonic(), event.changes))

    return note


if __name__ == "__main__":
    main()
