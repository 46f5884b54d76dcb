"""Edits rows of an origin in Postgres at a rate, and announces each edit: some late, twice, or in the wrong order."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

import keywise
from chaos.fleet import pause
from chaos.live_waits import LiveWaits
from chaos.reindex_judge import Truth
from chaos.reindex_worker import PIPELINE
from keywise.core.clock import boot_time

TICK_S = 0.02
DELETED_SHARE = 0.15
AGAIN_SHARE = 0.1
HOT_KEYS, HOT_SHARE = 50, 0.2
"""So many keys get this share of all edits."""
KEPT = 2000
"""How many earlier messages may be sent again."""
TABLE = 'create table truth (id text collate "C" primary key, version bigint not null, text text not null)'
FILL = (
    "insert into truth select 'k' || lpad(n::text, 8, '0'), 1, 'v1 ' || repeat('x', {size}) "
    "from generate_series(1, {rows}) n"
)
PUT = (
    "insert into truth select * from unnest($1::text[], $2::bigint[], $3::text[]) "
    "on conflict (id) do update set version = excluded.version, text = excluded.text"
)
DELETE = "delete from truth where id = any($1::text[])"


def key_of(number: int) -> str:
    return f"k{number:08d}"


class Editor:
    """The owner of the origin: each batch of edits and their messages is one transaction."""

    def __init__(self, app: keywise.App, url: str, rows: int, per_s: float, seed: int = 0) -> None:
        self.sent = 0
        self.truth: dict[str, Truth] = {key_of(number): Truth(1, False) for number in range(1, rows + 1)}
        """What was sent last of every key; a row that was never edited is at version 1."""
        self.edited: set[str] = set()
        self.waits = LiveWaits()
        self.is_behind = False
        """Whether the pipeline is too slow for the rate: the editor waits, or rows would never have their turn."""
        self._app = app
        self._url = url
        self._rows = rows
        self._per_s = per_s
        self._rng = random.Random(seed)
        self._kept: list[bytes] = []
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        """Edit until stopped. A slow machine gets fewer edits than the rate, and no burst afterwards."""
        connection = await asyncpg.connect(self._url)
        try:
            last, owed = boot_time(), 0.0
            while not self._is_over:
                now = boot_time()
                owed, last = owed + min(now - last, 10 * TICK_S) * self._per_s * (not self.is_behind), now
                await self.edit(connection, int(owed))
                owed -= int(owed)
                await asyncio.to_thread(pause, TICK_S)
        finally:
            await connection.close()

    async def edit(self, connection: Any, count: int) -> None:
        if not count:
            return
        messages = [self._edit(self._key()) for _ in range(count)]
        self._kept = [*self._kept, *messages][-KEPT:]
        again = self._rng.choices(self._kept, k=sum(self._rng.random() < AGAIN_SHARE for _ in range(count)))
        keys = {msgspec.json.decode(one)["id"] for one in messages}
        self._rng.shuffle(messages)
        async with connection.transaction():
            await self._write(connection, sorted(keys))
            await self._app.send(PIPELINE, *messages, *again, within=connection)
        self.waits.announce({key: self.truth[key].version for key in keys}, time.time())
        self.sent += len(messages) + len(again)

    def _key(self) -> str:
        most = HOT_KEYS if self._rng.random() < HOT_SHARE else self._rows
        return key_of(self._rng.randint(1, most))

    def _edit(self, key: str) -> bytes:
        before = self.truth[key]
        is_gone = not before.deleted and self._rng.random() < DELETED_SHARE
        self.truth[key] = after = Truth(before.version + 1, is_gone)
        self.edited.add(key)
        message = {"id": key, "version": after.version, "text": f"v{after.version}", "gone": is_gone}
        return msgspec.json.encode(message)

    async def _write(self, connection: Any, keys: Sequence[str]) -> None:
        """Write the newest state of keys; edits of one key in a batch are one write."""
        put = [(key, self.truth[key].version) for key in keys if not self.truth[key].deleted]
        if put:
            versions = [version for _, version in put]
            await connection.execute(PUT, [key for key, _ in put], versions, [f"v{version}" for version in versions])
        if gone := [key for key in keys if self.truth[key].deleted]:
            await connection.execute(DELETE, gone)
