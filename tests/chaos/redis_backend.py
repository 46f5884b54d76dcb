"""A ledger in Redis, beside queue and table in Postgres; no trigger sees it, so the workers look and tell."""

import asyncio
from collections.abc import Sequence
from typing import Any

from chaos.final_checks import UNSEEN
from chaos.postgres_backend import Handlers as PostgresHandlers
from chaos.postgres_backend import PostgresShelf
from chaos.witness import Witness
from keywise import Change, adapters
from keywise.core import events
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import UnavailableError
from keywise.core.url import Address
from servers.redis import RedisServer

TABLES = f"""
create table doubts (key text, version bigint, suspicions bigint);
create or replace view history as select key, version, op, coalesce(
    (select max(suspicions) from doubts where doubts.key = log.key and doubts.version = log.version), {UNSEEN}
) as suspicions from log order by key, seq;
"""


class RedisShelf:
    """A ledger of its own; only its server is restarted."""

    on = "redis"
    logs_marks = False

    def __init__(self, server: RedisServer, beside: PostgresShelf) -> None:
        self._server = server
        self._beside = beside
        self.ledger, self.url = server.url, beside.url

    def create(self, *, is_heavy: bool) -> None:
        self._beside.create(is_heavy=is_heavy)
        self._beside.ask(lambda connection: connection.execute(TABLES))

    def rows(self, statement: str) -> list[tuple]:
        return self._beside.rows(statement)

    def tell_truth(self, rows: Sequence[tuple]) -> None:
        self._beside.tell_truth(rows)

    def restart(self) -> None:
        self._server.restart()

    def close(self) -> None:
        self._beside.close()


class Handlers:
    """What is done with a change; what the ledger says then is written down beside it."""

    def __init__(self, url: str, ledger: str, witness: Witness) -> None:
        self._store = PostgresHandlers(url, witness)
        self._ledger: Any = adapters.connect_ledger(Address(ledger, "stock", {}), LedgerPolicy())
        self._is_open = False
        self._opening = asyncio.Lock()
        self._looks: set[asyncio.Task[None]] = set()
        self.refetch = self._store.refetch
        self.observers = [self._observe]

    async def leased(self, change: Change[dict]) -> None:
        is_older = True
        try:
            newest = await self._store.kept(change)
            is_older = newest is not None and newest > change.version
        finally:
            # The claim may be over, and this call with it, though the write has landed; the look is a task of its own.
            if is_older:
                statement, key, version = "insert into doubts values ($1, $2, $3)", change.key, change.version
                self._look(key, lambda suspicions: self._store.asked(statement, key, version, suspicions))

    def _observe(self, event: events.Event) -> None:
        """Whoever has taken a key over holds it now, so its suspicion stays for a while."""
        if isinstance(event, events.TookOver):
            statement = "insert into takeovers values ($1, 0, $2)"
            self._look(event.key, lambda suspicions: self._store.asked(statement, event.key, suspicions))

    def _look(self, key: str, tell: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._looked(key, tell))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _looked(self, key: str, tell: Any) -> None:
        while True:
            try:
                async with self._opening:
                    if not self._is_open:
                        await self._ledger.__aenter__()
                        self._is_open = True
                entry = await self._ledger.inspect(key)
            except UnavailableError:
                continue
            await tell(entry.suspicions if entry is not None else 0)
            return
