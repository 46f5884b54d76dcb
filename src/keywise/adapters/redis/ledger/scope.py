"""A pipeline's part of a Redis server: under which names it lies, and what a worker knows has to be there.

Redis may lose what it has answered for: after a restart without a file, after a power cut, after a failover.
Every write raises a number of the scope, and each worker remembers the number of its own last one.
A server that knows a lower number has lost something. It is asked in every step, before anything is done.
"""

import secrets
import zlib
from collections.abc import Callable
from typing import Any

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.progress_file import Progress, ProgressFile
from keywise.adapters.redis.ledger.scripts import OPEN
from keywise.adapters.redis.script import Script
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.statements import check_schema

FORMAT = 2
BUCKETS = 16_384
"""About a hundred keys of a bucket lie close together, so that much is good for a million and a half."""
BUCKETS_MAX = 1 << 24
LONG = 64
"""Longer keys have buckets of their own: one would make Redis keep all keys of its bucket in another, larger way."""
RECOVERIES_MAX = 3
NOTES_MAX = 50
"""How often a loss is noted anew where others keep changing what is set."""
UNLINK_AT_ONCE = 4096
WORKERS_MAX = 4096
"""Of so many the numbers are kept, those that wrote last; of the others only the highest."""
SCOPES = "keywise:scopes"


class RedisScope:
    """What one worker knows of one scope."""

    def __init__(
        self, database: RedisDatabase, name: str, buckets: int | None, progress_file: ProgressFile | None = None
    ) -> None:
        self.database = database
        self.name = name
        self.prefix = prefix_of(name)
        self.buckets = buckets or BUCKETS
        self.losses = 0
        """How often this worker has found that something was lost."""
        self._wanted = buckets
        self._progress_file = progress_file
        self._worker = secrets.token_bytes(8)
        self._nonce = b""
        self._seen = self._own = 0
        self._learned = 0
        """How often it was looked at what is there: whoever asked before that knows less."""
        self._is_losing = False
        """A loss was found, and is not noted yet."""
        self.on_loss: Callable[[bytes, float], bytes] = lambda controls, now: controls
        """What what is set becomes, at a moment, when something was lost."""

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
        """Open the scope, or create it. If the progress file knows of more writes than the server, some were lost."""
        self._own = 0
        # Before the server is asked: another worker may write, and note it, while this one waits for the answer.
        known = self._progress_file.read() if self._progress_file is not None else None
        self._learn(await self._open(0, b"", b"", lost=False), lost=False)
        if self._progress_file is None:
            return
        seen = self._progress()
        if known is not None and (known.nonce != seen.nonce or known.seq > seen.seq):
            if known.nonce == seen.nonce:
                # Numbers are not used twice, or a write after the loss could hide it from another worker.
                self._seen = known.seq
            await self._note_loss()
        self._progress_file.open(self._progress())

    def close(self) -> None:
        """Note how far the scope has come."""
        if self._progress_file is not None:
            self._progress_file.note(self._progress, at_once=True)

    async def call(self, script: Script, *arguments: Any) -> list[Any]:
        """The answer of a guarded script. What was lost is noted, and work goes on."""
        buckets = self.buckets
        for _ in range(RECOVERIES_MAX):
            if buckets != self.buckets:
                raise UnavailableError(
                    f"{self.database.name} has lost {self.name!r}, which now has {self.buckets} buckets instead of "
                    f"{buckets}; try again"
                )
            learned = self._learned
            known = (self.prefix, self._nonce, self._worker, self._seen, self._own)
            answer = await self.database.call(script, *known, *arguments)
            if answer != [b"lost"]:
                self._is_losing = False
                return answer
            if learned == self._learned:
                await self._note_loss()
        raise UnavailableError(f"{self.database.name} keeps losing what it was told")

    def saw(self, seq: Any, own: Any = 0) -> None:
        """Remember the number of the last write, and of the last one of this worker."""
        self._seen = max(self._seen, int(seq))
        self._own = max(self._own, int(own))
        if self._progress_file is not None:
            self._progress_file.note(self._progress)

    async def clear(self) -> None:
        """Remove all that is remembered of keys, letters and lines."""
        names = [self.key(str(bucket)) for bucket in range(self.buckets_all)]
        names += map(self.key, ("active", "held", "suspect", "rates", "letters", "buried"))
        names += map(self.key, ("periodic_locks", "lines", "lines-of"))
        for start in range(0, len(names), UNLINK_AT_ONCE):
            await self.database.run("UNLINK", *names[start : start + UNLINK_AT_ONCE])
        await self.database.run("HDEL", self.key("meta"), "keys", "tombstones", "suspects")

    async def _note_loss(self) -> None:
        """Tell it to everybody in the step in which this worker comes to know what is there.

        Whoever is cut off or cancelled before that finds the loss again with the next call.
        """
        if not self._is_losing:
            self._is_losing = True
            self.losses += 1
        for _ in range(NOTES_MAX):
            now = await self.database.now()
            before = await self.database.run("GET", self.key("controls")) or b"{}"
            found = await self._open(self._seen, before, self.on_loss(before, now), lost=True)
            if found != [b"changed"]:
                return self._learn(found, lost=True)
        raise UnavailableError(f"{self.database.name}: others keep changing what is set")

    def _progress(self) -> Progress:
        return Progress(self._nonce.decode(), self._seen)

    async def _open(self, seen: int, before: bytes, after: bytes, *, lost: bool) -> list[Any]:
        is_lost = "1" if lost else ""
        own = (self.prefix, secrets.token_hex(8), self.buckets, self._worker, seen, FORMAT, is_lost, self.name)
        return await self.database.call(OPEN, *own, before, after, WORKERS_MAX)

    def _learn(self, found: list[Any], *, lost: bool) -> None:
        form, nonce, buckets, seq = found
        check_schema((form or b"?").decode(), FORMAT, f"the ledger {self.name!r} in {self.database.name}", "database")
        if self._wanted is not None and self._wanted != int(buckets):
            raise DatabaseError(
                f"{self.database.name}: the keys of {self.name!r} lie in {int(buckets)} buckets, not in "
                f"{self._wanted}; write buckets={int(buckets)} or leave it out; to change it, use keywise ledger copy"
            )
        self.buckets = int(buckets)
        self._nonce = nonce
        self._seen = int(seq)
        self._own = int(seq) if lost else 0
        self._learned += 1
        self._is_losing = False


def prefix_of(scope: str) -> str:
    """What all names of a scope begin with; the braces keep them together where names are spread over servers."""
    return f"keywise:{{{scope}}}:"
