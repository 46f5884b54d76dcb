"""The catalogue of a shop: a table of items, in SQLite or Postgres, and the editors who change it all the time."""

import asyncio
import random
import sqlite3
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any
from urllib.parse import unquote

import asyncpg
import msgspec
from examples.reindex.place import ITEMS

CREATE = f"create table {ITEMS} (id text primary key, version bigint not null, title text not null, price integer)"
MIGRATE = f"alter table {ITEMS} add column words text"
UPSERT = (
    f"insert into {ITEMS} (id, version, title, price) values ($1, $2, $3, $4) on conflict (id) do update "  # noqa: S608
    "set version = excluded.version, title = excluded.title, price = excluded.price"
)
UPSERT_WITH_WORDS = (
    f"insert into {ITEMS} (id, version, title, price, words) values ($1, $2, $3, $4, $5) on conflict (id) "  # noqa: S608
    "do update set version = excluded.version, title = excluded.title, price = excluded.price, words = excluded.words"
)
DELETE = f"delete from {ITEMS} where id = $1"  # noqa: S608
PAGE = f"select id, version, title, price, words from {ITEMS} where id > $1 order by id limit $2"  # noqa: S608

STYLES = ("Café", "Crème", "Bücher", "Smørrebrød", "Garden", "Kitchen", "Señorita", "Zoë")
THINGS = ("table", "Chair", "lamp", "Shelf", "mirror", "Basket")
KEPT = 10
"""The editors leave the first items alone."""
GONE, BACK = 0.1, 0.3
"""Below these shares, an edit deletes an item, or brings one back that is gone, if there is one."""

Send = Callable[[bytes], Awaitable[None]]


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of the catalogue, and the message that announces it."""

    id: str
    version: int
    title: str = ""
    price: int = 0
    words: str | None = None
    """What a search looks at: the title without capitals and accents. It came later."""
    state: str = ""
    """`gone` in the message that announces a deletion."""


def folded(text: str) -> str:
    """Return a text without capitals and accents."""
    split = unicodedata.normalize("NFKD", text.casefold().replace("ø", "o"))
    return "".join(one for one in split if not unicodedata.combining(one))


class Catalogue:
    """The items, and what is done to them. Each change of an item raises its version and is announced."""

    def __init__(self, connection: Any, count: int, seed: int) -> None:
        self._connection = connection
        self._rng = random.Random(seed)
        self._version = 0
        self._has_words = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._may_edit = asyncio.Event()
        self.edits = 0
        self.items = {name: self._made(name) for name in map(_name, range(count))}
        """A copy of the table, with which the example compares the searches."""
        self.versions = {name: item.version for name, item in self.items.items()}
        """The newest version of each item, also of those that are deleted."""

    async def fill(self) -> None:
        await self._run(CREATE)
        for item in self.items.values():
            await self._store(item)

    async def migrate(self) -> None:
        """Give every row its words. They are no change of an item, so no version is raised and nothing is announced."""
        await self._run(MIGRATE)
        self._has_words = True
        for item in self.items.values():
            await self._store(self._with_words(item))

    async def page(self, after: str, limit: int) -> list[Item]:
        return [Item(*row) for row in await self._run(PAGE, after, limit)]

    async def edit(self, rate: float, sends: Sequence[Send]) -> None:
        """Change items for ever, so many a second, and announce each change."""
        while True:
            await self._may_edit.wait()
            self._is_idle.clear()
            message = msgspec.json.encode(await self._edit_one())
            for send in sends:
                await send(message)
            self._is_idle.set()
            self.edits += 1
            await asyncio.sleep(self._rng.expovariate(rate))

    def resume(self) -> None:
        self._may_edit.set()

    async def pause(self) -> None:
        """Pause the editors; return when the edit that they have begun is announced."""
        self._may_edit.clear()
        await self._is_idle.wait()

    async def _edit_one(self) -> Item:
        kind = self._rng.random()
        known = sorted(self.items)[KEPT:]
        if kind < GONE:
            name = self._rng.choice(known)
            self._version += 1
            del self.items[name]
            self.versions[name] = self._version
            await self._run(DELETE, name)
            return Item(name, self._version, state="gone")
        gone = sorted(self.versions.keys() - self.items.keys())
        item = self._made(self._rng.choice(gone if gone and kind < BACK else known))
        await self._store(item)
        return item

    def _made(self, name: str) -> Item:
        self._version += 1
        title = f"{self._rng.choice(STYLES)} {self._rng.choice(THINGS)}"
        item = Item(name, self._version, title, self._rng.randint(5, 500))
        return self._with_words(item) if self._has_words else item

    def _with_words(self, item: Item) -> Item:
        return msgspec.structs.replace(item, words=folded(item.title))

    async def _store(self, item: Item) -> None:
        self.items[item.id], self.versions[item.id] = item, item.version
        values = item.id, item.version, item.title, item.price
        if item.words is None:
            await self._run(UPSERT, *values)
        else:
            # In one statement: a reader that sees the new version sees the new words, too.
            await self._run(UPSERT_WITH_WORDS, *values, item.words)

    async def _run(self, statement: str, *values: Any) -> Sequence[Any]:
        if isinstance(self._connection, sqlite3.Connection):
            # To SQLite, $1 is a parameter whose name is 1.
            named = {str(number): value for number, value in enumerate(values, 1)}
            return self._connection.execute(statement, named).fetchall()
        rows: Sequence[Any] = await self._connection.fetch(statement, *values)
        return rows


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Any]:
    """The database of the catalogue, which commits each statement by itself: a connection, or a pool of them."""
    async with AsyncExitStack() as stack:
        if url.startswith("sqlite:///"):
            path = unquote(url.removeprefix("sqlite:///"))
            connection = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = off")
            yield connection
            return
        # A statement that is prepared would fail after the table has got its new column.
        async with asyncpg.create_pool(url, min_size=1, max_size=3, statement_cache_size=0) as pool:
            yield pool


def _name(number: int) -> str:
    return f"item-{number:05}"
