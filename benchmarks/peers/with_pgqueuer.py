"""PgQueuer: jobs of one entrypoint, in no order and without a rule for keys, on its asyncpg driver."""

from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import AsyncpgPoolDriver, PgQueuer, Queries
from pgqueuer.models import Job

from benchmarks.peers.entrance import enter
from benchmarks.peers.handler import Writer
from benchmarks.peers.place import Place

AT_ONCE = 1000


async def fill(place: Place) -> None:
    async with asyncpg.create_pool(place.postgres, min_size=1, max_size=2) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()
        bodies = place.bodies()
        for start in range(0, len(bodies), AT_ONCE):
            some = bodies[start : start + AT_ONCE]
            await queries.enqueue(["write"] * len(some), some, [0] * len(some))


async def work(place: Place) -> None:
    batch = int(place.settings["batch_size"])
    async with (
        Writer(place, int(place.settings["connections"])) as writer,
        asyncpg.create_pool(place.postgres, min_size=2, max_size=8) as pool,
    ):
        queue = PgQueuer(AsyncpgPoolDriver(pool))

        async def write(job: Job) -> None:
            assert job.payload is not None
            await writer.write_body(job.payload)

        queue.entrypoint("write")(write)
        tasks = int(place.settings["max_concurrent_tasks"]) or None
        await queue.run(dequeue_timeout=timedelta(seconds=1), batch_size=batch, max_concurrent_tasks=tasks)


if __name__ == "__main__":
    # As its own command line does where uvloop is installed.
    enter(fill, work, uvloop.run)
