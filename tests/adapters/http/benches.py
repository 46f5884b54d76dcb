"""Factories for the HTTP sink: benches on a real service, each with documents of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.benches import BAD
from keywise.adapters.http.sink import connect
from keywise.core.url import Address
from keywise.testing.conformance import SinkBench
from servers import shared


def http_sink(options: str = "", *, encrypted: bool = False, **rules: object):
    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        space = shared.http().space(refuses=BAD.key, **rules)

        async def content() -> dict[str, bytes]:
            return {key: body.encode() for key, body in space.documents.items()}

        place = f"{space.tls_url}?ca={space.service.ca}" if encrypted else f"{space.url}?timeout=10s"
        url = f"{place}&missing=no+such+document&{options}"
        async with connect(Address(url, "bench", {})) as sink:
            yield SinkBench(sink=sink, content=content, bad=BAD)

    return make


PLAIN = {
    "http": http_sink(),
    "http with POST": http_sink("put=POST&delete=POST"),
    "https": http_sink(encrypted=True),
}
CONDITIONAL = {
    "http conditional": http_sink("grade=conditional", conditional=409),
    "http conditional that refuses what is equal": http_sink(
        "grade=conditional&superseded=412", conditional=412, refuses_equal=True, tells=True
    ),
}
SINKS = {"http.sink": PLAIN | CONDITIONAL}
