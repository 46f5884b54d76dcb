"""What an operator sets in a Redis server, and what the workers on it agree on."""

import asyncio
import random
from collections.abc import Callable

from keywise.adapters.redis.ledger.listing import active_entries, codes_after
from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import PERIODIC_LOCK, PROBE, SET_CONTROLS
from keywise.adapters.redis.ledger.working_set import TRIES_MAX, WAIT_S, RedisEntries, controls_of, text_of
from keywise.core import ledger_steps, rules
from keywise.core.controls import Controls, Pause
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.key_encoding import decoded, encoded

HELD, DONE = b"held", b"done"


class RedisControlStore:
    """The control store of one scope of a Redis server."""

    def __init__(self, scope: RedisScope, entries: RedisEntries) -> None:
        self._scope = scope
        self._entries = entries

    async def controls(self) -> Controls:
        return controls_of(await self._text())

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls, _: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls, _: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        [era] = await self._entries.run({claim.key: claim}, ledger_steps.reset, under_controls=True)
        return era

    async def raise_era(self) -> int | None:
        before, after = await self._change(Controls.with_era_above, unless_held=True)
        return after.era if after != before else None

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
        await self._change(lambda controls, _: controls.with_resync(is_due, now))

    async def set_controls(self, controls: Controls) -> None:
        """Replace what holds for all keys."""
        await self._change(lambda *_: controls)

    async def _text(self) -> bytes:
        text: bytes = await self._scope.database.run("GET", self._scope.key("controls")) or b""
        return text

    async def _change(
        self, change: Callable[[Controls, int], Controls], *, unless_held: bool = False
    ) -> tuple[Controls, Controls]:
        """What is set before and after; no claim that was decided before is granted after it.

        The change is given the highest era of any key. If it may not be made while a key is held, both are the same.
        """
        text = await self._text()
        era = await self._scope.database.run("HGET", self._scope.key("meta"), "era") or b"0"
        for attempt in range(TRIES_MAX):
            before = controls_of(text)
            after = change(before, int(era))
            answer = await self._scope.call(SET_CONTROLS, text, text_of(after), era if unless_held else b"")
            if answer[0] == HELD:
                return before, before
            if answer[0] == DONE:
                self._scope.saw(answer[1], answer[1])
                return before, after
            _, text, era = answer
            await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._scope.database.name}: others keep changing what is set")
