"""Checks some rows of the origin before a run writes anything: they are messages, with versions as in the ledger.

If the versions of the origin had another unit than those of the messages, such as microseconds instead of 1, 2, 3, they
could make every later live change stale. Rows that cannot be read as messages would all become dead letters.
"""

from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress

import msgspec

from keywise.core.change import Order, is_unversioned
from keywise.core.controls import ReindexRun
from keywise.core.errors import AdminError, MalformedError
from keywise.core.origin import Origin
from keywise.core.sink import ColumnSink
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.rows import UNVERSIONED, RowReader, row_deliveries
from keywise.reindex.shards import ShardProgress, entries_of
from keywise.reindex.sweep import FETCH_KEYS

SAMPLE_ROWS = 50
"""How many rows of the first shard are read as messages."""
EXAMPLE_BYTES = 200
SAMPLE_KEYS = 200
"""How many quiet keys are compared."""
QUIET_S = 60.0
"""A key counts as quiet, and is compared, if nothing has happened to it for so long."""
EQUAL_SHARE = 0.5
"""At least this share of the compared keys has to have the same version on both sides."""
SCALE_MAX = 100
"""If no key is quiet: versions that differ by more than this factor have another unit."""
EXAMPLES = 3


async def check_rows(pipeline: OpenPipeline, origin: Origin, first: ShardProgress) -> None:
    """Raise `AdminError` if most of the first rows of a shard cannot be read as messages, or have no version."""
    if first.keys:
        rows: Sequence[bytes] = [*(await origin.fetch(first.keys[:SAMPLE_ROWS])).values()]
    else:
        rows = (await origin.scan(first.shard, "", SAMPLE_ROWS)).rows
    # The generation does not matter: nothing is decided here.
    read_batch = RowReader(pipeline.reader, ReindexRun(0)).read(row_deliveries("check", rows, 0.0), 0, 0.0)
    bad = read_batch.malformed
    if len(bad) * 2 > len(rows) and bad[0].cause == UNVERSIONED:
        raise AdminError(
            f"the rows of pipeline {pipeline.name!r} have no version, and only versioned rows can be reindexed; name "
            "the field that has it with version= of the pipeline"
        )
    if len(bad) * 2 > len(rows):
        example = bad[0].delivery.body[:EXAMPLE_BYTES].decode(errors="replace")
        raise AdminError(
            f"{len(bad)} of the first {len(rows)} rows cannot be read as messages of pipeline {pipeline.name!r}: "
            f"{bad[0].cause}; the first one is {example}; nothing was written; a row has to look like a message: name "
            "its columns as the fields of a message are named, or the column that has the whole message with body="
        )
    _check_columns(pipeline, [one.change.body for one in read_batch.tickets if not one.change.deleted])


def _check_columns(pipeline: OpenPipeline, bodies: Sequence[bytes]) -> None:
    """Raise `AdminError` if no row has a field that the sink stores: its column would be empty in every row."""
    columns = pipeline.sink.columns if isinstance(pipeline.sink, ColumnSink) else ()
    if not columns or not bodies:
        return
    fields = {name for body in bodies for name in _fields_of(body)}
    if missing := [name for name in columns if name not in fields]:
        others = f"; their other fields are {', '.join(sorted(fields - {*columns}))}" if fields - {*columns} else ""
        raise AdminError(
            f"none of the first {len(bodies)} rows of pipeline {pipeline.name!r} has {', '.join(missing)}, which its "
            f"sink stores in columns of their own{others}; nothing was written; those columns would become empty, so "
            "name the columns of the origin as the fields of a message are named, or take these out of columns= of the "
            "sink; if this is meant, start with --unchecked"
        )


def _fields_of(body: bytes) -> Iterable[str]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return ()  # The run makes it a dead letter.


