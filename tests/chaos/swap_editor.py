"""Many writers edit rows of an origin side by side and announce each edit: early, late, twice, or out of order."""

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import keywise
from chaos.reindex_judge import Truth
from chaos.reindex_worker import PIPELINE

DELETED_SHARE = 0.2
EARLY_SHARE, LATE_SHARE, AGAIN_SHARE = 0.25, 0.2, 0.1
"""The shares of edits that are announced before the origin has them, some time later, and a second time."""
LATE_S = 1.0
HOT_SHARE = 0.3
"""So many edits are of one key in ten."""


class Rows(Protocol):
    """The rows of the origin."""

    async def put(self, key: str, version: int) -> None: ...

    async def delete(self, key: str) -> None: ...


class SwapEditor:
    """The owner of the origin, with many writers. Each row is written under a lock of its own, so none steps back."""

    def __init__(self, app: keywise.App, rows: Rows, keys: int, writers: int, per_s: float, lag_s: float) -> None:
        self.truth: dict[str, Truth] = {key_of(number): Truth(1, False) for number in range(1, keys + 1)}
        """What was announced last of every key; a row that was never edited is at version 1."""
        self.sent_at: dict[tuple[str, int], float] = {}
        """When each version was announced first, by the clock of this machine."""
        self.sent = 0
        self.lag_s = 0.0
        """How long the origin has lacked at most what was announced."""
        self.is_behind = False
        """Whether the pipeline is too slow for the rate: the writers wait, or no swap would ever be small enough."""
        self._app = app
        self._rows = rows
        self._keys = keys
        self._writers = writers
        self._rest_s = writers / per_s
        self._lag_max_s = lag_s
        self._locks: Mapping[str, asyncio.Lock] = {key: asyncio.Lock() for key in self.truth}
        self._is_over = asyncio.Event()

    def stop(self) -> None:
        self._is_over.set()

    async def run(self) -> None:
        """Edit until stopped; then all that is late is announced."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._writers):
                group.create_task(self._edit_on(group, random.Random(number)))

    async def _edit_on(self, group: asyncio.TaskGroup, rng: random.Random) -> None:
        while not await rested(self._is_over, rng.uniform(0, 2 * self._rest_s)):
            if not self.is_behind:
                await self._edit(group, rng)

    async def _edit(self, group: asyncio.TaskGroup, rng: random.Random) -> None:
        key = self._key(rng)
        before = self.truth[key]
        is_gone = not before.deleted and rng.random() < DELETED_SHARE
        version = before.version + 1
        self.truth[key] = Truth(version, is_gone)
        message: dict[str, object] = {"id": key, "version": version, "text": f"v{version}"}
        if is_gone:
            message["gone"] = True  # Otherwise it is like a row of the origin: the gate compares field by field.
        way = rng.random()
        if way < EARLY_SHARE:
            await self._send(message)
            began = time.monotonic()
            await rested(self._is_over, rng.uniform(0, self._lag_max_s))
            await self._write(key)
            self.lag_s = max(self.lag_s, time.monotonic() - began)
            return
        await self._write(key)
        if way < EARLY_SHARE + LATE_SHARE:
            group.create_task(self._send_late(message, rng.uniform(0, LATE_S)))
            return
        await self._send(message)
        if rng.random() < AGAIN_SHARE:
            group.create_task(self._send_late(message, rng.uniform(0, LATE_S)))

    async def _write(self, key: str) -> None:
        """Write the newest state of a row, whichever edit it comes from."""
        async with self._locks[key]:
            state = self.truth[key]
            if state.deleted:
                await self._rows.delete(key)
            else:
                await self._rows.put(key, state.version)

    async def _send(self, message: Mapping[str, object]) -> None:
        self.sent_at.setdefault((str(message["id"]), int(str(message["version"]))), time.time())
        await self._app.send(PIPELINE, message)
        self.sent += 1

    async def _send_late(self, message: Mapping[str, object], seconds: float) -> None:
        await rested(self._is_over, seconds)
        await self._send(message)

    def _key(self, rng: random.Random) -> str:
        most = max(1, self._keys // 10) if rng.random() < HOT_SHARE else self._keys
        return key_of(rng.randint(1, most))


async def rested(is_over: asyncio.Event, seconds: float) -> bool:
    """Rest, but not longer than until the end; return whether that has come."""
    with suppress(TimeoutError):
        await asyncio.wait_for(is_over.wait(), seconds)
    return is_over.is_set()


def key_of(number: int) -> str:
    return f"k{number:06d}"
