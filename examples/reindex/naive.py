"""A naive search: it gets every message once and in order, and writes to two targets while it builds a copy.

It reads the catalogue page by page and writes each page, as most scripts for this do, and then renames the copy.
"""

import asyncio

import msgspec
from examples.reindex.catalogue import Catalogue, Item
from examples.reindex.searches import Search

PAGE_ROWS, PAGE_S = 100, 0.2
"""How many rows it reads at a time, and how long it works on them before it writes them."""


class NaiveSearch:
    """The consumer of the messages, and the script that builds a copy and lets it go live."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._beside = ""
        """The copy that is being built, and gets every change as well."""

    async def send(self, message: bytes) -> None:
        self._messages.put_nowait(message)

    async def consume(self) -> None:
        live = self._search.name
        while True:
            item = msgspec.json.decode(await self._messages.get(), type=Item)
            for target in [live, self._beside] if self._beside else [live]:
                if item.state:
                    await self._search.delete(target, item.id)
                else:
                    await self._search.put(target, [item])
            self._messages.task_done()

    async def settle(self) -> None:
        """Return when every message is processed."""
        await self._messages.join()

    async def build(self, catalogue: Catalogue) -> None:
        """Fill a copy with all rows, while changes are written to both."""
        target = self._search.target(1)
        await self._search.create(target)
        self._beside, after = target, ""
        while rows := await catalogue.page(after, PAGE_ROWS):
            await asyncio.sleep(PAGE_S)
            await self._search.put(target, rows)
            after = rows[-1].id

    async def swap(self) -> None:
        self._beside = ""
        await self._search.swap(self._search.target(0), self._search.target(1))

    async def roll_back(self) -> None:
        await self._search.swap(self._search.target(1), self._search.target(0))