async def check_versions(pipeline: OpenPipeline, origin: Origin) -> int:
    """Raise `AdminError` unless half of the quiet keys have the same version on both sides.

    Returns how many keys were compared. Not all have to be equal: a key that the origin has at a newer version most
    likely has a message on its way. If no key is quiet, as in a pipeline that has just begun, the others are compared,
    and only have to be of the same scale: their rows change while they are read.
    """
    quiet, recent = await _some_marks(pipeline)
    compared = await _compared(pipeline, origin, quiet)
    different = {key: pair for key, pair in compared.items() if pair[0] != pair[1]}
    which = "quiet keys have another version in the origin"
    if not compared:
        compared = await _compared(pipeline, origin, recent)
        different = {key: pair for key, pair in compared.items() if not _is_same_scale(*pair)}
        which = f"keys have versions in the origin that differ by more than a factor of {SCALE_MAX}"
    if len(different) > len(compared) * (1 - EQUAL_SHARE):
        examples = "; ".join(
            f"{key!r} is at {ledger} in the ledger and at {found} in the origin"
            for key, (ledger, found) in list(different.items())[:EXAMPLES]
        )
        raise AdminError(
            f"{len(different)} of {len(compared)} {which}, so its versions seem to have another unit, or live changes "
            f"are far behind: {examples}; nothing was written; if this is meant, start with --unchecked"
        )
    return len(compared)


async def _compared(pipeline: OpenPipeline, origin: Origin, marks: dict[str, Order]) -> dict[str, tuple[int, int]]:
    """Return the versions of keys in the ledger and in the origin; keys without a row to read are left out."""
    versions = await _versions(pipeline, origin, list(marks))
    return {key: (marks[key][1], version) for key, version in versions.items()}


def _is_same_scale(one: int, other: int) -> bool:
    """Whether two versions may have the same unit, such as seconds, or the numbers 1, 2, 3."""
    least, most = sorted((max(abs(one), 1), max(abs(other), 1)))
    return most <= least * SCALE_MAX


async def _some_marks(pipeline: OpenPipeline) -> tuple[dict[str, Order], dict[str, Order]]:
    """Return the marks of some keys with a row: of quiet ones, and of others.

    Raises `AdminError` if the pipeline has no versions.
    """
    quiet, recent = dict[str, Order](), dict[str, Order]()
    before = await pipeline.admin.now() - QUIET_S
    async with aclosing(entries_of(pipeline.ledger)) as entries:
        async for key, entry in entries:
            mark = entry.mark
            if mark is not None and is_unversioned(mark):
                raise AdminError(
                    f"the messages of pipeline {pipeline.name!r} have no version, and a row without one cannot be "
                    "compared with them; only versioned pipelines can be reindexed"
                )
            if mark is None or entry.deleted:
                continue
            if entry.updated_at <= before:
                quiet[key] = mark
            elif len(recent) < SAMPLE_KEYS:
                recent[key] = mark
            if len(quiet) == SAMPLE_KEYS:
                break
    return quiet, recent


async def _versions(pipeline: OpenPipeline, origin: Origin, keys: list[str]) -> dict[str, int]:
    """Return the versions that the rows of these keys have in the origin; a row that cannot be read is left out.

    Raises `AdminError` if the origin returns the row of another key.
    """
    versions: dict[str, int] = {}
    for start in range(0, len(keys), FETCH_KEYS):
        some = keys[start : start + FETCH_KEYS]
        rows = await origin.fetch(some)
        for key in some:
            if (row := rows.get(key)) is None:
                continue
            with suppress(MalformedError):  # The run makes it a dead letter.
                change = pipeline.reader.read_one(row)
                if change.key != key:
                    raise AdminError(
                        f"asked for the row of {key!r}, the origin has returned the row of {change.key!r}; nothing was "
                        f"written; see that the key column of the origin has what pipeline {pipeline.name!r} reads as "
                        "the key of a message"
                    )
                if change.version is not None:
                    versions[key] = change.version
    return versions
