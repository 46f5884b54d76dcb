"""A process that calls a serial function on Redis many times at once, and prints what it was told and what it ran."""

import asyncio
import json
import sys
import time

import keywise
from keywise.adapters.redis.database import RedisDatabase
from keywise.core.errors import KeywiseError


async def main(url: str, process: str, calls: int, keys: int, shared: int) -> None:
    told: dict[str, int | str] = {}
    ran: list[tuple[str, str, float, float]] = []
    app = keywise.App(url)

    @app.serial("count", key=lambda request: request["key"], timeout="60s")
    async def count(claim: keywise.Claim, request: dict) -> int:
        began = time.monotonic()
        taken = await counts.run("GET", f"count:{claim.key}")
        # Whoever came between the two would be counted over.
        await counts.run("SET", f"count:{claim.key}", int(taken or 0) + 1)
        ran.append((claim.key, request["id"], began, time.monotonic()))
        return int(taken or 0) + 1

    async def call(number: int) -> None:
        id = f"shared-{number}" if number < shared else f"{process}-{number}"
        try:
            told[id] = await count({"key": f"k{number % keys}", "id": id}, id=id)
        except KeywiseError as error:
            told[id] = f"{type(error).__name__}: {error}"

    async with RedisDatabase(url) as counts, app:
        await asyncio.gather(*(call(number) for number in range(calls)))
    print(json.dumps({"told": told, "ran": ran}))


if __name__ == "__main__":
    url, process, *numbers = sys.argv[1:]
    asyncio.run(main(url, process, *map(int, numbers)))
