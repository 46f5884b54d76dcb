"""Folders and buckets: what is gone and what only looks so, what may not be read, and what a URL may say."""

import asyncio
import os
import sys
from contextlib import aclosing
from pathlib import Path

import obstore
import pytest

from keywise import adapters
from keywise.adapters.obstore import store as stores
from keywise.core.errors import (
    AddressError,
    MissingExtraError,
    ObjectAccessError,
    ObjectReplacedError,
    UnavailableError,
)
from keywise.core.object_store import ObjectStore
from keywise.core.url import Address
from running import awaited
from servers import seaweedfs, shared

LARGE = stores.CHUNK_BYTES * 3


def store_at(url: str) -> ObjectStore:
    return adapters.connect_store(Address(url, "logs", {}))


@pytest.fixture
def as_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.SECRET_KEY)


@awaited
async def test_nothing_is_gone_from_a_folder_that_is_missing_or_empty(tmp_path: Path):
    folder = tmp_path / "mount"
    folder.mkdir()
    (folder / "o").write_bytes(b"x")
    async with store_at(f"file://{folder}") as store:
        assert await store.get("missing") is None
        (folder / "o").unlink()
        for _ in ("empty", "missing"):
            with pytest.raises(
                UnavailableError, match=r"mount is missing or empty, .* about 'o'; mount it, or put a file"
            ):
                await store.get("o")
            with pytest.raises(UnavailableError, match=r"no answer about a listing; mount it, or put a file"):
                _ = [page async for page in store.list_objects()]
            if folder.exists():
                folder.rmdir()
        folder.mkdir()
        (folder / ".keep").touch()
        assert await store.get("o") is None


@awaited
async def test_a_folder_that_is_missing_cannot_be_opened(tmp_path: Path):
    with pytest.raises(UnavailableError, match="is no folder; create or mount it"):
        async with store_at(f"file://{tmp_path}/none"):
            pass


@awaited
async def test_a_file_that_is_changed_in_place_while_it_is_read_is_replaced(tmp_path: Path):
    path = tmp_path / "o"

    def append() -> None:
        with path.open("ab") as file:
            file.write(b"y")

    for change in (append, lambda: os.truncate(path, 5), lambda: path.write_bytes(b"y" * LARGE), path.unlink):
        path.write_bytes(b"x" * LARGE)
        async with store_at(f"file://{tmp_path}") as store:
            (tmp_path / "other").touch()
            stream = await store.get("o")
            assert stream is not None
            async with aclosing(stream.chunks) as chunks:
                assert len(await anext(chunks)) == stores.CHUNK_BYTES
                change()
                with pytest.raises(ObjectReplacedError):
                    _ = [chunk async for chunk in chunks]


@awaited
async def test_a_folder_is_listed_by_name_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "PAGE_OBJECTS", 2)
    names = ["a!", "a.b/1", "a/1", "a/b/2", "a/c", "b"]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    async with store_at(f"file://{tmp_path}") as store:
        pages = [[one.name for one in page] async for page in store.list_objects()]
        assert pages == [names[:2], names[2:4], names[4:]]
        for number, after in enumerate(names):
            rest = [one.name async for page in store.list_objects(after=after) for one in page]
            assert rest == names[number + 1 :]


@pytest.mark.server("seaweedfs")
@awaited
async def test_nothing_is_gone_from_a_bucket_that_is_missing(as_owner: None):
    async with store_at(f"s3://no-such-bucket?endpoint={shared.seaweed().url}") as store:
        with pytest.raises(
            UnavailableError, match=r"its bucket does not answer either, .* check the name of the bucket"
        ):
            await store.get("o")
        with pytest.raises(UnavailableError, match="NoSuchBucket"):
            _ = [page async for page in store.list_objects()]


@pytest.mark.server("seaweedfs")
@awaited
async def test_what_may_not_be_read_is_not_gone(as_owner: None, monkeypatch: pytest.MonkeyPatch):
    server = shared.seaweed()
    url = f"s3://rights?endpoint={server.url}"
    async with store_at(url) as owner:
        assert isinstance(owner, stores.BucketStore)
        obstore.put(owner.client, "o", b"x")
    async with store_at(f"{url}&anonymous=true") as store:
        for name in ("o", "missing"):
            with pytest.raises(ObjectAccessError, match="may not be read with these credentials; check them"):
                await store.get(name)
        with pytest.raises(ObjectAccessError, match="s3:ListBucket"):
            _ = [page async for page in store.list_objects()]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.READER_SECRET_KEY)
    async with store_at(url) as reader:
        assert await reader.get("o") is not None
        with pytest.raises(ObjectAccessError, match=r"the bucket may not be listed .* grant that right"):
            await reader.get("missing")


