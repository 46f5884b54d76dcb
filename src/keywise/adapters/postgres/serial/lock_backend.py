"""Turns under advisory locks of a Postgres database: callers run their own requests, and hold a row while they wait.

Who has a turn holds the row of its key, with its token, and an advisory lock: that of the transaction in which a
function writes, or else of one session per process and function, which nothing else is done on. The row decides what
counts. The lock excludes other programs too; if its session is lost, what runs under it is broken off at once.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Self

from keywise.adapters.postgres.database import OPTIONS, PostgresDatabase, database_at
from keywise.adapters.postgres.serial.admin import PostgresTurnsOperator
from keywise.adapters.postgres.serial.session import LockSession
from keywise.adapters.postgres.serial.tables import Taking, TurnTables
from keywise.adapters.postgres.serial.transaction import transaction
from keywise.core.errors import UnavailableError
from keywise.core.resource import opening
from keywise.core.serial.contract import Answered, Ending, Reply, Request, Turn, TurnPolicy, Turns, TurnsTransaction
from keywise.core.url import Address

POLL_S = 0.5
"""How often to look even if nobody rang."""


class PostgresLockTurns:
    """The requests of one serial function in a Postgres database, each run by the process that asks."""

    is_shared = False

    def __init__(self, database: PostgresDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.database = database
        self.owner = owner
        self._session = None if policy.atomic else LockSession(database, self._lose_session)
        self._tables = TurnTables(database, function, owner, policy, self._session)
        self.operator = PostgresTurnsOperator(self._tables)
        self.sessions_lost = 0
        """How often the session with the locks was lost since this was opened."""
        self._uncounted = 0
        self._locked: dict[int, str] = {}
        """Tokens and keys of turns whose locks the present session has."""
        self._orphans: set[int] = set()
        """Of turns whose locks were lost with their session."""
        self._bell = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self._tables.open()
            self._bell = await self._heard()
            if self._session is not None:
                await self._stack.enter_async_context(self._session)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        await self.database.__aexit__()

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        return (await self.answer((), requests=requests)).answers

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        return (await self.answer((), limit, run_max)).turns

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        answered = await self._tables.exchange(replies, Taking(limit, run_max), requests)
        if self._session is not None:
            self._locked |= {turn.token: turn.request.key for turn in answered.turns}
            if answered.refused:
                refused = set(answered.refused)
                await self._unlock([reply.token for reply in replies if reply.id in refused])
        return answered

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._tables.give_back(turns)

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        """Work whose lock was lost with its session must end too."""
        if self._uncounted:
            self._uncounted -= await self._tables.count_losses(self._uncounted)
        self._locked = {token: self._locked[token] for token in tokens if token in self._locked}
        self._orphans &= set(tokens)
        lost = await self._tables.renew(tokens, before)
        await self._unlock(lost)
        return [token for token in tokens if token in lost or token in self._orphans]

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        return await self._tables.withdraw(ids, outcome, cause)

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        return await self._tables.replies(ids)

    async def wait(self, wait_s: float) -> None:
        bell = await self._heard()
        try:
            async with asyncio.timeout(min(wait_s, POLL_S)):
                await bell.wait()
        except TimeoutError:
            pass
        bell.clear()

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[TurnsTransaction]:
        held = ",".join(str(int(token)) for token in tokens)
        guard = f"select keywise_turn_guard_1({self._tables.number:d}, '{{{held}}}')" if tokens else ""
        return transaction(self._tables, has_turns=bool(tokens), guard=guard)

    async def _unlock(self, tokens: Sequence[int]) -> None:
        """Of turns that were lost: whoever has their keys next would have to end the session to get the locks."""
        lost = {token: self._locked.pop(token) for token in tokens if token in self._locked}
        if lost:
            # If it cannot be done, the session is lost, and the locks with it.
            with suppress(UnavailableError):
                await self._tables.unlock(list(lost.values()))

    async def _heard(self) -> asyncio.Event:
        return await self.database.bell(f"t{self._tables.number}", self._tables.owner)

    def _lose_session(self) -> None:
        self.sessions_lost += 1
        self._uncounted += 1
        self._orphans |= set(self._locked)
        self._locked = {}
        self._bell.set()


def connect(address: Address, owner: str, policy: TurnPolicy) -> Turns:
    """`postgresql://user@host/database`; requests are kept under the function's name."""
    return PostgresLockTurns(database_at(address, address.take(*OPTIONS)), address.name, owner, policy)
