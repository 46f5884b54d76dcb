"""Removing a serial function from a Redis server with all its requests, as a check does with its own."""

import re

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.serial.lua import TAG, prefix_of

AT_ONCE = 500


async def remove(server: RedisDatabase, function: str) -> None:
    """Look through all names of the server, and remove what belongs to the function."""
    for name in await _named(server, _plain(prefix_of(function)) + "*"):
        await server.run("UNLINK", name)
    # What waits inside of a turn is noted by its token, and each note begins with the name of its function.
    for within in await _named(server, _plain(f"{TAG}within:") + "*"):
        noted = await server.run("ZRANGE", within, 0, -1)
        if ours := [one for one in noted if function.encode() in one]:
            await server.run("ZREM", within, *ours)


async def _named(server: RedisDatabase, pattern: str) -> list[bytes]:
    found, cursor = set[bytes](), b"0"
    while True:
        cursor, page = await server.run("SCAN", cursor, "MATCH", pattern, "COUNT", AT_ONCE)
        found.update(page)
        if cursor in (b"0", 0):
            return sorted(found)


def _plain(text: str) -> str:
    """A pattern that means this text."""
    return re.sub(r"([\[\]?*\\])", r"\\\1", text)
