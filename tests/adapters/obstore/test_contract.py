"""The contract of object stores, on a folder, in memory, on a real SeaweedFS, and on the store of other tests."""

import itertools
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import obstore
import pytest

from ingest.chunked_store import ChunkedStore
from ingest.reading import parts_of, plan_of, records_of
from keywise import adapters
from keywise.adapters.obstore import store as stores
from keywise.core.errors import ObjectError, ObjectReplacedError
from keywise.core.object_store import ObjectStore
from keywise.core.url import Address
from running import awaited
from servers import seaweedfs, shared

NAME = "a b+c=1/é%2F.ndjson"
_buckets = itertools.count()


class StoreBench:
    """A store that is open, and the way to put objects into it."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self.store = store
        self.url = url

    def put(self, name: str, content: bytes) -> None:
        if isinstance(self.store, ChunkedStore):
            self.store.put(name, content)
        else:
            assert isinstance(self.store, stores.BucketStore | stores.FolderStore)
            obstore.put(self.store.client, name, content)

    def delete(self, name: str) -> None:
        if isinstance(self.store, ChunkedStore):
            self.store.delete(name)
        else:
            assert isinstance(self.store, stores.BucketStore | stores.FolderStore)
            obstore.delete(self.store.client, name)


Make = Callable[[], StoreBench]


@pytest.fixture(params=["file", "memory", "chunked", pytest.param("s3", marks=pytest.mark.server("seaweedfs"))])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    if request.param == "chunked":
        return lambda: StoreBench(ChunkedStore(), "chunked")
    url = {"file": f"file://{tmp_path}", "memory": "memory://"}.get(request.param, "")
    if request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.SECRET_KEY)
        url = f"s3://bucket{next(_buckets)}?endpoint={shared.seaweed().url}"
    return lambda: StoreBench(adapters.connect_store(Address(url, "logs", {})), url)


async def content_of(store: ObjectStore, name: str, start: int = 0, if_match: str = "") -> bytes | None:
    stream = await store.get(name, start, if_match)
    if stream is None:
        return None
    async with aclosing(stream.chunks) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def etag_of(store: ObjectStore, name: str) -> str:
    stream = await store.get(name)
    assert stream is not None
    await stream.chunks.aclose()
    return stream.etag


async def names_of(store: ObjectStore, **options: str) -> list[str]:
    return [one.name async for page in store.list_objects(**options) for one in page]


@awaited
async def test_a_get_answers_with_the_etag_the_size_and_the_content(make: Make):
    bench = make()
    async with bench.store as store:
        bench.put(NAME, b"0123456789")
        stream = await store.get(NAME, 4)
        assert stream is not None
        assert (stream.size, [chunk async for chunk in stream.chunks]) == (10, [b"456789"])
        assert await content_of(store, NAME, 4, stream.etag) == b"456789"
        assert await content_of(store, NAME) == b"0123456789"


@awaited
async def test_a_start_at_or_behind_the_end_gives_nothing(make: Make):
    bench = make()
    async with bench.store as store:
        bench.put("ten", b"0123456789")
        bench.put("empty", b"")
        ten, empty = await etag_of(store, "ten"), await etag_of(store, "empty")
        for name, start, etag in (
            ("ten", 10, ten),
            ("ten", 11, ""),
            ("empty", 0, ""),
            ("empty", 0, empty),
            ("empty", 5, ""),
        ):
            assert await content_of(store, name, start, etag) == b"", (name, start)


@awaited
async def test_an_object_that_was_replaced_is_refused_with_any_start(make: Make):
    bench = make()
    async with bench.store as store:
        bench.put(NAME, b"0123456789")
        etag = await etag_of(store, NAME)
        bench.put(NAME, b"abc")
        for start in (0, 2, 3, 8):
            with pytest.raises(ObjectReplacedError, match="was replaced while it was read; it is read again"):
                await store.get(NAME, start, etag)
        assert await content_of(store, NAME, 1, await etag_of(store, NAME)) == b"bc"


@awaited
async def test_an_object_that_is_not_there_is_none(make: Make):
    bench = make()
    async with bench.store as store:
        bench.put("other", b"x")
        bench.put("folder/x", b"x")
        assert await store.get("missing") is None
        assert await store.get("folder") is None
        assert await store.get("missing", 3, '"x"') is None
        bench.put("missing", b"x")
        bench.delete("missing")
        assert await store.get("missing") is None


@awaited
async def test_all_objects_are_listed_with_their_etags_and_sizes(make: Make):
    bench = make()
    names = [NAME, "a.txt", "a/b", "a/b.c/d", "a/b/c", "b", "ba/x", "é"]
    async with bench.store as store:
        for name in (name for name in names if name != "a/b"):
            bench.put(name, name.encode())
        found = {one.name: one async for page in store.list_objects() for one in page}
        assert sorted(found) == sorted(name for name in names if name != "a/b")
        assert {one.size for one in found.values()} == {len(name.encode()) for name in found}
        for name, one in found.items():
            assert one.etag == await etag_of(store, name)


@awaited
async def test_a_listing_has_a_prefix_and_a_beginning(make: Make):
    bench = make()
    async with bench.store as store:
        for name in ("a/1", "a/2", "a/3", "ab/1", "b/1"):
            bench.put(name, b"x")
        assert await names_of(store, prefix="a/") == ["a/1", "a/2", "a/3"]
        assert await names_of(store, prefix="a") == ["a/1", "a/2", "a/3", "ab/1"]
        assert await names_of(store, prefix="a/", after="a/1") == ["a/2", "a/3"]
        assert await names_of(store, after="a/2") == ["a/3", "ab/1", "b/1"]
        assert await names_of(store, prefix="c") == []


@awaited
async def test_an_object_is_read_in_parts_and_resumed(make: Make):
    bench, plan = make(), plan_of("lines", part_bytes=1_000_000, part_records=200_000)
    content = b"".join(b"%07d\n" % number for number in range(500_000))
    async with bench.store as store:
        bench.put(NAME, content)
        parts = await parts_of(store, NAME, plan)
        assert records_of(parts) == content.split()
        assert len(parts) == 4
        for number, part in enumerate(parts[:-1]):
            assert await parts_of(store, NAME, plan, part) == parts[number + 1 :]
        (rest,) = await parts_of(store, NAME, plan, parts[-1])
        assert (rest.count, rest.is_last) == (0, True)


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "a/./b", "../a", "", "a\nb"])
@awaited
async def test_a_name_that_the_client_cannot_ask_for_is_refused(name: str):
    async with adapters.connect_store(Address("memory://", "logs", {})) as store:
        with pytest.raises(
            ObjectError, match=r"^memory://: the object .* cannot be read, .*; copy it to another name$"
        ):
            await store.get(name)
