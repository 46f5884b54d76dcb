"""The design that keywise grew from: a lock and the latest version of each key in Redis, message by message."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

LOCK_MS, LATEST_S = 10_000, 86_400
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

Act = Callable[[], Awaitable[object]]


class Locks:
    """One client of Redis, shared by all who work side by side."""

    def __init__(self, client: Any) -> None:
        self._redis = client
        self._release = client.register_script(RELEASE)

    async def write_newer(
        self, key: str, version: int, write: Act, also: Callable[[Any], object] | None = None
    ) -> bool:
        """Write if it is newer than the latest, and say whether it was.

        The last steps are one round trip, and `also` can add to it: that is as quick as this design can be.
        """
        lock, token = f"lock:{key}", secrets.token_hex(8)
        # Polling, as the design proposes; Redis tells nobody that a lock is free.
        while not await self._redis.set(lock, token, nx=True, px=LOCK_MS):  # noqa: ASYNC110
            await asyncio.sleep(random.uniform(0.001, 0.005))
        latest = await self._redis.get(f"latest:{key}")
        is_newer = latest is None or int(latest) < version
        if is_newer:
            await write()
        async with self._redis.pipeline(transaction=False) as pipe:
            if is_newer:
                pipe.set(f"latest:{key}", version, ex=LATEST_S)
            await self._release(keys=[lock], args=[token], client=pipe)
            if also is not None:
                also(pipe)
            await pipe.execute()
        return is_newer
