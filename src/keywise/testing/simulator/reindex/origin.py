"""A simulated origin: rows that are edited while they are read, and that readers see some time after their messages."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from keywise.core.errors import ThrottledError, UnavailableError
from keywise.core.origin import Page, Shard
from keywise.testing.lossy_link import LossyLink

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld


class RowBody(msgspec.Struct, frozen=True):
    """A row, and the message that announces it."""

    id: str
    v: int
    state: str = "there"


class RowVersion(msgspec.Struct, frozen=True):
    """One version of a row, or its deletion, and since when readers see it."""

    version: int
    is_there: bool
    visible_at: float


class SimulatedOrigin:
    """The server: every version that each row ever had."""

    def __init__(self, now: Callable[[], float], rng: random.Random, shards: int) -> None:
        self._now = now
        self._rng = rng
        self._shards = shards
        self.rows: dict[str, list[RowVersion]] = {}
        self.away_until = 0.0
        self._versions = 0

    def edit(self, key: str, *, is_there: bool, lag_s: float) -> RowVersion:
        """Store a new version, which readers see after `lag_s`, and not before the version that it replaces."""
        self._versions += 1
        before = self.rows.setdefault(key, [])
        visible_at = max(self._now() + lag_s, before[-1].visible_at if before else 0.0)
        before.append(RowVersion(self._versions, is_there, visible_at))
        return before[-1]

    @property
    def visible_at(self) -> float:
        """From when on readers see every version that there is."""
        return max((versions[-1].visible_at for versions in self.rows.values()), default=0.0)

    def latest(self, key: str) -> RowVersion | None:
        """Return the truth, whether readers see it or not."""
        versions = self.rows.get(key)
        return versions[-1] if versions else None

    def seen(self, key: str, at: float) -> RowVersion | None:
        """Return what a reader finds at a moment."""
        found = [one for one in self.rows.get(key, ()) if one.visible_at <= at]
        return found[-1] if found else None

    def steady(self, key: str, since: float) -> RowVersion | None:
        """Return what readers have seen of a row at a moment, if its key had a row at every moment since then."""
        seen = self.seen(key, since)
        later = [one for one in self.rows[key] if since < one.visible_at <= self._now()]
        return seen if seen is not None and all(one.is_there for one in (seen, *later)) else None

    def last_key(self, name: str, shard: Shard, number: int) -> str:
        """Return a key of a shard; with a name after that of its other keys, it is the last one."""
        return f"{name}-{number * self._shards + int(shard.bounds)}"

    def shards(self) -> list[Shard]:
        return [Shard(f"s{number}", str(number)) for number in range(self._shards)]

    def page(self, shard: Shard, after: str, limit: int) -> Page:
        """Return a few rows; origins may return fewer than the limit, or none though more follow."""
        now = self._now()
        keys = [key for key in sorted(self.rows) if self._shard_of(key) == int(shard.bounds) and key > after]
        some = keys[: min(limit, self._rng.choice((1, 2, 2, 3)))]
        rows = [self.body(key, one) for key in some if (one := self.seen(key, now)) is not None and one.is_there]
        is_last = len(some) == len(keys)
        return Page(rows, some[-1] if some else after or "end", is_last)

    def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        now = self._now()
        found = {key: self.seen(key, now) for key in keys}
        return {key: self.body(key, one) for key, one in found.items() if one is not None and one.is_there}

    def body(self, key: str, one: RowVersion) -> bytes:
        return msgspec.json.encode(RowBody(key, one.version, "there" if one.is_there else "gone"))

    def _shard_of(self, key: str) -> int:
        return int(key.rsplit("-", 1)[1]) % self._shards


class LinkedOrigin:
    """The origin as one process sees it."""

    def __init__(self, link: LossyLink, world: "ReindexWorld") -> None:
        self._link = link
        self._world = world
        self._server = world.origin
        self.is_consistent = world.is_consistent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def shards(self, size: int) -> Sequence[Shard]:
        async def act() -> Sequence[Shard]:
            return self._server.shards()

        return await self._link.call(act)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        async def act() -> Page:
            self._meet_faults()
            self._world.strays.reading(shard)
            return self._server.page(shard, after, limit)

        page = await self._link.call(act)
        self._world.auditor.page_read(self._link.process, shard.name, after, page)
        return page

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        async def act() -> Mapping[str, bytes]:
            self._meet_faults()
            return self._server.fetch(keys)

        return await self._link.call(act)

    def _meet_faults(self) -> None:
        faults = self._world.faults
        if self._world.now() < self._server.away_until and not faults.is_over:
            raise UnavailableError("the origin is away")
        if faults.happens("origin throttles", faults.throttle_rate):
            raise ThrottledError("the origin throttles")
        if faults.happens("origin fails", faults.fail_rate):
            raise RuntimeError("the origin has an error of its own")
