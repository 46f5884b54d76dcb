"""The plan of a run: what an operator asks for, and the shards that follow from it."""

from collections.abc import Iterator, Sequence

import msgspec

from keywise.core.change import KEY_MAX_BYTES
from keywise.core.errors import AdminError, OriginError
from keywise.core.origin import CURSOR_MAX_BYTES, SHARDS_MAX, FilterableOrigin, Origin, Page, Shard, note_bytes
from keywise.reindex.shards import ShardProgress
from keywise.reindex.sweep import FETCH_KEYS

SHARD_ROWS = 10_000
"""About how many rows a shard has, if the operator does not say."""
SIZE_MAX = 2**40
"""An origin is asked for shards of at most so many rows: a store may keep numbers in 64 bits."""
NAME_MAX_BYTES = 512
"""The longest name of a shard. The ledger keeps it in the position of the shard, with its bounds and the cursor."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks of a new run."""

    generation: int | None = None
    """Write at this generation; None: at the next one. The same number again is the same run."""
    shard_rows: int = SHARD_ROWS
    keys: Sequence[str] | None = None
    """Read these keys only."""
    limit: int | None = None
    """Read so many rows at the most."""
    where: str = ""
    """Read only the rows for which this condition holds, in the language of the origin."""
    also_removed: bool = False
    """Also write rows at a version that an operator has removed."""
    delete_max: int | None = None
    """How many gone keys the run may delete without the operator's consent; None: 1 %, and at most 1,000."""
    is_checked: bool = True
    """Check some rows, and compare versions of the origin with those of the ledger, before the first write."""
    notify: str = ""
    """Send a notice to this URL when the run has ended."""
    into: str = ""
    """Fill this target beside the live one; `{generation}` in it stands for the generation of the run."""
    definition: bytes | None = None
    """The operator's definition of that target, such as a mapping; None: like the live one."""
    drops_old: bool = False
    """Once the checks have passed, drop the spare or the target of a cancelled run, to make room."""
    keeps_old: bool = False
    """With `drops_old`: forget the spare, but leave it in its store."""

    @property
    def is_partial(self) -> bool:
        return self.keys is not None or self.limit is not None or bool(self.where)

    async def shards(self, origin: Origin) -> list[ShardProgress]:
        """Divide the rows of the plan into one shard or more, of which nothing is read yet."""
        if self.keys is not None:
            if not self.keys:
                raise AdminError("there are no keys to read, so nothing was started; name one key a line")
            keys = self.keys if self.limit is None else self.keys[: self.limit]
            if (too_long := next((key for key in keys if len(key.encode()) > KEY_MAX_BYTES), None)) is not None:
                raise AdminError(f"key {too_long[:40]!r}… has more than {KEY_MAX_BYTES} bytes, so nothing was started")
            return [ShardProgress(Shard(f"keys {n}"), keys=some) for n, some in enumerate(_chunks(keys))]
        if self.where:
            assert isinstance(origin, FilterableOrigin), (
                "`LazyOrigin` has the method, and refuses for an origin without it"
            )
            shards = await origin.shards_where(self.where, min(self.shard_rows, SIZE_MAX))
        else:
            shards = await origin.shards(min(max(self.shard_rows, self.limit or 0), SIZE_MAX))
        _check_shards(shards)
        if self.limit is not None:
            return [ShardProgress(shard, rows_max=self.limit) for shard in shards[:1]]
        return [ShardProgress(shard) for shard in shards]


async def keys_without_row(origin: Origin, keys: Sequence[str]) -> list[str]:
    """Return which of these keys the origin does not have."""
    missing = list[str]()
    for start in range(0, len(keys), FETCH_KEYS):
        some = keys[start : start + FETCH_KEYS]
        found = await origin.fetch(some)
        missing += [key for key in some if key not in found]
    return missing


def check_page(page: Page, after: str) -> None:
    """Raise `OriginError` if a page, which was read after a cursor, breaks the contract of an origin."""
    if not page.is_last and not page.after:
        raise OriginError("the origin returned a page without a cursor that is not the last one of its shard")
    if not page.is_last and page.after == after:
        raise OriginError("the origin returned a page with the cursor that it was given, so the next one is the same")
    if note_bytes(page.after) > CURSOR_MAX_BYTES:
        raise OriginError(f"the cursor of the origin has more than {CURSOR_MAX_BYTES} bytes as JSON")


def _chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    """Divide keys into lists that fit into the position of a shard."""
    some: list[str] = []
    size = 0
    for key in dict.fromkeys(keys):
        length = len(msgspec.json.encode(key)) + 1
        if some and size + length > CURSOR_MAX_BYTES:
            yield some
            some, size = [], 0
        some.append(key)
        size += length
    if some:
        yield some


def _check_shards(shards: Sequence[Shard]) -> None:
    if not shards:
        raise OriginError("the origin has no shards; an origin without rows has one that is empty")
    if len(shards) > SHARDS_MAX:
        raise AdminError(f"the origin has {len(shards):,} shards, the limit is {SHARDS_MAX:,}; make them larger")
    names = {shard.name for shard in shards}
    if len(names) < len(shards):
        raise OriginError("the origin has two shards with one name; give each shard a name of its own")
    for shard in shards:
        if note_bytes(shard.bounds) > CURSOR_MAX_BYTES or note_bytes(shard.name) > NAME_MAX_BYTES:
            raise OriginError(
                f"shard {shard.name[:40]!r} has too much text: the limits are {NAME_MAX_BYTES} bytes for its name, and "
                f"{CURSOR_MAX_BYTES} for its bounds, as JSON"
            )
