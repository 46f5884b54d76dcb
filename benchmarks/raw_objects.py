"""The raw limit of object ingest: bare loops of the client libraries that read announced objects into a table.

Nothing else is there: no claim, no position, no check of a record, no retry, no dead letter, no events.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import obstore

SCHEMA = """
create table if not exists queue (id bigint generated always as identity primary key, body bytea not null);
create table if not exists records (
    object text collate "C", ordinal bigint, version bigint, body text, primary key (object, ordinal));
"""
RECEIVE = """
delete from queue where id = any(array(select id from queue order by id limit $1 for update skip locked))
returning body
"""
INSERT = """
insert into records
select object, ordinal, null, body
from unnest(string_to_array($1, $4), $2::text::bigint[], string_to_array($3, $4)) as one (object, ordinal, body)
"""
SEPARATOR = "\x1f"
"""In no name and in no record. The client library needs longer to encode a list than a text that is split."""
LARGE_ROWS = 10_000
CHUNK_BYTES = 1024 * 1024
RECEIVE_MAX = 10
"""The most that SQS hands over, and deletes, at a time."""

Row = tuple[str, int, str]
"""The object, the ordinal and the body of a record."""


async def drain_postgres(connection: Any, folder: Path, batch: int) -> int:
    """Receive, read, insert and delete a batch of small objects in one transaction; return how many there were."""
    async with connection.transaction():
        names = [body.decode() for [body] in await connection.fetch(RECEIVE, batch)]
        rows = chain.from_iterable(_rows(name, (folder / name).read_bytes()) for name in names)
        await insert(connection, list(rows))
    return len(names)


async def drain_sqs(client: Any, queue: str, store: Any, pool: Any) -> int:
    """Receive ten, get them side by side, insert their records in a transaction, and delete ten."""
    answer = await client.receive_message(QueueUrl=queue, MaxNumberOfMessages=RECEIVE_MAX, VisibilityTimeout=600)
    messages = answer.get("Messages", [])
    if messages:
        rows = await asyncio.gather(*(_fetched(store, message["Body"]) for message in messages))
        async with pool.acquire() as connection:
            await insert(connection, list(chain.from_iterable(rows)))
        entries = [{"Id": str(n), "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(messages)]
        await client.delete_message_batch(QueueUrl=queue, Entries=entries)
    return len(messages)


async def write_large(connection: Any, path: Path) -> int:
    """Stream one object into the table, 10,000 records at a time; return how many it had."""
    ordinal = 0
    for lines in streamed(path):
        await insert(connection, [(path.name, ordinal + n, line) for n, line in enumerate(lines)])
        ordinal += len(lines)
    return ordinal


async def insert(connection: Any, rows: Sequence[Row]) -> None:
    objects, ordinals, bodies = zip(*rows, strict=True) if rows else ((), (), ())
    numbers = f"{{{','.join(map(str, ordinals))}}}"
    await connection.execute(INSERT, SEPARATOR.join(objects), numbers, SEPARATOR.join(bodies), SEPARATOR)


def streamed(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a file, 10,000 at a time."""
    lines: list[str] = []
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            complete, _, rest = (rest + chunk).rpartition(b"\n")
            lines += complete.decode().split("\n")
            while len(lines) >= LARGE_ROWS:
                yield lines[:LARGE_ROWS]
                lines = lines[LARGE_ROWS:]
    if lines:
        yield lines


async def _fetched(store: Any, body: str) -> list[Row]:
    [event] = _decode(body).Records
    name = event.s3.object.key
    found = await obstore.get_async(store, name)
    return _rows(name, (await found.bytes_async()).to_bytes())


def _rows(name: str, content: bytes) -> list[Row]:
    return [(name, ordinal, line) for ordinal, line in enumerate(content.decode().splitlines())]


class _Object(msgspec.Struct):
    key: str


class _Content(msgspec.Struct):
    object: _Object


class _Event(msgspec.Struct):
    s3: _Content


class _Notification(msgspec.Struct):
    Records: list[_Event]


_decode = msgspec.json.Decoder(_Notification).decode
