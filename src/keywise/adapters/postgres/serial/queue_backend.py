"""Turns in tables of a Postgres database: any process that serves a function may run its requests.

Requests wait in a table of work, and move to one of what is completed together with their replies.
Whoever waits is told by the server, and looks now and then besides.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self

from keywise.adapters.postgres.database import OPTIONS, PostgresDatabase, database_at
from keywise.adapters.postgres.serial.admin import PostgresTurnsOperator
from keywise.adapters.postgres.serial.tables import Taking, TurnTables
from keywise.adapters.postgres.serial.transaction import transaction
from keywise.core.resource import opening
from keywise.core.serial.contract import Answered, Ending, Reply, Request, Turn, TurnPolicy, Turns, TurnsTransaction
from keywise.core.url import Address

POLL_S = 0.5
"""How often to look even if nobody rang: what is told while there is no connection is not heard."""


class PostgresQueueTurns:
    """The requests of one serial function in a Postgres database."""

    is_shared = True

    def __init__(self, database: PostgresDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.database = database
        self.owner = owner
        self._tables = TurnTables(database, function, owner, policy)
        self.operator = PostgresTurnsOperator(self._tables)

    async def __aenter__(self) -> Self:
        async with opening(self.database):
            await self._tables.open()
            await self._bell()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__()

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        return (await self._tables.exchange((), Taking(), requests)).answers

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        return (await self._tables.exchange((), Taking(limit, run_max))).turns

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        return await self._tables.exchange(replies, Taking(limit, run_max), requests)

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._tables.give_back(turns)

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        return await self._tables.renew(tokens, before)

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        return await self._tables.withdraw(ids, outcome, cause)

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        return await self._tables.replies(ids)

    async def wait(self, wait_s: float) -> None:
        bell = await self._bell()
        try:
            async with asyncio.timeout(min(wait_s, POLL_S)):
                await bell.wait()
        except TimeoutError:
            pass
        bell.clear()

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[TurnsTransaction]:
        return transaction(self._tables, has_turns=bool(tokens))

    async def _bell(self) -> asyncio.Event:
        return await self.database.bell(f"t{self._tables.number}", self._tables.owner)


def connect(address: Address, owner: str, policy: TurnPolicy) -> Turns:
    """`postgres-queue://user@host/database`; requests are kept under the function's name."""
    return PostgresQueueTurns(database_at(address, address.take(*OPTIONS)), address.name, owner, policy)
