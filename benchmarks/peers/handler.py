"""The one-change handler of all contenders, noted in the log: one upsert by itself, or nothing."""

from typing import Any, Self

import asyncpg

from benchmarks import workload
from benchmarks.peers.place import Handler, Place
from benchmarks.peers.record import Kind, Recorder, clock_ns
from benchmarks.peers.store import UPSERT


class Writer:
    """Writes changes with connections of its own; with the no-op handler it has none, and only notes the calls."""

    def __init__(self, place: Place, connections: int, kind: Kind = Kind.WROTE) -> None:
        self.recorder = Recorder(place.log)
        self._place = place
        self._connections = connections
        self._kind = kind
        self._pool: Any = None

    async def __aenter__(self) -> Self:
        if self._place.handler is Handler.UPSERT:
            # Without the round trip with which the pool cleans a connection after each use: there is nothing to clean.
            size = self._connections
            self._pool = await asyncpg.create_pool(self._place.postgres, min_size=size, max_size=size, reset=_nothing)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def write_body(self, body: bytes | str) -> None:
        """For queues that know nothing of keys and versions."""
        change = workload.decode(body)
        await self.write(change.content_id, change.payload_version, body)

    async def write(self, key: str, version: int, body: bytes | str) -> None:
        began_ns = clock_ns()
        if self._pool is not None:
            text = body if isinstance(body, str) else body.decode()
            await self._pool.execute(UPSERT, key, version, text)
        self.recorder.note(self._kind, key, version, began_ns)


async def _nothing(connection: object) -> None:
    pass
