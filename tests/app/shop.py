"""A shop for tests: an app with one pipeline on SQLite files, that goes one of the four ways."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import keywise
from keywise import Change, Transaction
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry
from keywise.core.events import Event
from keywise.flow.pipeline import Pipeline
from running import scaled

WAYS = ("queue_transaction", "ledger_transaction", "claimed_transaction", "leased")
QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "50ms"}
"""Retries that do not hold up a test."""


class Shop:
    """An app on files in a folder, what it emitted, and what its store shows."""

    def __init__(self, folder: Path, *, ledger: str = "shop.db") -> None:
        self.folder = folder
        self.ledger_file = folder / ledger
        self.url = f"sqlite:///{self.ledger_file}"
        self.events: list[Event] = []
        self.stored: dict[str, int] = {}
        """Where the handler of the leased way writes."""
        self.app = keywise.App(self.url, observers=[self.events.append])

    def pipeline(self, way: str, **options: object) -> keywise.app.PipelineDefinition:
        """Define the pipeline called shop, from a queue to a store; the way is checked by `opened`."""
        route = {} if "read" in options else {"key": "key", "version": "version", "deleted": {"gone": [True]}}
        pipeline = self.app.pipeline("shop", **(route | QUICK | options))
        source = self.folder / "queue.db" if way == "ledger_transaction" else self.ledger_file
        pipeline.source(f"sqlite:///{source}")
        if way == "leased":
            pipeline.apply(self._keep)
        elif way == "claimed_transaction":
            self._create_table()
            pipeline.apply(_upsert)
        else:
            pipeline.sink(f"{self.url}?table=stock")
        return pipeline

    def content(self) -> dict[str, int]:
        """The version of each key that the store shows."""
        if self.stored:
            return dict(self.stored)
        return dict(self.rows("select key, version from stock"))

    def rows(self, statement: str) -> list[tuple]:
        """What another program sees in the ledger's file."""
        with closing(sqlite3.connect(self.ledger_file)) as connection:
            return connection.execute(statement).fetchall()

    def execute(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.ledger_file)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    def emitted(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Pipeline]:
        async with self.app.open("shop", work=False) as pipeline:
            yield pipeline

    async def work_until(self, done: Callable[[], Awaitable[bool]], *, limit_s: float = 20.0) -> None:
        """Run the app until a condition holds, then let it drain."""
        running = asyncio.create_task(self.app.run(handle_signals=False))
        try:
            async with asyncio.timeout(scaled(limit_s)):
                while not running.done() and not await done():
                    await asyncio.wait([running], timeout=0.01)
        finally:
            while not running.done():
                self.app.stop()
                await asyncio.wait([running], timeout=0.05)
        await running

    async def work_until_empty(self, *, limit_s: float = 20.0) -> None:
        """Run the app until everything that was sent is acked."""
        async with self.opened() as pipeline:
            [(_, source)] = pipeline.sources

            async def is_empty() -> bool:
                return await source.depth() == 0

            await self.work_until(is_empty, limit_s=limit_s)
            assert await source.depth() == 0

    async def letters(self) -> list[DeadLetter]:
        """All dead letters, oldest first."""
        async with self.opened() as pipeline:
            return [letter for _, _, letter in reversed(await pipeline.admin.dead_letters(1000))]

    async def entry(self, key: str) -> Entry | None:
        async with self.opened() as pipeline:
            return await pipeline.admin.inspect(key)

    def _create_table(self) -> None:
        self.execute("create table if not exists stock (key text primary key, version integer, body text)")

    async def _keep(self, change: Change) -> None:
        if change.deleted:
            self.stored.pop(change.key, None)
        else:
            self.stored[change.key] = change.version


async def _upsert(change: Change, transaction: Transaction) -> None:
    if change.deleted:
        transaction.connection.execute("delete from stock where key = ?", (change.key,))
        return
    row = (change.key, change.version, change.body.decode())
    transaction.connection.execute("insert or replace into stock values (?, ?, ?)", row)
