"""What an operator sets in a Redis server, and what the workers on it agree on."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from keywise.adapters.redis.ledger.listing import active_entries, codes_after
from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import PERIODIC_LOCK, PROBE, SET_CONTROLS
from keywise.adapters.redis.ledger.working_set import TRIES_MAX, WAIT_S, RedisWorkingSet, Snapshot, controls_of, text_of
from keywise.core import rules
from keywise.core.controls import Controls, Pause
from keywise.core.entry import Claim, Entry
from keywise.core.errors import UnavailableError
from keywise.core.key_encoding import decoded, encoded

HELD, DONE = b"held", b"done"


class RedisControlStore:
    """The control store of one scope of a Redis server."""

    def __init__(self, scope: RedisScope, working_set: RedisWorkingSet) -> None:
        self._scope = scope
        self._working_set = working_set

    async def controls(self) -> Controls:
        return controls_of(await self._scope.database.run("GET", self._scope.key("controls")) or b"")

    async def pause(self, pause: Pause) -> None:
        def change(controls: Controls) -> Controls:
            others = controls.without(pause.keys, pause.is_pattern)
            return replace(others, pauses=(*others.pauses, pause))

        await self._change(change)

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        raised: list[int] = []

        def act(snapshot: Snapshot, key: str) -> Entry | None:
            raised.clear()
            entry = rules.reset(snapshot.entries[key], claim, snapshot.controls)
            if entry is None:
                return snapshot.entries[key]
            raised.append(entry.era)
            return entry

        await self._working_set.work(await self._working_set.read([claim.key]), act, under_controls=True)
        return raised[0] if raised else None

    async def raise_era(self) -> int | None:
        text, era = await self._read()
        for _ in range(TRIES_MAX):
            controls = controls_of(text)
            raised = 1 + max(controls.era, int(era))
            answer = await self._set_controls(text, text_of(replace(controls, era=raised)), era)
            if answer[0] == HELD:
                return None
            if answer[0] == DONE:
                return raised
            _, text, era = answer
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")

    async def keys(self, after: str, limit: int) -> list[str]:
        """In the order of their buckets, which never changes."""
        going_on = [code async for code, entry in active_entries(self._scope) if rules.is_known(entry)]
        return [decoded(code) for code in await codes_after(self._scope, encoded(after), limit, going_on)]

    async def held(self, after: str, limit: int) -> list[str]:
        now = await self._scope.database.now()
        codes = await self._scope.database.run("ZRANGEBYSCORE", self._scope.key("held"), f"({now!r}", "+inf")
        return sorted(key for key in map(decoded, codes) if key > after)[:limit]

    async def acquire(self, task: str, every_s: float) -> bool:
        # What has an interval may free memory; what has none finds out whether there is any.
        [done] = await self._scope.call(PERIODIC_LOCK if every_s else PROBE, task, repr(every_s))
        return bool(done)

    async def note_resync(self, is_due: bool) -> None:
        """Of the operator's `mark_suspect`: what is set is changed while nobody decides about a key."""
        now = await self._scope.database.now()
        await self._change(lambda controls: controls.with_resync(is_due, now))

    async def set_controls(self, controls: Controls) -> None:
        """Replace what holds for all keys."""
        await self._change(lambda _: controls)

    async def _set_controls(self, before: bytes, after: bytes, era: bytes = b"") -> list[Any]:
        answer = await self._scope.call(SET_CONTROLS, before, after, era)
        if answer[0] == DONE:
            self._scope.saw(answer[1], answer[1])
        return answer

    async def _read(self) -> tuple[bytes, bytes]:
        text = await self._scope.database.run("GET", self._scope.key("controls")) or b""
        era = await self._scope.database.run("HGET", self._scope.key("meta"), "era") or b"0"
        return text, era

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """What is set before and after; no claim that was decided before is granted after it."""
        text, _ = await self._read()
        for attempt in range(TRIES_MAX):
            before = controls_of(text)
            after = change(before)
            answer = await self._set_controls(text, text_of(after))
            if answer[0] == DONE:
                return before, after
            text = answer[1]
            await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")
