"""The contract of an origin: the source of truth, which a reindex reads row by row while live changes flow."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from keywise.core.resource import AsyncResource

CURSOR_MAX_BYTES = 3 * 1024
"""The longest cursor, and the longest bounds of a shard: the ledger keeps both in the position of the shard.

It keeps them as JSON, so `note_bytes` counts."""
SHARDS_MAX = 100_000
"""The most shards of an origin."""


class Shard(msgspec.Struct, frozen=True):
    """A part of an origin, which one worker at a time reads. The shards of an origin cover every row exactly once."""

    name: str
    """It is unique in the origin, and the same text in every process."""
    bounds: str = ""
    """What `scan` needs to find the rows of the shard, in the words of the origin: a range of keys, or a segment."""
    rows: int | None = None
    """About how many rows it has; None if that is not known without reading them."""


class Page(msgspec.Struct, frozen=True):
    """Some rows of a shard, in the order in which it is scanned."""

    rows: Sequence[bytes]
    """Each row as the body of a message: the reader of the pipeline finds key and version in it."""
    after: str
    """The cursor after the last row; `scan` goes on there. It is not empty."""
    is_last: bool
    """Whether the shard ends here. Any other page may also have few rows, or none."""


class Origin(AsyncResource, Protocol):
    """Reads the current rows of the source of truth.

    A scan returns every row that exists during the whole scan. It may return or miss a row that is inserted or deleted
    meanwhile, because live changes announce that row. An adapter turns the errors of its client library into
    `UnavailableError`, and throttling into `ThrottledError`; it never retries by itself.
    """

    @property
    def is_consistent(self) -> bool:
        """Whether `fetch` sees every write that was confirmed before the call: it reads the primary, or consistently.

        If it does not, a key that is not found may only be lagging.
        """

    async def shards(self, size: int) -> Sequence[Shard]:
        """Divide the origin into shards of about `size` rows."""

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        """Return up to `limit` rows of a shard after a cursor; an empty cursor is before the first row."""

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return the current rows of these keys. A key that has no row is left out."""


def note_bytes(text: str) -> int:
    """Return how many bytes a text has in a position: JSON escapes quotes, backslashes and control characters."""
    return len(msgspec.json.encode(text)) - len('""')


@runtime_checkable
class FilterableOrigin(Protocol):
    """The ability of an origin to return only the rows for which a condition holds."""

    async def shards_where(self, condition: str, size: int) -> Sequence[Shard]:
        """Divide the origin into shards of about `size` rows; `scan` then returns only rows that match the condition.

        The condition is in the language of the store, and the bounds of each shard contain it. Raises `OriginError` if
        the store does not understand it.
        """
