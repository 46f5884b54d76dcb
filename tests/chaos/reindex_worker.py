"""A worker process of the tests: one pipeline with an origin, until it is told to stop or killed."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from keywise import adapters
from keywise.core import events
from keywise.core.origin import Origin, Page, Shard
from keywise.core.url import Address
from keywise.observe.log import described

PIPELINE = "pages"
PAGE = "page "
"""A note of a page that was read begins with it."""
SHOWN = (events.TookOver, events.ClaimLost, events.Failed, events.DeadLettered, events.Unavailable, events.Started)


class ReindexAssignment(msgspec.Struct):
    """What a worker is told at its start."""

    ledger: str
    """Its queue is there too."""
    sink: str
    origin: str
    notes: str
    """The file for what it says: nothing that it wrote is lost by a kill."""
    options: dict[str, Any] = {}


class ReadPage(msgspec.Struct):
    """A page that a worker has read of the origin."""

    shard: str
    after: str
    rows: int
    reader: int
    """The process id."""


class NotedOrigin:
    """An origin that notes each page which it has read."""

    def __init__(self, url: str, notes: str) -> None:
        self._url = url
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._origin: Origin | None = None
        self._opening = asyncio.Lock()

    is_consistent = True

    def note(self, text: str) -> None:
        os.write(self._notes, f"{text}\n".encode())

    async def shards(self, size: int) -> Sequence[Shard]:
        return await (await self._open()).shards(size)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        page = await (await self._open()).scan(shard, after, limit)
        self.note(PAGE + msgspec.json.encode(ReadPage(shard.name, after, len(page.rows), os.getpid())).decode())
        return page

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        return await (await self._open()).fetch(keys)

    async def _open(self) -> Origin:
        async with self._opening:
            if self._origin is None:
                origin = adapters.connect_origin(Address(self._url, PIPELINE, {}))
                await origin.__aenter__()  # It is closed by the end of the process.
                self._origin = origin
        return self._origin


def operator_app(assignment: ReindexAssignment) -> keywise.App:
    """The app of an operator's process, which closes its origin and notes nothing."""
    app = keywise.App(assignment.ledger, observers=[])
    pages = app.pipeline(PIPELINE, key="id", version="version", deleted={"gone": [True]}, **assignment.options)
    pages.source(assignment.ledger).sink(assignment.sink).origin(assignment.origin)
    return app


def app_of(assignment: ReindexAssignment) -> keywise.App:
    origin = NotedOrigin(assignment.origin, assignment.notes)

    def observe(event: events.Event) -> None:
        if isinstance(event, SHOWN):
            origin.note(described(event))

    app = keywise.App(assignment.ledger, observers=[observe])
    pages = app.pipeline(PIPELINE, key="id", version="version", deleted={"gone": [True]}, **assignment.options)
    pages.source(assignment.ledger).sink(assignment.sink).origin(origin)
    return app


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ReindexAssignment)
    asyncio.run(app_of(assignment).run())


if __name__ == "__main__":
    main()
