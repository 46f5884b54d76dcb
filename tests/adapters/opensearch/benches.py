"""A factory for the sink on OpenSearch: benches on a real engine, with indexes that nobody else uses."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from keywise.adapters.opensearch.sink import connect
from keywise.core.change import Change, order_of
from keywise.core.url import Address
from keywise.testing.conformance import SinkBench
from servers import shared

BAD = Change("bad", order_of(1), body=b'{"number":"none"}')
_numbers = itertools.count(1)


@asynccontextmanager
async def opensearch_sink() -> AsyncIterator[SinkBench]:
    """An alias of an index, from which it can move to others."""
    server, name = shared.opensearch(), f"bench_{next(_numbers)}"
    server.index(f"{name}-0", {"number": "integer"})
    server.ask("PUT", f"/{name}-0/_alias/{name}")

    async def content() -> dict[str, bytes]:
        found = await asyncio.to_thread(server.documents, name)
        return {key: msgspec.json.encode(body) for key, body in found.items()}

    url = f"{server.url}/{name}"
    try:
        async with connect(Address(url, "bench", {})) as sink, connect(Address(url, "bench", {})) as again:
            another = SinkBench(sink=again, content=content, bad=BAD)
            yield SinkBench(sink=sink, content=content, bad=BAD, another=another)
    finally:
        server.ask("DELETE", f"/{name}-*")


SINKS = {"opensearch.sink": {"opensearch": opensearch_sink}}
