"""A simulated object store: its objects are put, replaced and deleted while workers read them."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self

import msgspec

from keywise.core.errors import ObjectAccessError, ObjectReplacedError, UnavailableError
from keywise.core.object_store import ListedObject, ObjectStream
from keywise.testing.fault_injector import FaultInjector
from keywise.testing.lossy_link import LossyLink

BAD_RECORD = b'{"bad'
"""A line that is no JSON."""
CHUNK_BYTES = (20, 200)


class ObjectContent(msgspec.Struct):
    """One content of an object, and what happens to those who write its records."""

    name: str
    etag: str
    records: list[bytes]
    bad: frozenset[int] = frozenset()
    """The ordinals of records that cannot be read."""
    refused: frozenset[int] = frozenset()
    """The ordinals of records that the sink refuses."""
    chunk_s: float = 0.0
    """How long the store takes for each chunk."""
    dies_at_each_part: bool = False
    """The worker is killed whenever it comes to a new position."""
    failures_left: dict[int, int] = {}
    """How often each record fails before it can be written: not so often that the object becomes a dead letter."""
    poison: int | None = None
    """This record fails until the object has become a dead letter."""
    poison_kills: bool = False
    is_healed: bool = False
    replaced_at: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(record + b"\n" for record in self.records)

    @property
    def good(self) -> dict[int, bytes]:
        """The records that the sink should hold, by ordinal."""
        return {
            ordinal: record
            for ordinal, record in enumerate(self.records)
            if ordinal not in self.bad and ordinal not in self.refused
        }


class RecordBody(msgspec.Struct):
    """What the body of a simulated record says: where it comes from."""

    etag: str
    ordinal: int


class SimulatedStore:
    """The server: what it has, since when it shows that, and whether it answers at all."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self._now = now
        self._rng = rng
        self.objects: dict[str, ObjectContent] = {}
        self.contents: dict[str, ObjectContent] = {}
        """Every content that was ever put, by ETag."""
        self.visible_at: dict[str, float] = {}
        """From when on an object that exists can be read."""
        self.away_until = 0.0
        self.refuses_until = 0.0

    def put(self, content: ObjectContent, lag_s: float) -> None:
        self._replace(content.name)
        self.objects[content.name] = self.contents[content.etag] = content
        self.visible_at[content.name] = self._now() + lag_s

    def delete(self, name: str) -> None:
        self._replace(name)
        self.objects.pop(name, None)

    def content_of(self, body: bytes) -> tuple[ObjectContent, int]:
        """Return the content that a record came from, and its ordinal there."""
        record = msgspec.json.decode(body, type=RecordBody)
        return self.contents[record.etag], record.ordinal

    def is_lasting(self, name: str, since: float) -> bool:
        """Whether the object could be read at any time since then."""
        return name in self.objects and self.visible_at[name] <= since

    async def open(self, name: str, if_match: str) -> ObjectContent | None:
        self.check_answers()
        content = self.objects.get(name)
        if content is None or self._now() < self.visible_at[name]:
            return None
        if if_match and content.etag != if_match:
            raise ObjectReplacedError(f"{name!r} was replaced")
        return content

    def check_answers(self) -> None:
        if self._now() < self.away_until:
            raise UnavailableError("the store is away")
        if self._now() < self.refuses_until:
            raise ObjectAccessError("the store refuses the request")

    def _replace(self, name: str) -> None:
        if (before := self.objects.get(name)) is not None:
            before.replaced_at = self._now()


class LinkedStore:
    """The store as one process sees it."""

    def __init__(self, link: LossyLink, store: SimulatedStore, faults: FaultInjector, broken_rate: float) -> None:
        self._link = link
        self._store = store
        self._faults = faults
        self._broken_rate = broken_rate

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        content = await self._link.call(lambda: self._store.open(name, if_match))
        if content is None:
            return None
        return ObjectStream(content.etag, len(content.body), self._chunks(content, start))

    def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        raise NotImplementedError("no worker lists the store")

    async def _chunks(self, content: ObjectContent, start: int) -> AsyncGenerator[bytes, None]:
        """Some stores notice that the object is replaced meanwhile, and others go on with what it was."""
        body, size = content.body, self._faults.rng.randint(*CHUNK_BYTES)
        notices = self._faults.rng.random() < 0.5
        for at in range(start, len(body), size):
            await asyncio.sleep(content.chunk_s)
            if self._faults.happens("broken stream", self._broken_rate):
                raise UnavailableError("the connection was lost")
            self._store.check_answers()
            if notices and content.replaced_at is not None:
                raise ObjectReplacedError(f"{content.name!r} was replaced while it was read")
            yield body[at : at + size]
