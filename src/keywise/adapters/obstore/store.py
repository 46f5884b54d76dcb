"""Reads objects of `s3://`, `gs://`, `file://` and `memory://`."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import GCSStore, LocalStore, MemoryStore, S3Store

from keywise.core.errors import (
    AddressError,
    KeywiseError,
    ObjectAccessError,
    ObjectError,
    ObjectReplacedError,
    UnavailableError,
)
from keywise.core.object_store import ListedObject, ObjectStore, ObjectStream
from keywise.core.url import Address, redacted

CHUNK_BYTES = 1024 * 1024
"""The least size of a chunk, except the last. Smaller ones cost more CPU per byte."""
PAGE_OBJECTS = 1000
"""The most objects of one page of a listing; Amazon S3 has the same limit."""
CONNECT_S, READ_S, STREAM_DAYS = 5, 30, 30
"""Limits for connecting, for the next bytes, and for a whole stream: it is open for as long as its records are written.
"""

Client = S3Store | GCSStore | LocalStore | MemoryStore


class BucketStore:
    """A bucket, or the memory of this process: the client streams an object from one request."""

    def __init__(self, url: str, make: Any) -> None:
        self._url = url
        self._make = make

    async def __aenter__(self) -> Self:
        with _errors_of(self._url):
            self.client: Client = self._make()
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        _check_name(name, self._url)
        options: dict[str, Any] = {"if_match": if_match} if if_match else {}
        if start:
            options["range"] = {"offset": start}
        try:
            with _errors_of(self._url, name):
                found = await obstore.get_async(self.client, name, options=options)  # type: ignore[arg-type]
        except FileNotFoundError:
            await self._check_answers(name)
            return None
        except UnavailableError:
            # A range that starts at the end is refused like any other mistake, and each store words it differently.
            if start and (empty := await self._behind_end(name, start, if_match)):
                return empty
            raise
        etag, size = _identity(found.meta, self._url)
        return ObjectStream(etag, size, self._chunks(found, name, size))

    async def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        # The client knows prefixes that end at a slash only.
        folder = prefix.rpartition("/")[0]
        pages = self.client.list(folder or None, offset=after or None, chunk_size=PAGE_OBJECTS)
        with _errors_of(self._url):
            async for page in pages:
                listed = [_listed(meta, self._url) for meta in page]
                if wanted := [one for one in listed if one.name.startswith(prefix)]:
                    yield wanted

    async def _chunks(self, found: Any, name: str, size: int) -> AsyncGenerator[bytes, None]:
        try:
            with _errors_of(self._url, name):
                if size <= CHUNK_BYTES:
                    # Each chunk of a stream, and its end, comes from another thread.
                    if content := (await found.bytes_async()).to_bytes():
                        yield content
                    return
                async for chunk in found.stream(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:
            raise ObjectReplacedError(f"{redacted(self._url)}: {name!r} was removed while it was read") from None

    async def _behind_end(self, name: str, start: int, if_match: str) -> ObjectStream | None:
        options: dict[str, Any] = {"head": True, **({"if_match": if_match} if if_match else {})}
        try:
            with _errors_of(self._url, name):
                found = await obstore.get_async(self.client, name, options=options)  # type: ignore[arg-type]
        except FileNotFoundError:
            return None
        etag, size = _identity(found.meta, self._url)
        return ObjectStream(etag, size, _nothing()) if start >= size else None

    async def _check_answers(self, name: str) -> None:
        """Return if the bucket answers; a bucket that is missing answers for each object as if only that was."""
        try:
            with _errors_of(self._url):
                # No object has such a name, so the answer is short.
                async for _ in self.client.list(f"{name}/", chunk_size=1):
                    break
        except ObjectAccessError as error:
            raise ObjectAccessError(
                f"{redacted(self._url)} has no object {name!r}, or does not show it: the bucket may not be listed "
                "(s3:ListBucket, storage.objects.list), so nothing proves that the object is gone; grant that right"
            ) from error
        except UnavailableError as error:
            raise UnavailableError(
                f"{redacted(self._url)} has no object {name!r}, and its bucket does not answer either, so the object "
                f"does not count as gone; check the name of the bucket: {error}"
            ) from error


class FolderStore:
    """A folder: each chunk is a request of its own, so that a file that is changed in place is noticed."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder

    async def __aenter__(self) -> Self:
        if not await asyncio.to_thread(self._folder.is_dir):
            raise UnavailableError(f"{redacted(self._url)}: {self._folder} is no folder; create or mount it")
        with _errors_of(self._url):
            self.client = LocalStore(self._folder)
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        _check_name(name, self._url)
        try:
            first, etag, size = await self._read(name, start, if_match)
        except FileNotFoundError:
            await self._check_mounted(repr(name))
            return None
        return ObjectStream(etag, size, self._chunks(name, start, first, etag, size))

    async def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        page: list[ListedObject] = []
        async for one in self._walk(prefix.rpartition("/")[0], after):
            if one.name > after and one.name.startswith(prefix):
                page.append(one)
            if len(page) >= PAGE_OBJECTS:
                yield page
                page = []
        if page:
            yield page

    async def _chunks(self, name: str, start: int, first: bytes, etag: str, size: int) -> AsyncGenerator[bytes, None]:
        chunk, offset = first, start
        while chunk:
            yield chunk
            offset += len(chunk)
            if offset >= size:
                return
            try:
                chunk, _, _ = await self._read(name, offset, etag)
            except FileNotFoundError:
                raise ObjectReplacedError(f"{redacted(self._url)}: {name!r} was removed while it was read") from None

    async def _read(self, name: str, start: int, if_match: str) -> tuple[bytes, str, int]:
        """Return one chunk, and the ETag and the size of the file; no bytes at its end."""
        options: dict[str, Any] = {"if_match": if_match} if if_match else {}
        try:
            with _errors_of(self._url, name):
                window = {"range": (start, start + CHUNK_BYTES)}
                found = await obstore.get_async(self.client, name, options=options | window)  # type: ignore[arg-type]
                etag, size = _identity(found.meta, self._url)
                content = (await found.bytes_async()).to_bytes()
        except UnavailableError:
            # The client refuses a range that starts at the end, also at byte 0 of an empty file.
            with _errors_of(self._url, name):
                found = await obstore.get_async(self.client, name, options=options | {"head": True})  # type: ignore[arg-type]
            etag, size = _identity(found.meta, self._url)
            if start < size:
                raise
            return b"", etag, size
        if start + len(content) < min(start + CHUNK_BYTES, size):
            raise ObjectReplacedError(f"{redacted(self._url)}: {name!r} became shorter while it was read")
        return content, etag, size

    async def _walk(self, folder: str, after: str) -> AsyncIterator[ListedObject]:
        """Yield the files below a folder by name. Only the names of the open folders are in memory."""
        with _errors_of(self._url):
            found = await obstore.list_with_delimiter_async(self.client, folder or None)
        if not folder and not found["objects"] and not found["common_prefixes"]:
            await self._check_mounted("a listing")
        files = {meta["path"]: _listed(meta, self._url) for meta in found["objects"]}
        # `a/b` is above `a.txt`, so a folder has its place by the name with its slash.
        folders = {f"{path}/" for path in found["common_prefixes"]}
        for name in sorted({*files, *folders}):
            if name in files:
                yield files[name]
            elif name > after or after.startswith(name):
                async for one in self._walk(name.removesuffix("/"), after):
                    yield one

    async def _check_mounted(self, what: str) -> None:
        """Raise if the folder is missing or empty: that is how the place of an unmounted file system looks."""
        if not await asyncio.to_thread(_has_entries, self._folder):
            raise UnavailableError(
                f"{redacted(self._url)}: {self._folder} is missing or empty, as if it was not mounted, so it gives no "
                f"answer about {what}; mount it, or put a file into it (for example .keep)"
            )


