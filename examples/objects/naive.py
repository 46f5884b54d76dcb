"""A naive consumer: it reads the object of each notification as it comes, and adds its lines to a table.

It acks a message after its lines are stored, so that none is lost with a worker that dies.
"""

import asyncio
import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import msgspec
from obstore.store import LocalStore, S3Store

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.objects.place import NAIVE, Place, content_of, events_of
from examples.objects.uploads import PART_LINES

from keywise import adapters
from keywise.core.url import Address

SCHEMA = "create table if not exists lines (object text, body text); create index if not exists by on lines (object)"
BUSY_S = 30
VISIBILITY = "visibility=5s"


def opened_table(place: Place) -> sqlite3.Connection:
    connection = sqlite3.connect(place.file(NAIVE).with_suffix(".table.db"), timeout=BUSY_S, isolation_level=None)
    connection.executescript(f"pragma journal_mode = wal; {SCHEMA}")
    return connection


async def consume(place: Place) -> None:
    client = place.client()
    queue = adapters.connect_source(Address(f"{place.queue(NAIVE)}&{VISIBILITY}", NAIVE, {}))
    with closing(opened_table(place)) as table:
        async with queue:
            while True:
                for delivery in await queue.receive(1, 1.0):
                    for name, deleted, _ in events_of(msgspec.json.decode(delivery.body)):
                        if deleted:
                            table.execute("delete from lines where object = ?", (name,))
                        else:
                            await _add(table, client, name)
                    await queue.ack([delivery])


async def _add(table: sqlite3.Connection, client: S3Store | LocalStore, name: str) -> None:
    """Add the lines of an object, some at a time."""
    lines = (await content_of(client, name) or b"").decode().splitlines()
    for start in range(0, len(lines), PART_LINES):
        with table:
            table.execute("begin immediate")
            some = lines[start : start + PART_LINES]
            table.executemany("insert into lines values (?, ?)", ((name, line) for line in some))
        await asyncio.sleep(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(consume(Place.from_environment()))
