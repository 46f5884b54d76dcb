"""A table of Amazon DynamoDB as an origin: segments of a parallel scan are its shards.

All reads are consistent. Tombstones of a sink of keywise are no rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from keywise.adapters.dynamodb.items import is_tombstone, row_of
from keywise.adapters.dynamodb.table import OPTIONS, TOMBSTONE, DynamoTable, table_at
from keywise.core.errors import AddressError
from keywise.core.origin import Origin, Page, Shard
from keywise.core.url import Address, redacted

SEGMENTS_MAX = 100_000
CONNECTIONS = 32
END = "end"
"""The cursor after the last row of a shard; any other cursor is `AFTER` and the key of a row."""
AFTER = "after "


class DynamoOrigin:
    """Reads the items of a table as JSON objects."""

    is_consistent = True

    def __init__(self, table: DynamoTable, tombstone: str = TOMBSTONE, segments: int | None = None) -> None:
        self._table = table
        self._tombstone = tombstone
        self._segments = segments

    async def __aenter__(self) -> Self:
        await self._table.open(CONNECTIONS)
        try:
            await self._table.find()
        except BaseException:
            await self._table.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._table.close()

    async def shards(self, size: int) -> Sequence[Shard]:
        """Divide the table into segments. DynamoDB spreads the keys over them by their hash.

        It counts rows about every six hours, so a table that was filled since then needs `segments=` in the URL.
        """
        rows = (await self._table.size()).rows
        count = self._segments or min(SEGMENTS_MAX, max(1, math.ceil(rows / size)))
        width = len(str(count - 1))
        return [
            Shard(f"segment {number:0{width}} of {count}", f"{number}/{count}", math.ceil(rows / count))
            for number in range(count)
        ]

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        """Read a page. DynamoDB ends it after 1 MB at the latest, so it may have fewer rows than `limit`."""
        if after == END:
            return Page([], END, is_last=True)
        number, _, count = shard.bounds.partition("/")
        request: dict[str, Any] = {
            "Segment": int(number),
            "TotalSegments": int(count),
            "Limit": limit,
            "ConsistentRead": True,
        }
        if after:
            request["ExclusiveStartKey"] = self._table.key_of(after.removeprefix(AFTER))
        answer = await self._table.ask("scan", **request)
        rows = [row_of(item) for item in answer.get("Items", ()) if not is_tombstone(item, self._tombstone)]
        last = answer.get("LastEvaluatedKey")
        return Page(rows, AFTER + last[self._table.key]["S"] if last else END, is_last=not last)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        found = await self._table.items(keys)
        return {key: row_of(item) for key, item in found.items() if not is_tombstone(item, self._tombstone)}


def connect(address: Address) -> Origin:
    """Make the origin for `dynamodb://TABLE?key=id`; the table is named like the pipeline by default."""
    options = address.take("key", "tombstone", "segments", *OPTIONS)
    segments = options.get("segments")
    if segments is not None and not (segments.isascii() and segments.isdigit() and 1 <= int(segments) <= SEGMENTS_MAX):
        raise AddressError(f"{redacted(address.url)}: segments={segments} has to be a number from 1 to {SEGMENTS_MAX}")
    table = table_at(address, options)
    return DynamoOrigin(table, options.get("tombstone", TOMBSTONE), int(segments) if segments else None)