def connect(address: Address) -> ObjectStore:
    """`s3://BUCKET?endpoint=URL&region=NAME&anonymous=true`, `gs://BUCKET?endpoint=URL`, `file:///FOLDER`, `memory://`.

    Credentials come from the environment (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`) or from the machine.
    """
    if address.scheme == "file":
        return FolderStore(address.url, _folder_of(address))
    return BucketStore(address.url, _client_maker(address))


def _folder_of(address: Address) -> Path:
    address.take()
    if address.host or len(address.path) < 2:
        raise AddressError(
            f"{redacted(address.url)} names no folder; write three slashes and the whole path, "
            "for example file:///var/uploads"
        )
    return Path("/" + address.path.strip("/"))


def _client_maker(address: Address) -> Any:
    if address.scheme == "memory":
        address.take()
        store = address.shared(MemoryStore)
        return lambda: store
    known = ("endpoint", "region", "anonymous") if address.scheme == "s3" else ("endpoint", "anonymous")
    options = address.take(*known)
    _check_bucket(address)
    endpoint, anonymous = options.get("endpoint", ""), options.get("anonymous", "false")
    if anonymous not in ("true", "false"):
        raise AddressError(f"{redacted(address.url)}: anonymous is true or false")
    config: dict[str, Any] = {"skip_signature": True} if anonymous == "true" else {}
    if endpoint:
        config["endpoint" if address.scheme == "s3" else "base_url"] = endpoint
    if "region" in options:
        config["region"] = options["region"]
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=READ_S),
        "timeout": timedelta(days=STREAM_DAYS),
    }
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    kind = S3Store if address.scheme == "s3" else GCSStore
    # The flow decides when to try again.
    return lambda: kind(address.host, config=config, client_options=client, retry_config={"max_retries": 0})  # type: ignore[arg-type]


