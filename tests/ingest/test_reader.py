"""Reading an object of a store: ranges, lost connections, and objects that are replaced or removed meanwhile."""

import asyncio
import gzip
from contextlib import aclosing

import pytest

from ingest.chunked_store import ChunkedStore
from ingest.reading import parts_of, plan_of, records_of
from keywise.core.errors import ObjectReplacedError, UnavailableError
from keywise.ingest.reader import ObjectReader, open_object
from running import awaited

LINES = b"".join(b"%d\n" % number for number in range(1000))
PLAN = plan_of("lines", part_records=100, part_bytes=500)


async def opened(store: ChunkedStore, **position: object) -> ObjectReader:
    reader = await open_object(store, "o", PLAN, **position)  # type: ignore[arg-type]
    assert reader is not None
    return reader


@awaited
async def test_an_object_that_the_store_does_not_have_is_none():
    store = ChunkedStore({"o": LINES})
    part = (await parts_of(store, "o", PLAN))[0]
    store.delete("o")
    assert await open_object(store, "o", PLAN) is None
    assert await open_object(store, "o", PLAN, place=part.place, note=part.note) is None


@awaited
async def test_the_reader_knows_the_etag_and_the_size():
    reader = await opened(ChunkedStore({"o": LINES}))
    assert (reader.etag, reader.size) == ('"o-0"', len(LINES))


@awaited
async def test_a_plain_object_is_resumed_with_a_range_behind_the_part():
    store = ChunkedStore({"o": LINES})
    parts = await parts_of(store, "o", PLAN)
    assert await parts_of(store, "o", PLAN, parts[3]) == parts[4:]
    behind = LINES.index(b"\n%d\n" % parts[3].place) + 1
    assert store.gets == [("o", 0, ""), ("o", behind, '"o-0"')]


@awaited
async def test_an_object_that_was_replaced_since_its_part_is_not_resumed():
    store = ChunkedStore({"o": LINES})
    part = (await parts_of(store, "o", PLAN))[0]
    store.put("o", LINES)
    with pytest.raises(ObjectReplacedError):
        await opened(store, place=part.place, note=part.note)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@awaited
async def test_a_lost_connection_is_opened_again_where_it_broke_off(pack):
    data = pack(LINES)
    store = ChunkedStore({"o": data}, [100])
    whole = await parts_of(store, "o", PLAN)
    store.gets.clear()
    store.chunks_until_lost = [3, 2]
    assert await parts_of(store, "o", PLAN) == whole
    assert store.gets == [("o", 0, ""), ("o", 300, '"o-0"'), ("o", 500, '"o-0"')]


@awaited
async def test_a_store_that_sends_nothing_any_more_is_unavailable():
    store = ChunkedStore({"o": LINES}, [100])
    store.chunks_until_lost = [3, 0]
    with pytest.raises(UnavailableError):
        await parts_of(store, "o", PLAN)


@awaited
async def test_an_object_that_is_replaced_or_removed_before_a_connection_is_opened_again_is_replaced():
    for change in (lambda store: store.put("o", LINES), lambda store: store.delete("o")):
        store = ChunkedStore({"o": LINES}, [1000])
        store.chunks_until_lost = [2]
        reader, places = await opened(store), []
        with pytest.raises(ObjectReplacedError):
            async with aclosing(reader.parts()) as parts:
                async for part in parts:
                    places.append(part.place)
                    change(store) if len(places) == 1 else None
        assert places


@awaited
async def test_a_stream_that_ends_early_is_not_the_end_of_the_object():
    class ShortStore(ChunkedStore):
        """Ends its first stream in the middle, without an error."""

        async def _chunks(self, content, lost_after):
            if len(self.gets) == 1:
                content = content[:1000]
            async for chunk in super()._chunks(content, lost_after):
                yield chunk

    store = ShortStore({"o": LINES})
    assert records_of(await parts_of(store, "o", PLAN)) == LINES.split()
    assert store.gets == [("o", 0, ""), ("o", 1000, '"o-0"')]


@awaited
async def test_leaving_early_ends_the_request():
    ended = asyncio.Event()

    class WatchedStore(ChunkedStore):
        async def _chunks(self, content, lost_after):
            try:
                async for chunk in super()._chunks(content, lost_after):
                    yield chunk
            finally:
                ended.set()

    reader = await opened(WatchedStore({"o": LINES}, [1000]))
    async with aclosing(reader.parts()) as parts:
        async for _ in parts:
            break
    assert ended.is_set()


@awaited
async def test_an_object_of_a_few_bytes_may_have_several_parts():
    parts = await parts_of(ChunkedStore({"o": b"\n\na"}), "o", plan_of("lines", part_bytes=1))
    assert [part.records for part in parts] == [[b""], [b""], [b"a"]]
