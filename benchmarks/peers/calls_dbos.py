"""DBOS as a merge queue: callers put workflows into a partitioned queue, one at a time per key, and wait."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from dbos import DBOS, DBOSConfig, SetEnqueueOptions

from benchmarks.callers import Ask, Load, as_it_is, enter, prepare, work

QUEUE = "takes"
CONNECTIONS = POOL = 20
POLL_S = 0.01
"""Of the queue. 0.05 and 0.2 were slower."""
RESULT_S = 0.003
"""Times the number of callers, each of whom looks for its result so often: that is 0.2 for 64. 0.05, 0.5 and 1 were
slower, because fewer looks come too late and more of them keep the server busy."""


@asynccontextmanager
async def dbos(url: str, load: Load) -> AsyncIterator[Ask]:
    """The workflow is the work itself, in one transaction: each step would cost a write."""
    await prepare(url, load.keys)
    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS, reset=as_it_is) as pool:

        async def take(key: str) -> int:
            async with pool.acquire() as connection, connection.transaction():
                return await work(connection, key)

        workflow = DBOS.workflow(name="take")(take)

        async def ask(key: str) -> int:
            with SetEnqueueOptions(queue_partition_key=key):
                handle = await DBOS.enqueue_workflow_async(QUEUE, workflow, key)
            return int(await handle.get_result(polling_interval_sec=RESULT_S * load.callers))

        config: DBOSConfig = {
            "name": "bench",
            "system_database_url": url,
            "application_version": "1",
            "log_level": "ERROR",
            "sys_db_pool_size": POOL,
        }
        DBOS(config=config)
        DBOS.launch()
        await DBOS.register_queue_async(QUEUE, partition_concurrency=1, polling_interval_sec=POLL_S)
        try:
            yield ask
        finally:
            await asyncio.to_thread(DBOS.destroy)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    enter({"dbos": dbos})
