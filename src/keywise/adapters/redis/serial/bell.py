"""Rung by a Redis server when there is news for an owner of turns."""

import asyncio
from contextlib import suppress

from redis.exceptions import RedisError

from keywise.adapters.redis.database import RedisDatabase

AGAIN_S = 0.5
"""How long it takes until a connection that was lost is made again; whoever waits looks by himself meanwhile."""


class RedisBell:
    """Listens on a connection of its own, from `open` to `close`."""

    def __init__(self, database: RedisDatabase, *channels: str) -> None:
        self.rung = asyncio.Event()
        self._database = database
        self._channels = channels
        self._listening: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._listening = asyncio.create_task(self._listen())

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        while listening is not None and not listening.done():
            # Again, because the client library swallows it now and then while it connects.
            listening.cancel()
            await asyncio.wait([listening], timeout=AGAIN_S)

    async def _listen(self) -> None:
        while True:
            connection = self._database.connection()
            try:
                # Whatever the server refuses or the network breaks: without news it is looked now and then.
                with suppress(RedisError, OSError, TimeoutError):
                    await connection.connect()
                    await connection.send_command("SUBSCRIBE", *self._channels)
                    while True:
                        # That it listens is news too: what was told before was not heard.
                        await connection.read_response()
                        self.rung.set()
            finally:
                with suppress(RedisError, OSError, TimeoutError):
                    await connection.disconnect(nowait=True)
            await asyncio.sleep(AGAIN_S)
