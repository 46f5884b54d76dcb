"""A pipeline's part of a Redis server: under which names it lies, and what a worker knows has to be there.

Redis may lose what it has answered for: after a restart without a file, after a power cut, after a failover.
Every write raises a number of the scope, and each worker remembers the number of its own last one.
A server that knows a lower number has lost something. It is asked in every step, before anything is done.
"""

import secrets
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from keywise.databases.redis import RedisDatabase
from keywise.databases.redis_scripts import OPEN, Script
from keywise.errors import DatabaseError, UnavailableError

FORMAT = "1"
BUCKETS = 16_384
"""About a hundred keys of a bucket lie close together, so that much is good for a million and a half."""
BUCKETS_MAX = 1 << 24
LONG = 64
"""Longer keys have buckets of their own: one would make Redis keep all keys of its bucket in another, larger way."""
RECOVERIES_MAX = 3
UNLINK_AT_ONCE = 4096
SCOPES = "keywise:scopes"


class RedisScope:
    """What one worker knows of one scope."""

    def __init__(self, database: RedisDatabase, name: str, buckets: int | None) -> None:
        self.database = database
        self.name = name
        self.prefix = prefix_of(name)
        self.buckets = buckets or BUCKETS
        self.losses = 0
        """How often this worker has found that something was lost."""
        self._wanted = buckets
        self._worker = secrets.token_bytes(8)
        self._nonce = b""
        self._seen = self._own = 0
        self.on_loss: Callable[[], Awaitable[None]] | None = None
        """What is done besides when something was lost."""

    @property
    def buckets_all(self) -> int:
        """Those of short keys, and behind them those of long ones."""
        return 2 * self.buckets

    def bucket(self, code: bytes) -> int:
        bucket = zlib.crc32(code) % self.buckets
        return bucket if len(code) <= LONG else bucket + self.buckets

    def key(self, name: str) -> str:
        return self.prefix + name

    async def open(self) -> None:
        """Look at what is there, or begin."""
        self._own = 0
        await self._learn(seen=0, lost=False)

    async def call(self, script: Script, *arguments: Any) -> list[Any]:
        """The answer of a guarded script. What was lost is noted, and work goes on."""
        for _ in range(RECOVERIES_MAX):
            known = (self.prefix, self._nonce, self._worker, self._seen, self._own, repr(self.database.ahead_s))
            answer = await self.database.call(script, *known, *arguments)
            if answer != [b"lost"]:
                return answer
            self.losses += 1
            await self._learn(seen=self._seen, lost=True)
            if self.on_loss is not None:
                await self.on_loss()
        raise UnavailableError(f"{self.database.name} keeps losing what it was told")

    def saw(self, seq: Any, own: Any = 0) -> None:
        """Remember the number of the last write, and of the last one of this worker."""
        self._seen = max(self._seen, int(seq))
        self._own = max(self._own, int(own))

    async def clear(self) -> None:
        """Remove all that is remembered of keys, letters and lines."""
        names = [self.key(str(bucket)) for bucket in range(self.buckets_all)]
        names += map(self.key, ("active", "held", "doubtful", "rates", "letters", "buried"))
        names += map(self.key, ("chores", "lines", "lines-of"))
        for start in range(0, len(names), UNLINK_AT_ONCE):
            await self.database.run("UNLINK", *names[start : start + UNLINK_AT_ONCE])
        await self.database.run("HDEL", self.key("meta"), "keys", "tombstones", "suspects")

    async def forget(self) -> None:
        """Remove all that is kept under this name."""
        await self.clear()
        await self.database.run("UNLINK", *map(self.key, ("meta", "standing", "workers")))
        await self.database.run("SREM", SCOPES, self.name)

    async def _learn(self, *, seen: int, lost: bool) -> None:
        nonce = secrets.token_hex(8)
        arguments = (self.prefix, nonce, self.buckets, self._worker, seen, FORMAT, "1" if lost else "", self.name)
        form, found_nonce, buckets, seq = await self.database.call(OPEN, *arguments)
        if form != FORMAT.encode():
            raise DatabaseError(
                f"{self.database.name} was written by a newer keywise: the format of {self.name!r} is "
                f"{(form or b'?').decode()}, this one knows {FORMAT}; upgrade keywise"
            )
        if self._wanted is not None and self._wanted != int(buckets):
            raise DatabaseError(
                f"{self.database.name}: the keys of {self.name!r} lie in {int(buckets)} buckets, not in "
                f"{self._wanted}; write buckets={int(buckets)} or leave it out; to change it, use keywise ledger copy"
            )
        self.buckets = int(buckets)
        self._nonce = found_nonce
        self._seen = int(seq)
        self._own = int(seq) if lost else 0


def prefix_of(scope: str) -> str:
    """What all names of a scope begin with; the braces keep them together where names are spread over servers."""
    return f"keywise:{{{scope}}}:"
