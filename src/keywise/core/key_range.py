"""Ranges of keys as the shards of an origin that reads a table in the order of its key column."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from keywise.core.errors import AdminError, OriginError
from keywise.core.origin import CURSOR_MAX_BYTES, SHARDS_MAX, Page, Shard, note_bytes

BOUND_MAX_BYTES = 320
"""The longest key that bounds a shard: two of them fit into its `bounds`, even if it has quotes only."""
CONDITION_MAX_BYTES = 500
"""The longest condition: it is kept in the note of each shard."""

_BEGIN = "<"
"""The cursor before the first row of a shard; the cursor after a row is `=` and the key of the row."""


class KeyRange(msgspec.Struct, frozen=True, array_like=True):
    """The keys after `low`, up to and including `high`, in the order of the key column. None: no bound."""

    low: str | None = None
    high: str | None = None
    condition: str = ""
    """Only the rows for which this SQL condition holds; empty: all."""

    @property
    def test(self) -> str:
        """The condition as one operand of a larger condition.

        The line break ends a comment in it, and `case … end` keeps a stray bracket from changing the statement.
        """
        return f"case when {self.condition}\nthen true end"

    @property
    def checks(self) -> Sequence[str]:
        """What has to follow `where` in a statement that the store understands, or the condition is not one by itself.

        One that ends the `case` of the test and begins another stands alone in neither place.
        """
        return f"{self.test} limit 0", f"{self.condition}\nlimit 0"


def cause_of_condition(error: Exception) -> str:
    """Return why a store does not understand a condition, without the test that was put around it."""
    cause, *own = str(error).split("\n")
    # Databases quote the rest of the statement after an open quote.
    return f'{cause}"' if own and cause.count('"') % 2 else cause


ReadRows: TypeAlias = Callable[[KeyRange, int], Awaitable[Sequence[tuple[str, bytes]]]]
"""Reads the first rows of a range, up to a limit: the key of each, and the row as the body of a message."""


async def shards_by_keys(key_after: Callable[[str | None, int], Awaitable[str | None]], size: int) -> list[Shard]:
    """Divide a table into ranges of `size` rows.

    `key_after(low, size)` returns the key that is `size` keys after `low` (None: from the first key on), or None if
    fewer keys follow. It skips keys that are too long for a bound. Each call reads a part of the index, so no statement
    runs for long on a large table. Raises `AdminError` as soon as there are too many shards.
    """
    bounds: list[str | None] = [None]
    while (key := await key_after(bounds[-1], size)) is not None:
        while key is not None and not _is_bound(key):
            key = await key_after(key, 1)
        if key is None:
            break
        bounds.append(key)
        if len(bounds) > SHARDS_MAX:
            raise AdminError(
                f"the origin has more than {SHARDS_MAX:,} shards of about {size:,} rows; make them larger with "
                "--shard-rows"
            )
    # The last shard has no end, so that every key that is inserted later is in some shard.
    ends = [*bounds[1:], None]
    return [
        Shard(f"{number:08}", msgspec.json.encode(KeyRange(low, high)).decode(), None if high is None else size)
        for number, (low, high) in enumerate(zip(bounds, ends, strict=True))
    ]


def with_condition(shards: Sequence[Shard], condition: str) -> list[Shard]:
    """Return shards with only the rows for which a condition holds; how many rows they have is not known."""
    if len(condition.encode()) > CONDITION_MAX_BYTES:
        raise OriginError(f"a condition has at most {CONDITION_MAX_BYTES} bytes; write the keys into a file instead")
    ranges = [replace(msgspec.json.decode(one.bounds, type=KeyRange), condition=condition) for one in shards]
    return [Shard(one.name, msgspec.json.encode(within).decode()) for one, within in zip(shards, ranges, strict=True)]


async def read_page(read: ReadRows, shard: Shard, after: str, limit: int) -> Page:
    """Read the rows of a shard after a cursor.

    The page has more than `limit` rows if the key of the last one is too long for a cursor.
    """
    within = msgspec.json.decode(shard.bounds, type=KeyRange)
    low = within.low if after in ("", _BEGIN) else after.removeprefix("=")
    found = list(await read(replace(within, low=low), limit))
    is_last = len(found) < limit
    while not is_last and not _fits(found[-1][0]):
        more = await read(replace(within, low=found[-1][0]), limit)
        found += more
        is_last = len(more) < limit
    if found and _fits(found[-1][0]):
        after = f"={found[-1][0]}"
    return Page([row for _, row in found], after or _BEGIN, is_last)


def _fits(key: str) -> bool:
    return note_bytes(key) < CURSOR_MAX_BYTES


def _is_bound(key: str) -> bool:
    """Whether two keys like this one fit into the bounds of a shard, which are JSON within JSON."""
    return note_bytes(msgspec.json.encode(key).decode()) <= CURSOR_MAX_BYTES // 2 - len("[,null]")