def _check_bucket(address: Address) -> None:
    url = redacted(address.url)
    if "@" in address.host:
        raise AddressError(
            f"{url} has credentials, which do not belong into a URL; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or GOOGLE_APPLICATION_CREDENTIALS, in the environment"
        )
    if not address.host or address.path.strip("/"):
        raise AddressError(f"{url} has to name a bucket and no path; write for example {address.scheme}://uploads")


def _check_name(name: str, url: str) -> None:
    """Refuse what the client cannot ask for: it would read another object, or none."""
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts or re.search(r"[\x00-\x1f\x7f]", name):
        raise ObjectError(
            f"{redacted(url)}: the object {name!r} cannot be read, because of an empty part, a dot as a part or a "
            "control character in its name; copy it to another name"
        )


@contextmanager
def _errors_of(url: str, name: str = "") -> Iterator[None]:
    """Turn the client's errors into ours; `FileNotFoundError` is left to the caller."""
    try:
        yield
    except (KeywiseError, FileNotFoundError):
        raise
    except (BaseError, OSError, ValueError) as error:
        what = f"{redacted(url)}: {name!r}" if name else redacted(url)
        raise _translated(error, what) from error


def _translated(error: Exception, what: str) -> KeywiseError:
    # The rest of the text is a dump of the client's own values.
    text = str(error).partition("\n\nDebug source")[0].strip()
    status = re.search(r"status code: (\d{3})", text)
    code = int(status[1]) if status else 0
    if isinstance(error, PreconditionError) or code == 412:
        return ObjectReplacedError(f"{what} was replaced while it was read; it is read again from its start")
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if denied or code in (401, 403) or "os error 13" in text:
        return ObjectAccessError(
            f"{what} may not be read with these credentials; check them and their rights (s3:GetObject and "
            f"s3:ListBucket, storage.objects.get and storage.objects.list, or the mode of the file): {text}"
        )
    if isinstance(error, ValueError):
        return ObjectError(f"{what} cannot be read: {text}")
    return UnavailableError(f"{what} cannot be reached: {text}")


def _identity(meta: Any, url: str) -> tuple[str, int]:
    if not meta["e_tag"]:
        raise ObjectError(f"{redacted(url)} answers without an ETag, so a replaced object would not be noticed")
    return meta["e_tag"], meta["size"]


def _listed(meta: Any, url: str) -> ListedObject:
    return ListedObject(meta["path"], *_identity(meta, url))


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


async def _nothing() -> AsyncGenerator[bytes, None]:
    nothing: tuple[bytes, ...] = ()
    for chunk in nothing:
        yield chunk
