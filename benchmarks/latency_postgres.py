"""The two processes of a latency measurement on Postgres: one sends at a steady rate, one works; see latency.py."""

import argparse
import asyncio
import time

import msgspec

from benchmarks import keywise_sqlite, raw_postgres, workload
from benchmarks.drain_postgres import PIPELINE, app_on
from benchmarks.latency import POLL_S, READY, Commits, Schedule, noting

LOOK = "select exists (select 1 from queue)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["send", "work"])
    parser.add_argument("what", choices=["raw", "keywise"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--keys", type=int, help="a quarter of the messages unless given")
    parser.add_argument("--from-version", type=int, default=0, help="all versions are above this one")
    options = parser.parse_args()
    if options.act == "work":
        work = work_raw if options.what == "raw" else work_keywise
        print(msgspec.json.encode(asyncio.run(work(options.messages, options.url))).decode())
        return
    keys = options.keys or max(1, options.messages // 4)
    schedule = Schedule(workload.changes(options.messages, keys, above=options.from_version), options.rate)
    asyncio.run((send_raw if options.what == "raw" else send_keywise)(schedule, options.url))
    print(msgspec.json.encode(schedule.due).decode())


async def send_raw(schedule: Schedule, url: str) -> None:
    connection = await raw_postgres.connect(url)
    for wait_s, bodies in schedule.sends():
        if bodies:
            await raw_postgres.send(connection, bodies)
        else:
            await asyncio.sleep(wait_s)
    await connection.close()


async def send_keywise(schedule: Schedule, url: str) -> None:
    async with app_on(url) as app:
        await app.send(PIPELINE)  # Connects, as the raw loop has done by now.
        for wait_s, bodies in schedule.sends():
            if bodies:
                await app.send(PIPELINE, *bodies)
            else:
                await asyncio.sleep(wait_s)


async def work_raw(messages: int, url: str) -> Commits:
    commits: Commits = []
    connection = await raw_postgres.connect(url)
    await connection.execute(raw_postgres.SCHEMA)
    print(READY, flush=True)
    while messages > 0:
        done = await raw_postgres.drain_batch(connection, 1000) if await connection.fetchval(LOOK) else 0
        if done == 0:
            await asyncio.sleep(POLL_S)
            continue
        commits.append((time.monotonic(), done))
        messages -= done
    await connection.close()
    return commits


async def work_keywise(messages: int, url: str) -> Commits:
    commits: Commits = []
    async with app_on(url) as app:
        await keywise_sqlite.drain(app, messages, noting(commits))
    return commits


if __name__ == "__main__":
    main()
