"""Factories for the sink on DynamoDB: benches on a real DynamoDB Local, with tables of their own."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from keywise.adapters.dynamodb.items import fields_of
from keywise.adapters.dynamodb.origin import DynamoOrigin
from keywise.adapters.dynamodb.origin import connect as connect_origin
from keywise.adapters.dynamodb.sink import DynamoSink, connect
from keywise.core.change import Change, order_of
from keywise.core.url import Address
from keywise.testing.conformance import OriginBench, SinkBench, UncheckedError
from keywise.testing.conformance.origins import KeyKind
from servers import shared

BAD = Change("bad", order_of(1), body=b'{"text":"%b"}' % (b"x" * 410_000))
_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    return f"{thing}_{os.getpid()}_{next(_numbers)}"


def url_of(table: str, endpoint: str = "", **options: str) -> str:
    words = {"endpoint": endpoint or shared.dynamodb().url, **options}
    return f"dynamodb://{table}?" + "&".join(f"{name}={value}" for name, value in words.items())


def sink_of(table: str, endpoint: str = "", **options: str) -> DynamoSink:
    """A sink of a table on this machine; it is not open."""
    sink = connect(Address(url_of(table, endpoint, **options), "pages", {}))
    assert isinstance(sink, DynamoSink)
    return sink


def origin_of(table: str, endpoint: str = "", **options: str) -> DynamoOrigin:
    origin = connect_origin(Address(url_of(table, endpoint, **options), "pages", {}))
    assert isinstance(origin, DynamoOrigin)
    return origin


def created(key: str = "id") -> str:
    return shared.dynamodb().create_table(fresh("table"), key)


def rows(table: str) -> dict[str, dict[str, Any]]:
    """The items of a table by their id, as JSON values; tombstones too."""
    found = map(fields_of, shared.dynamodb().items(table))
    return {row["id"]: row for row in found}


def dynamodb_sink(**options: str) -> Callable[[], Any]:
    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        table = created()

        async def content() -> dict[str, bytes]:
            held = await asyncio.to_thread(rows, table)
            return {
                key: msgspec.json.encode({name: row[name] for name in ("key", "version", "text")})
                for key, row in held.items()
                if "keywise_deleted" not in row
            }

        async with sink_of(table, **options) as sink:
            yield SinkBench(sink=sink, content=content, bad=BAD)

    return make


class TableRows:
    """Writes the rows that an origin reads, one request each."""

    def __init__(self, table: str) -> None:
        self._table = table

    async def put(self, texts: Mapping[str, str]) -> None:
        for key, text in texts.items():
            await self._ask("PutItem", Item={"key": {"S": key}, "text": {"S": text}})

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._ask("DeleteItem", Key={"key": {"S": key}})

    async def _ask(self, action: str, **request: Any) -> None:
        await asyncio.to_thread(shared.dynamodb().ask, action, TableName=self._table, **request)


@asynccontextmanager
async def dynamodb_origin(keys: KeyKind) -> AsyncIterator[OriginBench]:
    if keys is not KeyKind.TEXT:
        raise UncheckedError("the bench has a table with texts as keys, each of them once")
    table = created("key")
    yield OriginBench(origin=origin_of(table), another=origin_of(table), rows=TableRows(table))


ORIGINS = {"dynamodb.origin": {"dynamodb": dynamodb_origin}}
SINKS = {
    "dynamodb.sink": {
        "dynamodb": dynamodb_sink(),
        "dynamodb with generations": dynamodb_sink(generation="reindexVersion"),
    }
}
