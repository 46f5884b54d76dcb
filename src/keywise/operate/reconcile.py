"""Reconciliation: compares the sink with the source of truth, key by key, while the pipeline may be running."""

import asyncio
import enum
import inspect
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from keywise.core.bodies import encoded
from keywise.core.change import Change, Order, is_unversioned
from keywise.core.entry import EMPTY, Entry
from keywise.core.errors import KeywiseError, MalformedError, SettingsError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.sink import Content, ReadableSink
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.refetch import needs_refetch, refetched

PAGE = 200
"""How many keys are compared at once."""
LOOKS = 3
"""How often a key is compared at most. A difference counts only if the key did not change during the comparison."""
LOOK_AGAIN_S = 0.5


class Kind(enum.StrEnum):
    """How the sink differs from the source of truth."""

    MISSING = "missing"
    EXTRA = "should be gone"
    OLDER = "older"
    NEWER = "newer"
    DIFFERENT = "different"
    FAILED = "failed"
    """The source of truth or the sink could not be read."""


class Difference(msgspec.Struct, frozen=True):
    """A key on which the sink and the source of truth differ."""

    key: str
    kind: Kind
    truth: int | None = None
    """The version in the source of truth, if there is one."""
    held: int | None = None
    """The version in the sink, if the sink stores versions."""
    detail: str = ""


class Reconciler:
    """One comparison of all keys of a pipeline."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        needs_refetch(pipeline)
        self._sink = pipeline.sink if isinstance(pipeline.sink, ReadableSink) else None
        if pipeline.lookup is None and self._sink is None:
            raise SettingsError(
                f"the sink of pipeline {pipeline.name!r} cannot be read; write a function that takes a key and returns "
                "what the store holds of it, or None if it is not there, and decorate it with .lookup"
            )
        self.keys_compared = 0
        self.keys_changing = 0
        """How many keys changed during every comparison, so that they cannot be judged."""
        self._pipeline = pipeline
        self._slots = asyncio.Semaphore(pipeline.settings.concurrency)

    async def differences(self, more: Iterable[str] = ()) -> AsyncIterator[Difference]:
        """Yield the differences of the keys that the ledger knows, and then of the keys in `more`."""
        async for page in self._pages(more):
            found = await asyncio.gather(*map(self._look, page), return_exceptions=True)
            self.keys_compared += len(page)
            for one in found:
                if isinstance(one, BaseException):
                    raise one
                if one is not None:
                    yield one

    async def _pages(self, more: Iterable[str]) -> AsyncIterator[Sequence[str]]:
        after, rest = "", iter(more)
        while page := await self._pipeline.control_store.keys(after, PAGE):
            yield page
            after = page[-1]
        while given := list(islice(rest, PAGE)):
            yield [key for key in dict.fromkeys(given) if await self._pipeline.admin.inspect(key) is None]

    async def _look(self, key: str) -> Difference | None:
        async with self._slots:
            for look in range(LOOKS):
                if look:
                    await asyncio.sleep(LOOK_AGAIN_S)
                before = await self._entry(key)
                found, truth = await self._compare(key, before)
                if found is None:
                    return None
                is_last = look == LOOKS - 1
                # The message with a version above the mark may still be in the queue; compare again later.
                is_behind = truth is not None and before.mark is not None and truth[1] > before.mark[1]
                if await self._is_calm(key, before) and (is_last or not is_behind):
                    return found
            self.keys_changing += 1
            return None

    async def _compare(self, key: str, entry: Entry) -> tuple[Difference | None, Order | None]:
        try:
            truth = await refetched(self._pipeline, key)
            held = await self._held(key)
        except UnavailableError:
            raise
        except Exception as error:
            cause = str(error) if isinstance(error, KeywiseError) else cause_of_error(error)
            return Difference(key, Kind.FAILED, detail=cause), None
        return difference(key, truth, held, entry), truth.order if truth is not None else None

    async def _held(self, key: str) -> Content | None:
        if self._pipeline.lookup is None:
            assert self._sink is not None, "one of the two can be read, or there is no reconciler"
            return (await self._sink.read([key])).get(key)
        value = self._pipeline.lookup(key)
        if inspect.isawaitable(value):
            value = await value
        if value is None:
            return None
        body = value if isinstance(value, Mapping) else encoded(value)
        return Content(body, self._version(body))

    def _version(self, body: Any) -> int | None:
        """Return the version in a stored body, if the store keeps it."""
        try:
            return self._pipeline.reader.read_one(encoded(body)).version
        except MalformedError:
            return None

    async def _entry(self, key: str) -> Entry:
        return await self._pipeline.admin.inspect(key) or EMPTY

    async def _is_calm(self, key: str, before: Entry) -> bool:
        """Whether the key has not changed, and no worker holds it."""
        after = await self._entry(key)
        is_held = after.token != 0 and after.lease_until > await self._pipeline.admin.now()
        return not is_held and (before.mark, before.deleted, before.token) == (after.mark, after.deleted, after.token)


def difference(key: str, truth: Change[Any] | None, held: Content | None, entry: Entry) -> Difference | None:
    """Return how the sink differs from the source of truth; None if it does not."""
    held_version = held.version if held is not None else None
    if truth is None or truth.deleted:
        return Difference(key, Kind.EXTRA, held=held_version) if held is not None else None
    if held is None:
        is_removed = entry.deleted and entry.mark is not None and not is_unversioned(entry.mark) and entry.mark[2] > 0
        detail = "an operator removed it" if is_removed else ""
        return Difference(key, Kind.MISSING, truth.version, detail=detail)
    if truth.version is not None and held_version is not None and truth.version != held_version:
        kind = Kind.OLDER if held_version < truth.version else Kind.NEWER
        return Difference(key, kind, truth.version, held_version)
    fields = differing(truth.body, held.body)
    if fields is None:
        return None
    return Difference(key, Kind.DIFFERENT, truth.version, held_version, ", ".join(fields))


def differing(truth: bytes, held: bytes | Mapping[str, Any]) -> list[str] | None:
    """Return the names of the fields that differ; None if nothing differs.

    The list is empty if the bodies differ and are not JSON objects.
    """
    if truth == held:
        return None
    expected = _decoded(truth)
    found = held if isinstance(held, Mapping) else _decoded(held)
    if not isinstance(expected, Mapping) or not isinstance(found, Mapping):
        return None if expected == found and expected is not _UNREADABLE else []
    # A store with only some of the fields (it returned a mapping) is compared in those only.
    names = found if isinstance(held, Mapping) else {**expected, **found}
    fields = sorted(str(name) for name in names if not _is_same(expected.get(name), found.get(name)))
    return fields or None


_UNREADABLE = object()


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError):
        return _UNREADABLE


def _is_same(expected: Any, found: Any) -> bool:
    """Compare two values; a list or an object may be stored as JSON text."""
    if isinstance(expected, list | dict) and isinstance(found, str):
        return bool(_decoded(found.encode()) == expected)
    return bool(expected == found)
