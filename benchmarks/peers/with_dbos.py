"""DBOS: workflows on a partitioned queue, one at a time per key, in the order they were sent."""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig

from benchmarks import workload
from benchmarks.peers.entrance import enter
from benchmarks.peers.handler import Writer
from benchmarks.peers.place import Place

QUEUE = "pages"


async def fill(place: Place) -> None:
    await asyncio.to_thread(_fill, place)


def _fill(place: Place) -> None:
    _configure(place)
    DBOS.launch()
    DBOS.destroy()
    client = DBOSClient(system_database_url=place.postgres)
    engine = sqlalchemy.create_engine(place.postgres.replace("postgresql:", "postgresql+psycopg:"))
    for bodies in _in_stretches(place.bodies()):
        with engine.begin() as connection:
            for body in bodies:
                key = workload.decode(body).content_id
                options = {"workflow_name": "write", "queue_name": QUEUE, "queue_partition_key": key}
                client.enqueue_in_transaction(connection, options, body.decode())
    engine.dispose()
    client.destroy()


def _in_stretches(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    """A commit for each would take minutes; but DBOS orders by the moment of the transaction, so no key comes twice."""
    stretch: dict[str, bytes] = {}
    for body in bodies:
        if (key := workload.decode(body).content_id) in stretch:
            yield [*stretch.values()]
            stretch = {}
        stretch[key] = body
    yield [*stretch.values()]


async def work(place: Place) -> None:
    """The workflow is the handler itself: it has one effect, so it needs no step, and each step would cost a write."""
    async with Writer(place, int(place.settings["connections"])) as writer:

        async def write(body: str) -> None:
            await writer.write_body(body)

        DBOS.workflow(name="write")(write)
        _configure(place)
        DBOS.launch()
        await DBOS.register_queue_async(
            QUEUE,
            partition_concurrency=1,
            worker_concurrency=int(place.settings["worker_concurrency"]) or None,
            polling_interval_sec=float(place.settings["polling_interval_s"]),
        )
        await asyncio.Event().wait()


def _configure(place: Place) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": place.postgres,
        "application_version": "1",
        "executor_id": str(os.getpid()),
        "log_level": "ERROR",
        "sys_db_pool_size": int(place.settings["pool"]),
    }
    DBOS(config=config)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    enter(fill, work)
