"""A process that calls a serial function on Postgres many times at once, and prints what it was told.

With no calls to make it works for others, until it is told to stop.
"""

import asyncio
import json
import sys
from typing import Any

import asyncpg

import keywise
from keywise.core.errors import KeywiseError

WORK = "select pg_sleep(0.001)"
RUN = (
    "insert into runs (key, id, process, began_at, ended_at, answer) "
    "values ($1, $2, $3, $4, extract(epoch from clock_timestamp()), $5)"
)
NOW = "select extract(epoch from clock_timestamp())::float8"


def accepting(store: Any, url: str, turns: str, process: str, **options: Any):
    """An app whose function takes down when it ran, and counts on what it reads being all there is."""
    app = keywise.App(url)

    @app.serial("accept", key=lambda request: request["key"], turns=turns, **options)
    async def accept(claim: keywise.Claim, request: dict, transaction: keywise.Transaction) -> int:
        connection = transaction.connection
        [[began]] = await connection.fetch(NOW)
        [[taken]] = await connection.fetch("select count(*) from runs where key = $1", claim.key)
        await connection.execute(WORK)
        await connection.execute(RUN, claim.key, request["id"], process, began, taken + 1)
        return taken + 1

    @app.serial("check", key=lambda request: request["key"], turns=turns, **options)
    async def check(claim: keywise.Claim, request: dict) -> int:
        connection = await store.acquire()
        try:
            [[began]] = await connection.fetch(NOW)
            [[taken]] = await connection.fetch("select count(*) from runs where key = $1", claim.key)
            await connection.execute(WORK)
            await connection.execute(RUN, claim.key, request["id"], process, began, taken + 1)
        finally:
            await store.release(connection)
        return taken + 1

    return app, {"atomic": accept, "plain": check, "served": accept}


async def main(url: str, turns: str, kind: str, process: str, calls: int, keys: int) -> None:
    store = await asyncpg.create_pool(url, min_size=0, max_size=4)
    app, functions = accepting(store, url, turns, process, timeout="60s", run_here=kind != "served")
    if not calls:
        await app.run()
        await app.close()
        await store.close()
        return
    told: dict[str, int | str] = {}

    async def call(number: int) -> None:
        id = f"{process}-{number}"
        try:
            told[id] = await functions[kind]({"key": f"k{number % keys}", "id": id}, id=id)
        except KeywiseError as error:
            told[id] = type(error).__name__

    async with app:
        await asyncio.gather(*(call(number) for number in range(calls)))
    await store.close()
    print(json.dumps(told))


if __name__ == "__main__":
    url, turns, kind, process, calls, keys = sys.argv[1:]
    asyncio.run(main(url, turns, kind, process, int(calls), int(keys)))
