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
    server, index = shared.opensearch(), f"bench_{next(_numbers)}"
    url = server.index(index, {"number": "integer"})

    async def content() -> dict[str, bytes]:
        found = await asyncio.to_thread(server.documents, index)
        return {key: msgspec.json.encode(body) for key, body in found.items()}

    try:
        async with connect(Address(url, "bench", {})) as sink:
            yield SinkBench(sink=sink, content=content, bad=BAD)
    finally:
        server.ask("DELETE", f"/{index}")


SINKS = {"opensearch.sink": {"opensearch": opensearch_sink}}
