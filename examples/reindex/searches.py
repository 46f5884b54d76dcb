"""The stores of a search: tables in SQLite that exchange their names, or indexes of OpenSearch behind an alias.

The naive script writes to them, the report reads them, and the example plants its error in one.
"""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, Protocol

import msgspec
from examples.reindex.catalogue import Item
from examples.reindex.place import KEYWISE, PIPELINE, Place

from keywise.adapters.http.client import HttpClient, server_at
from keywise.core.url import Address

BUSY_S = 30.0
SHOWN_MAX = 10_000
FIRST_FIELDS = {"id": "keyword", "version": "long", "title": "keyword", "price": "integer"}
FIELDS = {**FIRST_FIELDS, "words": "text"}


class Search(Protocol):
    """A search. Its name stands for the live target; a target that is built beside has a name of its own."""

    name: str

    async def widen(self) -> None:
        """Add the field for words to the live target, if it needs one."""

    async def begin(self) -> None:
        """Create the live target, empty and in its first shape."""

    async def create(self, target: str) -> None:
        """Create an empty target beside the live one, in the new shape."""

    async def put(self, target: str, items: Sequence[Item]) -> None:
        """Write items without a look at the versions that the target has."""

    async def delete(self, target: str, name: str) -> None:
        """Delete an item, if it is there."""

    async def damage(self, target: str, lost: str, changed: Item) -> None:
        """Delete a document and change another at its version, as an operator might do by hand."""

    async def swap(self, before: str, after: str) -> None:
        """Let the name stand for `after`; the target that was live is called `before` from then on."""

    async def items(self) -> dict[str, Item]:
        """Return all items of the live target."""

    async def find(self, word: str) -> int:
        """Return how many items a search for a word finds."""

    def target(self, number: int) -> str:
        """Return the name that the live target after so many swaps has while it is not live."""


class TableSearch:
    """A table of a SQLite file. Tables exchange their names."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.name = PIPELINE
        self._connection = connection
        self._has_words = False

    async def widen(self) -> None:
        self._connection.execute(f"alter table {self.name} add column words")
        self._has_words = True

    async def begin(self) -> None:
        await self.create(self.name)

    async def create(self, target: str) -> None:
        words = ", words" if self._has_words else ""
        self._connection.execute(f"create table {target} (id text primary key, version integer, title, price{words})")

    async def put(self, target: str, items: Sequence[Item]) -> None:
        words = (", words", ", ?") if self._has_words else ("", "")
        with self._connection:
            self._connection.execute("begin immediate")
            self._connection.executemany(
                f"insert or replace into {target} (id, version, title, price{words[0]}) values (?, ?, ?, ?{words[1]})",  # noqa: S608
                [_row(item)[: 5 if self._has_words else 4] for item in items],
            )

    async def delete(self, target: str, name: str) -> None:
        self._connection.execute(f"delete from {target} where id = ?", (name,))  # noqa: S608

    async def damage(self, target: str, lost: str, changed: Item) -> None:
        await self.delete(target, lost)
        await self.put(target, [changed])

    async def swap(self, before: str, after: str) -> None:
        with self._connection:
            self._connection.execute("begin immediate")
            self._connection.execute(f"alter table {self.name} rename to {before}")
            self._connection.execute(f"alter table {after} rename to {self.name}")

    async def items(self) -> dict[str, Item]:
        words = ", words" if self._has_words else ""
        rows = self._connection.execute(f"select id, version, title, price{words} from {self.name}")  # noqa: S608
        return {row[0]: Item(*row) for row in rows}

    async def find(self, word: str) -> int:
        column = "words" if self._has_words else "title"
        pattern = f"%{word}%"
        [count] = self._connection.execute(
            f"select count(*) from {self.name} where {column} like ?",  # noqa: S608
            (pattern,),
        ).fetchone()
        return int(count)

    def target(self, number: int) -> str:
        return f"{self.name}_{number}"


class IndexSearch:
    """An alias of OpenSearch, which stands for one index."""

    def __init__(self, client: HttpClient, name: str) -> None:
        self._client = client
        self.name = name

    async def widen(self) -> None:
        """Do nothing: the old index keeps what it has no field for, and does not search in it."""

    async def begin(self) -> None:
        await self._ask("PUT", f"/{self.target(0)}", definition(FIRST_FIELDS) | {"aliases": {self.name: {}}})

    async def create(self, target: str) -> None:
        await self._ask("PUT", f"/{target}", definition(FIELDS))

    async def put(self, target: str, items: Sequence[Item]) -> None:
        lines = [({"index": {"_id": item.id}}, item) for item in items]
        await self._bulk(target, [line for pair in lines for line in pair])

    async def delete(self, target: str, name: str) -> None:
        await self._bulk(target, [{"delete": {"_id": name}}])

    async def damage(self, target: str, lost: str, changed: Item) -> None:
        await self.delete(target, lost)
        # Otherwise the engine would give it the next version.
        same = {"version": changed.version, "version_type": "external_gte"}
        await self._bulk(target, [{"index": {"_id": changed.id, **same}}, changed])

    async def swap(self, before: str, after: str) -> None:
        actions = [{"remove": {"index": before, "alias": self.name}}, {"add": {"index": after, "alias": self.name}}]
        await self._ask("POST", "/_aliases", {"actions": actions})

    async def items(self) -> dict[str, Item]:
        await self._ask("POST", f"/{self.name}/_refresh")
        hits = await self._hits({"size": SHOWN_MAX})
        return {hit["_id"]: msgspec.convert(hit["_source"], Item) for hit in hits["hits"]}

    async def find(self, word: str) -> int:
        await self._ask("POST", f"/{self.name}/_refresh")
        query = {"multi_match": {"query": word, "fields": ["title", "words"]}}
        return int((await self._hits({"size": 0, "track_total_hits": True, "query": query}))["total"]["value"])

    def target(self, number: int) -> str:
        return f"{self.name}-{number}"

    async def _hits(self, search: object) -> Any:
        return (await self._ask("POST", f"/{self.name}/_search", search))["hits"]

    async def _bulk(self, target: str, lines: Sequence[object]) -> None:
        body = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        await self._send("POST", f"/{target}/_bulk", body)

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        return await self._send(method, path, b"" if body is None else msgspec.json.encode(body))

    async def _send(self, method: str, path: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        answer = await self._client.request(method, path, body=body, headers=headers, timeout_s=30)
        assert answer.status < 300, answer.body
        return msgspec.json.decode(answer.body)


@asynccontextmanager
async def opened(place: Place, search: str) -> AsyncIterator[Search]:
    """Open one of the two searches, with its connection."""
    if place.search:
        url, _, alias = place.search.replace("opensearch://", "http://").rpartition("/")
        async with HttpClient(server_at(Address(url, "", {}), "http", {})) as client:
            yield IndexSearch(client, alias if search == KEYWISE else f"{alias}-{search}")
        return
    with closing(sqlite3.connect(place.file(search), timeout=BUSY_S, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        yield TableSearch(connection)


def definition(fields: dict[str, str]) -> dict[str, Any]:
    """Return the definition of an index with these fields. It stores other fields, and does not search in them."""
    types = {field: {"type": kind} for field, kind in fields.items()}
    settings = {"number_of_shards": 1, "number_of_replicas": 0}
    return {"settings": settings, "mappings": {"dynamic": "false", "properties": types}}


def _row(item: Item) -> tuple[str, int, str, int, str | None]:
    return item.id, item.version, item.title, item.price, item.words
