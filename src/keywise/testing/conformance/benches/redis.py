"""The bench of the Redis adapters: it moves the time that scripts see, and removes names."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.adapters.redis.ledger.scope import SCOPES, RedisScope
from keywise.adapters.redis.script import Script
from keywise.adapters.redis.serial import lua as serial_lua
from keywise.core.url import Address

AT_ONCE = 500
# The last argument says by how many microseconds the time is ahead.
MOVED_TIME = """
local ahead = tonumber(table.remove(ARGV))
local redis = setmetatable({call = function(name, ...)
  local answer = redis.call(name, ...)
  if name ~= 'TIME' then return answer end
  local micros = answer[1] * 1000000 + answer[2] + ahead
  return {string.format('%.0f', math.floor(micros / 1000000)), string.format('%.0f', micros % 1000000)}
end}, {__index = redis})
"""


class RedisBench:
    """Uses the connections of the adapters."""

    async def prepare(self, address: Address, role: str) -> None:
        pass

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        for server in {id(adapter._server): adapter._server for adapter in adapters}.values():
            move_clock(server, seconds)

    async def remove(self, adapter: Any, name: str) -> None:
        server = adapter._server
        if isinstance(adapter, RedisLedger):
            return await remove_scope(adapter._scope)
        for key in await _names(server, serial_lua.prefix_of(name)):
            await server.run("UNLINK", key)
        # What waits inside of a turn is noted by its token, and each note begins with the name of its function.
        for within in await _names(server, f"{serial_lua.TAG}within:"):
            noted = await server.run("ZRANGE", within, 0, -1)
            if ours := [one for one in noted if name.encode() in one]:
                await server.run("ZREM", within, *ours)


async def remove_scope(scope: RedisScope) -> None:
    """Remove everything that a ledger stores under a name."""
    await scope.clear()
    await scope.database.run("UNLINK", *map(scope.key, ("meta", "controls", "workers")))
    await scope.database.run("SREM", SCOPES, scope.name)


def move_clock(server: RedisDatabase, seconds: float) -> None:
    """Move the time of a server ahead, as these connections see it."""
    time = getattr(server.run, "__self__", None)
    if not isinstance(time, _MovedTime):
        time = _MovedTime(server)
    time.ahead_us += round(seconds * 1e6)


class _MovedTime:
    """Replaces two methods of the object that adapters share, so that commands and scripts see a moved time."""

    def __init__(self, server: RedisDatabase) -> None:
        self.ahead_us = 0
        self._run, self._call = server.run, server.call
        server.run, server.call = self.run, self.call  # type: ignore[method-assign]

    async def run(self, *command: Any) -> Any:
        answer = await self._run(*command)
        if command != ("TIME",):
            return answer
        seconds, microseconds = divmod(int(answer[0]) * 1_000_000 + int(answer[1]) + self.ahead_us, 1_000_000)
        return [b"%d" % seconds, b"%d" % microseconds]

    async def call(self, script: Script, *arguments: Any) -> list[Any]:
        return await self._call(_moved(script), *arguments, self.ahead_us)


@functools.cache
def _moved(script: Script) -> Script:
    flags, _, body = script.text.decode().partition("\n")
    return Script(MOVED_TIME + body, frees="allow-oom" in flags)


async def _names(server: RedisDatabase, prefix: str) -> list[bytes]:
    """Return all names on the server that begin with a prefix."""
    pattern = re.sub(r"([\[\]?*\\])", r"\\\1", prefix) + "*"
    found, cursor = set[bytes](), b"0"
    while True:
        cursor, page = await server.run("SCAN", cursor, "MATCH", pattern, "COUNT", AT_ONCE)
        found.update(page)
        if cursor in (b"0", 0):
            return sorted(found)
