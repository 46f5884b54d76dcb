"""Turns in a Redis server: callers in many processes, each of which runs its own requests.

Every step is one script, so that nobody comes between. Functions cannot write in a transaction of it.
"""

import asyncio
from collections.abc import Sequence
from typing import Self

from keywise.adapters.redis.database import OPTIONS, RedisDatabase, database_at
from keywise.adapters.redis.serial.admin import RedisTurnsOperator
from keywise.adapters.redis.serial.bell import RedisBell
from keywise.adapters.redis.serial.store import RedisTurnsStore
from keywise.core.serial.contract import Answered, Ending, Reply, Request, Turn, TurnPolicy, Turns
from keywise.core.url import Address

POLL_S = 0.5
"""How often to look even if nobody rang: what is told while there is no connection is not heard."""


class RedisTurns:
    """The requests of one serial function in a Redis server."""

    database = None
    """No function can write in a transaction of it."""
    is_shared = False

    def __init__(self, server: RedisDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.owner = owner
        self._server = server
        self._store = RedisTurnsStore(server, function, owner, policy)
        self._bell = RedisBell(server, *(f"{self._store.prefix}news:{whom}" for whom in ("", owner)))
        self.operator = RedisTurnsOperator(self._store)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        try:
            await self._store.open()
        except BaseException:
            await self._server.__aexit__()
            raise
        self._bell.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._bell.close()
        finally:
            await self._server.__aexit__()

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        return (await self._store.exchange((), requests=requests)).answers

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        return (await self._store.exchange((), limit, run_max)).turns

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        return await self._store.exchange(replies, limit, run_max, requests)

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._store.give_back(turns)

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        return await self._store.renew(tokens, before)

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        return await self._store.withdraw(ids, outcome, cause)

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        return await self._store.replies(ids)

    async def wait(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(min(wait_s, POLL_S)):
                await self._bell.rung.wait()
        except TimeoutError:
            pass
        self._bell.rung.clear()

    @property
    def sessions_lost(self) -> int:
        """How often this opening has found that the server has lost something: what runs here is to be broken off."""
        return self._store.losses


def connect(address: Address, owner: str, policy: TurnPolicy) -> Turns:
    """`redis://host:6379/0`, or `rediss://` if it is encrypted; requests are kept under the function's name."""
    options = address.take("buckets", "witness", *OPTIONS)
    # Of the ledger, whose URL this may be.
    for name in ("buckets", "witness"):
        options.pop(name, None)
    return RedisTurns(database_at(address, options), address.name, owner, policy)
