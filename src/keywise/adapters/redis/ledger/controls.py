"""What an operator sets in a Redis server, and what the workers on it agree on."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from keywise.adapters.redis.ledger.listing import active_entries, codes_after
from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.working_set import TRIES_MAX, WAIT_S, Book, Page, standing_of, text_of
from keywise.adapters.redis.scripts import PERIODIC_LOCK, PROBE, STAND
from keywise.core import rules
from keywise.core.controls import Pause, Standing
from keywise.core.entry import Claim, Entry
from keywise.core.errors import UnavailableError
from keywise.core.key_encoding import decoded, encoded

HELD, DONE = b"held", b"done"


class RedisControlStore:
    """The control store of one scope of a Redis server."""

    def __init__(self, scope: RedisScope, book: Book) -> None:
        self._scope = scope
        self._book = book

    async def standing(self) -> Standing:
        return standing_of(await self._scope.database.run("GET", self._scope.key("standing")) or b"")

    async def pause(self, pause: Pause) -> None:
        def change(standing: Standing) -> Standing:
            others = standing.without(pause.keys, pause.is_pattern)
            return replace(others, pauses=(*others.pauses, pause))

        await self._change(change)

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda standing: standing.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        raised: list[int] = []

        def act(page: Page, key: str) -> Entry | None:
            raised.clear()
            entry = rules.reset(page.entries[key], claim, page.standing)
            if entry is None:
                return page.entries[key]
            raised.append(entry.era)
            return entry

        await self._book.work(await self._book.read([claim.key]), act, under_standing=True)
        return raised[0] if raised else None

    async def raise_era(self) -> int | None:
        text, era = await self._read()
        for _ in range(TRIES_MAX):
            standing = standing_of(text)
            raised = 1 + max(standing.era, int(era))
            answer = await self._stand(text, text_of(replace(standing, era=raised)), era)
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
        """Of the operator's `mark_suspect`: a standing is changed while nobody decides about a key."""
        now = await self._scope.database.now()
        await self._change(lambda standing: standing.with_resync(is_due, now))

    async def stand(self, standing: Standing) -> None:
        """Replace what holds for all keys."""
        await self._change(lambda _: standing)

    async def _stand(self, before: bytes, after: bytes, era: bytes = b"") -> list[Any]:
        answer = await self._scope.call(STAND, before, after, era)
        if answer[0] == DONE:
            self._scope.saw(answer[1], answer[1])
        return answer

    async def _read(self) -> tuple[bytes, bytes]:
        text = await self._scope.database.run("GET", self._scope.key("standing")) or b""
        era = await self._scope.database.run("HGET", self._scope.key("meta"), "era") or b"0"
        return text, era

    async def _change(self, change: Callable[[Standing], Standing]) -> tuple[Standing, Standing]:
        """What is set before and after; no claim that was decided before is granted after it."""
        text, _ = await self._read()
        for attempt in range(TRIES_MAX):
            before = standing_of(text)
            after = change(before)
            answer = await self._stand(text, text_of(after))
            if answer[0] == DONE:
                return before, after
            text = answer[1]
            await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")