@pytest.mark.server("seaweedfs")
@awaited
async def test_a_server_that_is_away_is_unavailable(as_owner: None):
    with seaweedfs.seaweedfs_server() as server:
        async with store_at(f"s3://away?endpoint={server.url}") as store:
            assert isinstance(store, stores.BucketStore)
            obstore.put(store.client, "o", b"x")
            assert await store.get("missing") is None
            server.stop()
            for name in ("o", "missing"):
                with pytest.raises(UnavailableError, match=f"'{name}' cannot be reached"):
                    await store.get(name, 1)


@pytest.mark.server("seaweedfs")
@awaited
async def test_a_connection_that_is_cut_off_inside_an_object_is_unavailable(as_owner: None):
    with seaweedfs.seaweedfs_server() as server:
        async with store_at(f"s3://cut?endpoint={server.url}") as store:
            assert isinstance(store, stores.BucketStore)
            obstore.put(store.client, "o", os.urandom(16 * LARGE))
            stream = await store.get("o")
            assert stream is not None
            async with aclosing(stream.chunks) as chunks:
                await anext(chunks)
                server.stop()
                with pytest.raises(UnavailableError):
                    _ = [chunk async for chunk in chunks]


@awaited
async def test_a_message_shows_what_the_server_said_and_no_dump_of_the_client(as_owner: None):
    with pytest.raises(UnavailableError) as raised:
        async with store_at("s3://b?endpoint=http://127.0.0.1:9") as store:
            await store.get("o")
    assert str(raised.value).startswith("s3://b?endpoint=http://127.0.0.1:9: 'o' cannot be reached: ")
    assert "Debug source" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3://key:secret@bucket",
            r"^s3://key:\*\*\*@bucket has credentials, which do not belong into a URL; set AWS_",
        ),
        ("s3://bucket/folder", "has to name a bucket and no path; write for example s3://uploads"),
        ("gs://", "has to name a bucket and no path; write for example gs://uploads"),
        ("s3://bucket?endpont=x", r"unknown option 'endpont'; did you mean endpoint\?"),
        ("gs://bucket?region=x", "unknown option 'region'"),
        ("s3://bucket?anonymous=yes", "anonymous is true or false"),
        ("file://folder", "names no folder; write three slashes and the whole path, for example file:///var/uploads"),
        ("file:///", "names no folder"),
        ("file:///x?a=b", "unknown option 'a'; known are: none"),
        ("ftp://x", "no store understands ftp:// in ftp://x; known are: file, gs, memory, s3"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, message: str):
    with pytest.raises(AddressError, match=message):
        store_at(url)


class CannedServer:
    """Answers requests in the protocol of Google Cloud Storage as a test says, and notes them."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self._answers = list(answers)
        self.requests: list[str] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        status, headers, body = self._answers.pop(0)
        headers = {"Content-Length": str(len(body)), "Connection": "close"} | headers
        lines = [f"HTTP/1.1 {status} canned", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        writer.close()


@awaited
async def test_google_cloud_storage_gets_the_range_and_the_etag():
    headers = {"ETag": '"e1"', "Last-Modified": "Wed, 18 Nov 2026 00:00:00 GMT", "Content-Range": "bytes 4-9/10"}
    server = CannedServer((206, headers, b"456789"), (412, {}, b""), (403, {}, b""), (404, {}, b""), (404, {}, b""))
    async with server as endpoint, store_at(f"gs://bucket?endpoint={endpoint}&anonymous=true") as store:
        stream = await store.get("a b/é", 4, '"e1"')
        assert stream is not None
        assert (stream.etag, stream.size, [chunk async for chunk in stream.chunks]) == ('"e1"', 10, [b"456789"])
        with pytest.raises(ObjectReplacedError):
            await store.get("o", 4, '"e1"')
        with pytest.raises(ObjectAccessError):
            await store.get("o")
        with pytest.raises(UnavailableError, match="its bucket does not answer either"):
            await store.get("o")
    assert server.requests[0].startswith("get /bucket/a%20b%2f%c3%a9 ")
    assert 'if-match: "e1"\r\n' in server.requests[0]
    assert "range: bytes=4-\r\n" in server.requests[0]


def test_a_missing_client_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "keywise.adapters.obstore.store")
    with pytest.raises(
        MissingExtraError, match=r"needs obstore, which is not installed; run: pip install 'keywise\[objects\]'"
    ):
        store_at("memory://")
