"""What each of the stores shows to the public: the version of every document that can be found there."""

from collections.abc import Sequence

import msgspec

from keywise.adapters.http.client import HttpClient, server_at
from keywise.core.sink import ReadableSink
from keywise.core.url import Address


class Shelf(msgspec.Struct, frozen=True):
    """One store at one moment."""

    versions: dict[str, int | None]
    updates: int = 0
    refusals: int = 0
    """How often it was asked too soon."""


async def read_search(sink: ReadableSink, keys: Sequence[str]) -> Shelf:
    """Whatever store the search is in: a sink that can be read tells what it holds."""
    held = await sink.read(keys)
    return Shelf({key: content.version for key, content in held.items()})


async def read_store(url: str) -> Shelf:
    """The store that is rate limited."""
    server = server_at(Address(url, "", {}), "http", {})
    async with HttpClient(server) as client:
        answer = await client.request("GET", "/documents", timeout_s=10)
    return msgspec.json.decode(answer.body, type=Shelf)
