"""Reads an object of a test, whole or from a position on."""

from collections.abc import Coroutine, Sequence
from contextlib import aclosing

from ingest.chunked_store import ChunkedStore
from keywise.core.object_store import ObjectStore
from keywise.ingest.formats import format_of
from keywise.ingest.parts import Part, PartSettings
from keywise.ingest.reader import ReadPlan, open_object

NEVER_STOPS = 10**9
"""As `bad_records_min`: the share of bad records is of no interest."""


def read(content: bytes, plan: ReadPlan, sizes: Sequence[int] = (65536,), after: Part | None = None) -> list[Part]:
    """All parts of the content, or those behind a part."""
    return finish(parts_of(ChunkedStore({"o": content}, sizes), "o", plan, after))


def finish(reading: Coroutine[None, None, list[Part]]) -> list[Part]:
    """Run what waits for nothing outside, without an event loop: properties try thousands of them."""
    try:
        while True:
            reading.send(None)
    except StopIteration as over:
        parts: list[Part] = over.value
        return parts


async def parts_of(store: ObjectStore, name: str, plan: ReadPlan, after: Part | None = None) -> list[Part]:
    place, note = (after.place, after.note) if after else (0, b"")
    reader = await open_object(store, name, plan, place=place, note=note)
    assert reader is not None
    async with aclosing(reader.parts()) as parts:
        return [part async for part in parts]


def plan_of(given: object, compression: str = "auto", **settings: float) -> ReadPlan:
    limits = {"bad_records_min": NEVER_STOPS} | settings
    return ReadPlan(format_of(given), PartSettings(**limits), compression=compression)  # type: ignore[arg-type]


def records_of(parts: Sequence[Part]) -> list[bytes]:
    return [record for part in parts for record in part.records]
