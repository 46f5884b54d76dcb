"""What an operator sets in a Redis server, and what the workers on it agree on."""

import asyncio
import random
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from keywise import rules
from keywise.databases.key_codes import decoded, encoded
from keywise.databases.redis_book import TRIES_MAX, WAIT_S, Book, Page, standing_of
from keywise.databases.redis_scope import RedisScope
from keywise.databases.redis_scripts import FIELDS, STAND, TURN
from keywise.databases.redis_states import entry_of
from keywise.entry import Claim, Entry
from keywise.errors import UnavailableError
from keywise.standing import PLAIN, Pause, Standing

HELD = b"held"


class RedisGovernor:
    """The governor of one scope of a Redis server."""

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
            answer = await self._scope.call(STAND, text, _text(replace(standing, era=raised)), era)
            if answer[0] == HELD:
                return None
            if len(answer) == 1:
                return raised
            _, text, era = answer
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")

    async def keys(self, after: str, limit: int) -> list[str]:
        """In the order of their buckets, which never changes."""
        scope, code = self._scope, encoded(after)
        bucket = scope.bucket(code) if after else 0
        past = (bucket, code) if after else (-1, b"")
        going_on = [(scope.bucket(one), one) for one in await self._active()]
        found: list[tuple[int, bytes]] = []
        while bucket < scope.buckets_all and len(found) < limit:
            end, pages = await scope.call(FIELDS, bucket, scope.buckets_all, limit)
            here = {(n, one) for n, page in zip(pages[::2], pages[1::2], strict=True) for one in page}
            here |= {place for place in going_on if bucket <= place[0] < end}
            found += sorted(place for place in here if place > past)
            bucket = end
        return [decoded(one) for _, one in found[:limit]]

    async def held(self, after: str, limit: int) -> list[str]:
        now = await self._scope.database.now()
        codes = await self._scope.database.run("ZRANGEBYSCORE", self._scope.key("held"), f"({now!r}", "+inf")
        return sorted(key for key in map(decoded, codes) if key > after)[:limit]

    async def turn(self, chore: str, every_s: float) -> bool:
        [done] = await self._scope.call(TURN, chore, repr(every_s))
        return bool(done)

    async def _active(self) -> list[bytes]:
        """Keys that something is going on with, and that somebody would want to know."""
        found: list[bytes] = []
        async for code, entry in active_entries(self._scope):
            if rules.is_known(entry):
                found.append(code)
        return found

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
            answer = await self._scope.call(STAND, text, _text(after), "")
            if len(answer) == 1:
                return before, after
            text = answer[1]
            await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")


async def active_entries(scope: RedisScope):  # type: ignore[no-untyped-def]
    """All keys that something is going on with, page by page."""
    cursor = 0
    while True:
        cursor, page = await scope.database.run("HSCAN", scope.key("active"), cursor, "COUNT", 500)
        for code, packed in page.items():
            entry = entry_of(b"a" + packed)
            assert entry is not None
            yield code, entry
        if int(cursor) == 0:
            return


def _text(standing: Standing) -> bytes:
    return msgspec.json.encode(standing) if standing != PLAIN else b""
