"""All keys of a scope in Redis, page by page: in the order of their buckets, which never changes."""

from collections.abc import AsyncIterator, Iterable
from typing import Any

from keywise.adapters.redis.database import in_pairs
from keywise.adapters.redis.ledger.entry_encoding import ACTIVE, entry_of
from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import FIELDS
from keywise.core.entry import Entry

SCAN_AT_ONCE = 500


async def codes_after(scope: RedisScope, after: bytes, limit: int, others: Iterable[bytes]) -> list[bytes]:
    """Keys behind one, all for an empty one: those that have a mark, and others that are known to be there."""
    bucket = scope.bucket(after) if after else 0
    past = (bucket, after) if after else (-1, b"")
    elsewhere = [(scope.bucket(code), code) for code in others]
    found: list[tuple[int, bytes]] = []
    while bucket < scope.buckets_all and len(found) < limit:
        end, pages = await scope.call(FIELDS, bucket, scope.buckets_all, limit)
        here = {(n, code) for n, page in zip(pages[::2], pages[1::2], strict=True) for code in page}
        here |= {place for place in elsewhere if bucket <= place[0] < end}
        found += sorted(place for place in here if place > past)
        bucket = end
    return [code for _, code in found[:limit]]


async def active_entries(scope: RedisScope) -> AsyncIterator[tuple[bytes, Entry]]:
    """All keys that something is going on with."""
    async for page in _pages(scope, "HSCAN", "active"):
        for code, packed in in_pairs(page):
            entry = entry_of(ACTIVE + packed)
            assert entry is not None
            yield code, entry


async def charged_codes(scope: RedisScope) -> AsyncIterator[bytes]:
    """All keys whose rate was charged."""
    async for page in _pages(scope, "ZSCAN", "rates"):
        for code, _ in in_pairs(page):
            yield code


async def _pages(scope: RedisScope, command: str, name: str) -> AsyncIterator[Any]:
    cursor = b"0"
    while True:
        cursor, page = await scope.database.run(command, scope.key(name), cursor, "COUNT", SCAN_AT_ONCE)
        yield page
        if cursor == b"0":
            return
