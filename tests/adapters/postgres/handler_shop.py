"""A pipeline on a Postgres database of its own, whose handler writes inside the ledger's transaction."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

import keywise
from adapters.postgres.benches import fresh
from keywise.adapters.postgres.ledger.working_set import letter_of
from keywise.core import events
from keywise.core.dead_letter import DeadLetter
from running import scaled
from servers import shared

LOOK_S = 0.01
OUTAGES_MAX = 30
"""More of them in a row do not end by themselves."""
QUICK: dict[str, Any] = {"poll": "20ms", "backoff": "10ms", "backoff_max": "50ms"}

Handler = Callable[[keywise.Change[dict], keywise.Transaction], Awaitable[object]]


class HandlerShop:
    """The app at work, a connection beside it, and what it reported."""

    def __init__(self, url: str, ledger_url: str, handler: Handler, options: dict[str, Any]) -> None:
        self.events: list[events.Event] = []
        self.calls: Counter[str] = Counter()
        """How often the handler was called, by key."""
        self.beside: Any = None
        self.url = url
        self.app = keywise.App(ledger_url, observers=[self.events.append])
        pipeline = self.app.pipeline("shop", key="key", version="v", **(QUICK | options))
        # A queue of its own way to the server: what a test does to the ledger's connections leaves it alone.
        pipeline.source(f"{url}?queue=shop")

        @pipeline.apply
        async def handle(change: keywise.Change[dict], transaction: keywise.Transaction) -> None:
            self.calls[change.key] += 1
            await handler(change, transaction)

    async def send(self, *keys: str, version: int = 1) -> None:
        await self.app.send("shop", *({"key": key, "v": version} for key in keys))

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(scaled(15)):
            while not condition():
                await self._look_again(what)

    async def until_empty(self) -> None:
        """Wait until every message has been settled."""
        async with asyncio.timeout(scaled(15)):
            while await self.beside.fetchval(WAITING):
                await self._look_again("an empty queue")

    async def _look_again(self, what: str) -> None:
        assert len(self.outages) < OUTAGES_MAX, f"one outage after another instead of {what}: {self.outages[-1]}"
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=LOOK_S)

    async def stored(self) -> dict[str, int]:
        return dict(await self.beside.fetch("select key, version from stock order by key"))

    async def letters(self) -> list[DeadLetter]:
        return [letter_of(row) for row in await self.beside.fetch(LETTERS)]

    def of(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def failed(self) -> Counter[str]:
        """How many attempts each key has paid for."""
        return Counter(event.key for event in (*self.of(events.Failed), *self.of(events.DeadLettered)))

    @property
    def outages(self) -> list[str]:
        return [event.cause for event in self.of(events.Unavailable)]


LETTERS = "select cause, body, key, version, headers, sent_at, source, traceback, routing_key from keywise_letters"
WAITING = "select exists (select 1 from keywise_ready) or exists (select 1 from keywise_held)"


async def put(change: keywise.Change[dict], transaction: keywise.Transaction) -> None:
    """Store a change; this counts as the whole effect."""
    await transaction.connection.execute(
        "insert into stock values ($1, $2) on conflict (key) do update set version = excluded.version",
        change.key,
        change.version,
    )


@asynccontextmanager
async def handler_shop(
    handler: Handler, *keys: str, ledger_port: int | None = None, settings: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[HandlerShop]:
    """A shop at work on the given keys. `settings` are those of the database; `ledger_port` is that of a proxy."""
    server = shared.postgres()
    url = server.create_database(fresh("database"), **(settings or {}))
    ledger_url = url if ledger_port is None else url.replace(f":{server.port}/", f":{ledger_port}/")
    shop = HandlerShop(url, ledger_url, handler, options)
    shop.beside = await asyncpg.connect(url)
    await shop.beside.execute("create table stock (key text primary key, version bigint)")
    async with shop.app:
        await shop.send(*keys)
        running = asyncio.create_task(shop.app.run(handle_signals=False))
        try:
            yield shop
        finally:
            shop.app.stop()
            with suppress(asyncio.CancelledError):
                await running
            shop.beside.terminate()
