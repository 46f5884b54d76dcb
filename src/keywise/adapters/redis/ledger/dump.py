"""All of one scope of a Redis server, to be carried to another ledger."""

from collections.abc import Awaitable, Callable

import msgspec
from msgspec.structs import replace

from keywise.adapters.redis.database import in_pairs
from keywise.adapters.redis.ledger.entry_encoding import GONE
from keywise.adapters.redis.ledger.history import RedisHistoryStore
from keywise.adapters.redis.ledger.listing import active_entries, charged_codes, codes_after
from keywise.adapters.redis.ledger.scope import SCOPES, RedisScope, prefix_of
from keywise.adapters.redis.ledger.scripts import FLOOR, HOLDING
from keywise.adapters.redis.ledger.working_set import TOKEN_NONCE_BITS, RedisEntries, RedisWorkingSet, stretches
from keywise.core.controls import Controls
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import LedgerPolicy
from keywise.core.key_encoding import decoded
from keywise.core.limits import Rate
from keywise.core.transfer import TransferPage

LETTERS_AT_ONCE = 50
"""Their bodies may be large."""


class RedisLedgerTransfer:
    """The transfer of one scope of a Redis server."""

    def __init__(
        self,
        scope: RedisScope,
        policy: LedgerPolicy,
        set_controls: Callable[[Controls], Awaitable[None]],
        history_store: RedisHistoryStore,
    ) -> None:
        self._scope = scope
        self._set_controls = set_controls
        self._history_store = history_store
        self._others: list[bytes] | None = None
        """Keys that something is going on with, or whose rate was charged: they may have no mark."""
        # Whatever the pipeline says of rates now, moments that were charged are kept.
        self._policy = replace(policy, rate=policy.rate or Rate(1))
        self._entries = RedisEntries(scope, self._policy, keeps_rates=True)

    async def scopes(self) -> list[str]:
        names = sorted(name.decode() for name in await self._scope.database.run("SMEMBERS", SCOPES))
        return [name for name in names if await self._scope.database.call(HOLDING, prefix_of(name))]

    async def page(self, cursor: str, limit: int) -> TransferPage:
        kind, _, after = cursor.partition(":") if cursor else ("entries", "", "")
        if kind == "entries":
            return await self._entry_page(bytes.fromhex(after), limit)
        if kind == "letters":
            return await self._letters(int(after), min(limit, LETTERS_AT_ONCE))
        lines = await self._history_store.after(after, limit)
        return TransferPage(records=[line for _, line in lines], cursor=f"lines:{lines[-1][0]}" if lines else "")

    async def add(self, page: TransferPage) -> None:
        entries = {key: (key, entry) for key, entry in page.entries}
        # Nothing is known to be there, and whatever is there all the same comes back and is written over.
        empty = RedisWorkingSet(self._policy, dict.fromkeys(entries, GONE), dict.fromkeys(entries))
        await self._entries.run(entries, lambda working_set, one: working_set.set(*one), empty, frees=False)
        for some in stretches(page.dead_letters, lambda one: one[1]):
            await self._entries.keep(some)
        await self._history_store.record(page.records)

    async def clear(self) -> None:
        await self._scope.clear()

    async def set_controls(self, controls: Controls) -> None:
        await self._set_controls(controls)

    async def tokens_above(self, floor: int) -> int:
        [last] = await self._scope.call(FLOOR, floor >> TOKEN_NONCE_BITS)
        return ((int(last) + 1) << TOKEN_NONCE_BITS) - 1

    async def _entry_page(self, after: bytes, limit: int) -> TransferPage:
        if not after or self._others is None:
            # Once for all parts, since nobody works on the scope meanwhile.
            self._others = [code async for code, _ in active_entries(self._scope)]
            self._others += [code async for code in charged_codes(self._scope)]
        codes = await codes_after(self._scope, after, limit, self._others)
        if not codes:
            return TransferPage(cursor="letters:0")
        found = (await self._entries.read(map(decoded, codes))).entries
        entries = [(key, entry) for key, entry in found.items() if entry is not None]
        return TransferPage(entries=entries, cursor=f"entries:{codes[-1].hex()}")

    async def _letters(self, start: int, limit: int) -> TransferPage:
        database, scope = self._scope.database, self._scope
        flat = await database.run("ZRANGE", scope.key("buried"), start, start + limit - 1, "WITHSCORES")
        pairs = in_pairs(flat)
        if not pairs:
            return TransferPage(cursor="lines:-")
        packed = await database.run("HMGET", scope.key("letters"), *(int(number) for number, _ in pairs))
        # One that was dropped in between has no text any more.
        found = zip(pairs, packed, strict=True)
        letters = [(float(at), LETTER(text)) for (_, at), text in found if text is not None]
        return TransferPage(dead_letters=letters, cursor=f"letters:{start + len(pairs)}")


LETTER = msgspec.msgpack.Decoder(DeadLetter).decode
